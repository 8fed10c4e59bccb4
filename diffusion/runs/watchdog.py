"""Hang detection: no rank of a node has written a heartbeat within the time limit.

The timeout of collectives follows from the longest time limit, so that the watchdog ends a run that hangs before a
collective does: a collective that times out fails on the ranks that wait, not on the rank that hangs.
"""

import os
import statistics
from collections import deque
from collections.abc import Mapping

from diffusion.errors import UserError
from diffusion.runs import environment
from diffusion.runs.heartbeat_file import ATTEMPT_FOLDER_VARIABLE, SAVING, Beat

HANG_SECONDS = 900.0
"""Minimum time without a heartbeat that counts as a hang."""
MEDIAN_STEPS = 10
"""Number of median batch times without a heartbeat that must also have passed before it counts as a hang."""
SLOW_WORK_FACTOR = 4
"""Factor on the time limit during the first batch, saves and evaluations; also the upper bound of every limit, as a
multiple of the minimum time without a heartbeat."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""Time for the nodes to collect the stacks of their ranks, by which the timeout of collectives exceeds the longest time
limit of the watchdog."""
UNWATCHED_TIMEOUT_SECONDS = 1800.0
"""Timeout of collectives in a run without a watchdog. A save during which the other ranks wait must fit: 14 GB (SD2
with optimizer and one average) at 8 MB/s."""


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
        limit = max(typical, self.hang_seconds) * (SLOW_WORK_FACTOR if slow_work else 1)
        # Bound the limit: the timeout of collectives must be longer than every limit and is set before the first batch.
        return min(limit, longest_limit(self.hang_seconds))


def longest_limit(hang_seconds: float) -> float:
    """Return the upper bound in seconds of the time limits of a watchdog."""
    return SLOW_WORK_FACTOR * hang_seconds


def hang_seconds_of(environ: Mapping[str, str] = os.environ) -> float:
    """Return the minimum time without a heartbeat that counts as a hang in this job, in seconds.

    Raises:
        UserError: The environment variable is not a number above 0.
    """
    text = environ.get(environment.HANG_SECONDS, str(HANG_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float('inf'):
        raise UserError(f'{environment.HANG_SECONDS}: {text!r} is not a number of seconds above 0; correct or unset it')
    return seconds


def collective_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Return the default timeout in seconds of the collectives of a rank: longer than every limit of its watchdog.

    The environment is that of the rank. Only ranks that the node entry point started have a watchdog.
    """
    if ATTEMPT_FOLDER_VARIABLE not in environ:
        return UNWATCHED_TIMEOUT_SECONDS
    return longest_limit(hang_seconds_of(environ)) + COLLECTIVE_MARGIN_SECONDS


def early_timeout_warning(dist_timeout: float, hang_seconds: float) -> str | None:
    """Return a warning if a recipe's timeout of collectives is shorter than the watchdog's longest limit, else None."""
    # Warn instead of failing: the run is safe, since a collective that times out ends it with status 1 and the nodes
    # keep the stacks of the ranks that still run.
    longest = longest_limit(hang_seconds)
    if dist_timeout > longest:
        return None
    first = 'all hangs' if dist_timeout <= hang_seconds else 'hangs in saves, evaluations and the first batch'
    return (
        f"trainer.dist_timeout: {dist_timeout:g} s is shorter than the watchdog's limits of {hang_seconds:g} s "
        f'({longest:g} s for slow work), so {first} end as a failed collective on a rank that only waits; remove '
        f'dist_timeout, which gives {longest + COLLECTIVE_MARGIN_SECONDS:g} s, or lower hang_seconds'
    )
