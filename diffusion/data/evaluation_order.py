"""Order of the samples of an evaluation: every sample once, on any number of devices.

Streaming drops the samples of a stream that do not fill a global batch, and repeats samples if they do not divide
evenly over the devices. So a validation loss would depend on the number of devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_SAMPLE = -1
"""Streaming's value for the absence of a sample."""


@dataclass(frozen=True)
class EvaluationOrder:
    """Samples of the batches of an evaluation.

    Args:
        batches: Sample ids, int64 [G, R, B], for G global batches, R ranks and B samples per rank. All samples of a
            global batch are of one stream. The places after the last sample of a stream repeat it.
        counts: Number of samples of each rank in each global batch that are not repetitions, int64 [G, R]. They come
            first.
    """

    batches: NDArray[np.int64]
    counts: NDArray[np.int64]

    def for_workers(self, workers: int) -> NDArray[np.int64]:
        """Return the samples of each worker in the order of serving, int64 [R, workers, samples].

        A DataLoader takes its batches from its workers in turn. Missing samples are `NO_SAMPLE`.
        """
        count, ranks, size = self.batches.shape
        turns = -(-count // workers)
        padded = np.full((turns * workers, ranks, size), NO_SAMPLE, dtype=np.int64)
        padded[:count] = self.batches
        return padded.reshape(turns, workers, ranks, size).transpose(2, 1, 0, 3).reshape(ranks, workers, turns * size)


def evaluation_order(samples: Sequence[NDArray[np.int64]], *, ranks: int, batch_size: int) -> EvaluationOrder:
    """Return the order of an evaluation.

    Args:
        samples: Sample ids of each stream.
        ranks: R, number of ranks.
        batch_size: B, samples per rank and batch.
    """
    size = ranks * batch_size
    batches, counts = [], []
    for ids in samples:
        missing = -len(ids) % size
        full = np.concatenate([ids, np.repeat(ids[-1:], missing)])
        # Neighbors go to different ranks, so that the ranks share the samples of an incomplete batch evenly.
        batches.append(full.reshape(-1, batch_size, ranks).transpose(0, 2, 1))
        own = np.full((len(full) // size, ranks), batch_size)
        own[-1] = [batch_size - (missing + rank) // ranks for rank in range(ranks)]
        counts.append(own)
    return EvaluationOrder(np.concatenate(batches), np.concatenate(counts))
