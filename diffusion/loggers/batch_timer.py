"""Smoothed duration of a training batch, for estimates of speed and remaining time."""

import math

HORIZON_SECONDS = 60.0
"""Time constant of the average: a batch this long ago has 1/e of the weight of the last one."""
MIN_KEEP = 0.9
"""Lower bound of the weight that older batches keep per batch, so that the average has about ten batches or more."""


class BatchTimer:
    """Exponential average of the durations of training batches, without the slow work between batches.

    A batch begins with the wait for its data and ends when its loss is known. The time until the next batch begins
    counts up to the duration of the batch before it: callbacks that run after every batch count, whereas evaluations,
    image grids and saves, which take much longer than a batch, do not. The first batch does not count either, since
    compilation and the start of the data loader make it slow.
    """

    def __init__(self) -> None:
        self._begin: float | None = None
        self._end: float | None = None
        self._gap = 0.0
        # Decayed sums. Their ratio is the average without the bias of a start value.
        self._seconds = 0.0
        self._batches = 0.0

    def begin(self, now: float) -> None:
        """Note the time in seconds when the wait for a batch begins."""
        self._begin = now
        self._gap = now - self._end if self._end is not None else 0.0

    def end(self, now: float) -> None:
        """Note the time in seconds when the loss of the batch is known."""
        first, self._end = self._end is None, now
        if first or self._begin is None:
            return
        batch = now - self._begin
        seconds = batch + min(self._gap, batch)
        keep = max(MIN_KEEP, math.exp(-seconds / HORIZON_SECONDS))
        self._seconds = keep * self._seconds + seconds
        self._batches = keep * self._batches + 1

    @property
    def seconds_per_batch(self) -> float | None:
        """Average duration of recent batches; None before the second batch."""
        return self._seconds / self._batches if self._seconds else None
