"""Detection of hangs: no rank of a node has written a heartbeat for too long."""

import statistics
from collections import deque
from collections.abc import Mapping

from diffusion.launch.heartbeat_file import SAVING, Beat

PATIENCE_SECONDS = 900.0
"""Shortest time without a batch that counts as a hang."""
STEPS = 10
"""Number of usual batch times that must also have passed."""
LONGER = 4
"""Factor of the limit for the first batch, a save or an evaluation."""


class Watchdog:
    """Learns from heartbeats how long a batch takes, and reports when none has come for too long.

    Args:
        begin: Time when the processes were started, by the clock of their heartbeats.
        patience_seconds: Shortest time without a batch that counts as a hang.
    """

    def __init__(self, begin: float, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._newest = Beat(begin, -1, SAVING, -1, begin)
        self._steps: deque[float] = deque(maxlen=100)

    def check(self, beats: Mapping[int, Beat], now: float) -> str | None:
        """Take the ranks' last heartbeats, and describe the hang if there is one.

        The newest heartbeat counts: in a healthy run every rank waits for all others in each batch.
        """
        newest = max([*beats.values(), self._newest])
        if newest.batch > self._newest.batch >= 0:
            self._steps.append((newest.at - self._newest.at) / (newest.batch - self._newest.batch))
        self._newest = newest
        limit = self.limit()
        if now - newest.at <= limit:
            return None
        since = 'the start' if newest.batch < 0 else f'batch {newest.batch}'
        return f'nothing since {since} for {now - newest.at:.0f} s, {limit:.0f} are allowed'

    def limit(self) -> float:
        """Return the seconds that may pass until the next heartbeat."""
        usual = STEPS * statistics.median(self._steps) if self._steps else 0.0
        longer = self._newest.doing == SAVING or self._newest.batch == self._newest.first
        return max(usual, self.patience_seconds) * (LONGER if longer else 1)
