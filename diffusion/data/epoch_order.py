"""Order of the samples of an epoch: evaluation serves each sample once, and training numbers the copies of each sample.

Streaming drops the samples of a stream that do not fill a global batch, and repeats samples if they do not divide
evenly over the devices. With that order, a validation loss would depend on the number of devices.

In training, a stream repeats samples if `proportion`, `repeat` or `choose` asks for more than it has, or if it has
fewer than a global batch. Streaming passes one integer per sample to the reader. Here, this integer is the *numbered
id*, sample + occurrence * num_samples: the first copy of a sample in the epoch has occurrence 0, so its numbered id is
the sample id. The order and the occurrences depend only on seed and epoch, not on ranks, workers or resumption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from streaming.base.spanner import Spanner

NO_SAMPLE = -1
"""Value that Streaming uses for "no sample"."""


@dataclass(frozen=True)
class EvaluationOrder:
    """Sample ids of each batch of an evaluation.

    Args:
        batches: Sample ids, int64 [G, R, B], for G global batches, R ranks and B samples per rank. All samples of a
            global batch are from one stream. Slots after the last sample of a stream repeat that sample.
        counts: Number of samples per global batch and rank, not counting repetitions, which come last; int64 [G, R].
    """

    batches: NDArray[np.int64]
    counts: NDArray[np.int64]

    def for_workers(self, workers: int) -> NDArray[np.int64]:
        """Return the ids of each worker's samples in order, int64 [R, workers, samples], padded with `NO_SAMPLE`."""
        count, ranks, size = self.batches.shape
        turns = -(-count // workers)
        padded = np.full((turns * workers, ranks, size), NO_SAMPLE, dtype=np.int64)
        padded[:count] = self.batches
        return padded.reshape(turns, workers, ranks, size).transpose(2, 1, 0, 3).reshape(ranks, workers, turns * size)


def evaluation_order(samples: Sequence[NDArray[np.int64]], *, ranks: int, batch_size: int) -> EvaluationOrder:
    size = ranks * batch_size
    batches, counts = [], []
    for ids in samples:
        missing = -len(ids) % size
        full = np.concatenate([ids, np.repeat(ids[-1:], missing)])
        # Give consecutive samples to different ranks, so that an incomplete batch is spread evenly over the ranks.
        batches.append(full.reshape(-1, batch_size, ranks).transpose(0, 2, 1))
        own = np.full((len(full) // size, ranks), batch_size)
        own[-1] = [batch_size - (missing + rank) // ranks for rank in range(ranks)]
        counts.append(own)
    return EvaluationOrder(np.concatenate(batches), np.concatenate(counts))


class OccurrenceSpanner(Spanner):
    """Streaming's Spanner, which finds the shard and row of a sample id, extended to accept numbered ids."""

    def __init__(self, spanner: Spanner) -> None:
        self.__dict__.update(vars(spanner))

    def __getitem__(self, index: int) -> tuple[int, int]:
        return super().__getitem__(index % self.num_samples if index >= 0 else index)


def numbered_ids(sample_ids: NDArray[np.int64], num_samples: int) -> NDArray[np.int64]:
    """Return the numbered id, sample + occurrence * num_samples, for each sample id of an epoch, int64 [N]."""
    if np.bincount(sample_ids).max(initial=0) <= 1:
        return sample_ids
    # A stable sort (timsort for int64) is fast here, because Streaming's ids consist of sorted runs.
    order = np.argsort(sample_ids, kind='stable')
    ordered = sample_ids[order]
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    position = np.arange(len(ordered))
    occurrence = position - np.maximum.accumulate(np.where(is_first, position, 0))
    numbered = np.empty_like(sample_ids)
    numbered[order] = ordered + occurrence * num_samples
    return numbered
