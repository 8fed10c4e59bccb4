"""Whether the processes of a node still make progress."""

import statistics
from collections import deque
from collections.abc import Mapping

from diffusion.launch.heartbeat import SAVING, Beat

PATIENCE_SECONDS = 900.0
"""Shortest time without a batch that counts as hung."""
STEPS = 10
"""Batches of the usual length that may be missing before it does."""
LONGER = 4
"""Times longer that the first batch, a save or an evaluation may take."""


class Watchdog:
    """Knows from beats how long a batch takes, and when it has taken too long.

    Args:
        begin: When the processes were started, by the clock of their beats.
        patience_seconds: Shortest time without a batch that counts as hung.
    """

    def __init__(self, begin: float, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self._newest = Beat(begin, -1, SAVING, -1, begin)
        self._steps: deque[float] = deque(maxlen=100)

    def look(self, beats: Mapping[int, Beat], now: float) -> str | None:
        """What is wrong, or None; every process of the node waits for every other one, so the newest beat counts."""
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
        """Seconds that may pass until the next beat."""
        usual = STEPS * statistics.median(self._steps) if self._steps else 0.0
        longer = self._newest.doing == SAVING or self._newest.batch == self._newest.first
        return max(usual, self.patience_seconds) * (LONGER if longer else 1)
