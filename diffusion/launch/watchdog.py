"""Hang detection: no rank of a node has written a heartbeat within the time limit."""

import statistics
from collections import deque
from collections.abc import Mapping

from diffusion.launch.heartbeat_file import SAVING, Beat

HANG_SECONDS = 900.0
"""Minimum time without a heartbeat that counts as a hang."""
MEDIAN_STEPS = 10
"""Number of median batch times without a heartbeat that must also have passed before it counts as a hang."""
SLOW_WORK_FACTOR = 4
"""Factor on the time limit during the first batch, saves and evaluations."""


class Watchdog:
    """Estimates the batch time from heartbeats, and reports a hang if the next heartbeat is overdue.

    Args:
        begin: Start time of the processes, by the clock of their heartbeats.
        hang_seconds: Minimum time without a heartbeat that counts as a hang.
    """

    def __init__(self, begin: float, hang_seconds: float = HANG_SECONDS) -> None:
        self.hang_seconds = hang_seconds
        self._newest = Beat(begin, -1, SAVING, -1, begin)
        self._steps: deque[float] = deque(maxlen=100)

    def check(self, beats: Mapping[int, Beat], now: float) -> str | None:
        """Update the batch-time estimate from the last heartbeats; return a description of the hang if there is one."""
        # The newest heartbeat of all ranks counts. In a healthy run every rank waits for all others in each batch, so
        # one hung rank stops the heartbeats of all, and a rank that is merely slow does not look hung.
        newest = max([*beats.values(), self._newest])
        if newest.batch > self._newest.batch >= 0:
            self._steps.append((newest.at - self._newest.at) / (newest.batch - self._newest.batch))
        self._newest = newest
        limit = self.limit()
        if now - newest.at <= limit:
            return None
        since = 'the start' if newest.batch < 0 else f'batch {newest.batch}'
        return f'no heartbeat for {now - newest.at:.0f} s since {since} (limit {limit:.0f} s)'

    def limit(self) -> float:
        """Return the maximum time in seconds from the last heartbeat to the next; longer counts as a hang."""
        # The median is robust against single slow batches, such as those that include a save or an evaluation.
        typical = MEDIAN_STEPS * statistics.median(self._steps) if self._steps else 0.0
        # The first batch waits for cold shards and for the compiler; a save or an evaluation may take many batch times.
        slow_work = self._newest.doing == SAVING or self._newest.batch == self._newest.first
        return max(typical, self.hang_seconds) * (SLOW_WORK_FACTOR if slow_work else 1)
