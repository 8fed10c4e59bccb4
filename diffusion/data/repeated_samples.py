"""Occurrences of samples that an epoch serves more than once, so that each copy gets its own random draws.

A stream with `proportion`, `repeat` or `choose` above its size, or with fewer samples than a global batch, serves
samples repeatedly. Streaming passes one integer per sample from the order of the epoch to the reader. The integer here
is the *numbered id*, sample + occurrence * num_samples: the first copy in the order of the epoch has occurrence 0 and
the sample's own id. The order depends on seed and epoch only, hence so do occurrences, and not on ranks, workers or
resumption.
"""

import numpy as np
from numpy.typing import NDArray
from streaming.base.spanner import Spanner


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
