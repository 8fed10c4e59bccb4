"""Order of the samples of an epoch: each sample once in an evaluation, and numbered copies in training.

Streaming drops the samples of a stream that do not fill a global batch, and repeats samples if they do not divide
evenly over the devices. So a validation loss would depend on the number of devices.

A stream with `proportion`, `repeat` or `choose` above its size, or with fewer samples than a global batch, serves
samples repeatedly. Streaming passes one integer per sample from the order of the epoch to the reader. The integer here
is the *numbered id*, sample + occurrence * num_samples: the first copy in the order of the epoch has occurrence 0 and
the sample's own id. The order depends on seed and epoch only, hence so do occurrences, and not on ranks, workers or
resumption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from streaming.base.spanner import Spanner

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
    """Return the order of an evaluation, from the sample ids of each stream."""
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


class OccurrenceSpanner(Spanner):
    """Streaming's table of the shard and row of each sample, which also takes numbered ids."""

    def __init__(self, spanner: Spanner) -> None:
        self.__dict__.update(vars(spanner))

    def __getitem__(self, index: int) -> tuple[int, int]:
        return super().__getitem__(index % self.num_samples if index >= 0 else index)


def numbered_ids(sample_ids: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Return sample + occurrence * num_samples for each sample of an epoch, int64 [N].

    Args:
        sample_ids: Ids in the order of the epoch, in [0, num_samples), int64 [N].
    """
    if np.bincount(sample_ids).max(initial=0) <= 1:
        return sample_ids
    # Streaming's ids are sorted runs, which a stable sort merges without comparing all of them.
    order = np.argsort(sample_ids, kind='stable')
    ordered = sample_ids[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    position = np.arange(len(ordered))
    occurrence = position - np.maximum.accumulate(np.where(is_first, position, 0))
    numbered = np.empty_like(sample_ids)
    numbered[order] = ordered + occurrence * num_samples
    return numbered
