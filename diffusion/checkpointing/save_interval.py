"""Save intervals in seconds: fixed, or chosen from the duration of saves and the failures of the run."""

import logging
from pathlib import Path

from composer.core import Event, State, Time, TimeUnit
from composer.utils import dist

from diffusion.callbacks.preemption import is_last_batch
from diffusion.config.save_intervals import AUTO, is_time, seconds_of
from diffusion.errors import UserError
from diffusion.planning.checkpoints import chosen_interval, default_mtbf_hours, observed_mtbf_hours
from diffusion.runs.attempts import Attempt, read_attempts
from diffusion.storage.places import QUICK

log = logging.getLogger(__name__)

FIRST_STALL_SECONDS = 30.0
"""Assumed duration of a save before the first one has been measured."""
FAILURES = frozenset({'crash', 'killed', 'hang', 'hardware', 'lost'})
"""Causes of attempts that lose the work since the last checkpoint; a preempted attempt saves first."""
SAVES_PER_INTERVAL = 2
"""Least ratio of the interval to the duration of a save, writing in the background included."""
LOGGED_CHANGE = 0.1
"""Relative change of the interval that is logged."""


def check_interval(interval: object) -> None:
    """Raise UserError unless a value is a save interval: one of Composer's, a time such as `10m`, or `auto`."""
    if isinstance(interval, Time) or callable(interval) or is_time(interval):
        return
    way_out = 'use batches, such as 500ba, epochs, such as 1ep, a time, such as 10m, or auto'
    problem = f'save_interval: {interval!r} is not an interval; {way_out}'
    if not isinstance(interval, str | int) or isinstance(interval, bool):
        raise UserError(problem)
    try:
        value = Time.from_input(interval, TimeUnit.EPOCH).value
    except ValueError as error:
        raise UserError(problem) from error
    if value <= 0:  # Composer reads '' as 0 seconds, and never saves
        raise UserError(problem)


def timed_interval(interval: object, run: Path | str) -> 'TimedInterval | None':
    """Return the save interval of a time such as `10m` or of `auto`; None for Composer's durations. A collective.

    Args:
        run: The run's folder or URL.
    """
    if isinstance(interval, str) and interval == AUTO:  # a Time cannot be compared with 'auto'
        return AutoInterval(run)
    seconds = seconds_of(interval)
    return None if seconds is None else TimedInterval(seconds)


class TimedInterval:
    """Save interval in seconds of training, the same on all ranks: a `save_interval` of Composer's CheckpointSaver.

    Args:
        seconds: Time between the starts of two saves.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def __call__(self, state: State, event: Event) -> bool:
        """Return True if a checkpoint is due at this event."""
        if event not in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
            return False
        # Composer's clock has the time of rank 0 on every rank.
        now = state.timestamp.total_wct.total_seconds()
        if self._since is None:
            self._since = now - state.timestamp.batch_wct.total_seconds()
        if not is_last_batch(state) and now - self._since < self.seconds:
            return False
        self._since = now
        return True

    def saved(self, stall_seconds: float, save_seconds: float) -> None:
        """Record a save: the time for which it blocked training, and its duration; a collective."""


class AutoInterval(TimedInterval):
    """Save interval that loses the least time, within bounds: `trainer.save_interval: auto`.

    It follows from the duration of the latest saves and from the expected time between failures, which depends on the
    number of devices and on the attempts that the run's attempts.jsonl records.

    Args:
        run: The run's folder or URL.
    """

    def __init__(self, run: Path | str) -> None:
        super().__init__(seconds=0.0)
        self._run = run
        self._stall: float | None = None
        self._duration: float | None = None

    def __call__(self, state: State, event: Event) -> bool:
        # The constructor cannot choose, since it may run before the ranks can communicate.
        if not self.seconds:
            self._choose()
        return super().__call__(state, event)

    def saved(self, stall_seconds: float, save_seconds: float) -> None:
        # The average follows a file system that becomes slower, but not a single slow save.
        self._stall = stall_seconds if self._stall is None else (self._stall + stall_seconds) / 2
        self._duration = save_seconds if self._duration is None else (self._duration + save_seconds) / 2
        self._choose()

    def _choose(self) -> None:
        """Choose the interval on rank 0, for all ranks."""
        chosen = [0.0]
        if dist.get_global_rank() == 0:
            stall, mtbf_hours = self._stall or FIRST_STALL_SECONDS, self._mtbf_hours()
            # A save that is written in the background blocks little, but the next one waits for its end.
            shortest = SAVES_PER_INTERVAL * (self._duration or 0.0)
            chosen = [max(chosen_interval(stall=stall, mtbf=3600 * mtbf_hours), shortest)]
            if abs(chosen[0] - self.seconds) > LOGGED_CHANGE * self.seconds:
                said = (
                    'checkpoints every %.3g minutes: a save blocks training for %.3g s, and a failure is expected '
                    'every %.3g hours'
                )
                log.info(said, chosen[0] / 60, stall, mtbf_hours)
        dist.broadcast_object_list(chosen, src=0)
        self.seconds = chosen[0]

    def _mtbf_hours(self) -> float:
        """Return the expected hours between failures of this run."""
        prior = default_mtbf_hours(dist.get_world_size())
        attempts: list[Attempt] = []
        try:
            attempts = read_attempts(self._run, QUICK)
        except OSError as error:  # the next save asks again
            log.warning('%s: the failures of this run cannot be read (%s)', self._run, error)
        except UserError:  # another program trains, which records no attempts
            pass
        # The last record is that of this attempt, which has not ended.
        failures = sum(each.cause in FAILURES for each in attempts[:-1])
        hours = sum(max(0.0, each.end - each.begin) for each in attempts) / 3600
        return observed_mtbf_hours(prior_hours=prior, failures=failures, hours=hours)
