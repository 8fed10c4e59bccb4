"""Save policy: when a save is due, and how the run continues after a failed save."""

import logging
from collections.abc import Callable
from pathlib import Path

from composer.core import Event, State, Time, TimeUnit
from composer.loggers import Logger
from composer.utils import dist

from diffusion.checkpointing.checkpoint_writer import SaveFailed, way_out
from diffusion.checkpointing.run_storage import RunStorage
from diffusion.config.checkpointing import AUTO, KeepConfig, is_time, seconds_of
from diffusion.data.epoch_position import is_last_batch
from diffusion.errors import UserError
from diffusion.planning.checkpoints import chosen_interval, default_mtbf_hours, observed_mtbf_hours
from diffusion.runs.attempts import Attempt, read_attempts
from diffusion.storage.places import QUICK
from diffusion.storage.retry import DISK_FULL_ERRORS

log = logging.getLogger(__name__)

FIRST_STALL_SECONDS = 30.0
"""Assumed time for which a save blocks training, until the first save has been measured."""
FAILURES = frozenset({'crash', 'killed', 'hang', 'hardware', 'lost'})
"""Causes that end an attempt (one start of the run) without a save, so that work since the last checkpoint is lost."""
SAVES_PER_INTERVAL = 2
"""Minimum ratio of the save interval to the duration of a save, including background writing."""
LOGGED_CHANGE = 0.1
"""A new save interval is logged if it differs from the previous one by more than this fraction."""
MAX_FAILED_SAVES = 3
"""Number of consecutive failed saves that ends the run."""


def check_interval(interval: object) -> None:
    """Raise UserError unless a value is a save interval: a Composer interval, a time such as `10m`, or `auto`."""
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
    if value <= 0:  # Composer parses '' as 0 seconds and then never saves
        raise UserError(problem)


def timed_interval(interval: object, run: Path | str) -> 'TimedInterval | None':
    """Return a TimedInterval for a time such as `10m` or for `auto`; None for Composer's durations, such as `500ba`."""
    if isinstance(interval, str) and interval == AUTO:  # comparing a Time with 'auto' would raise
        return AutoInterval(run)
    seconds = seconds_of(interval)
    return None if seconds is None else TimedInterval(seconds)


class TimedInterval:
    """Save interval in seconds of training, the same on all ranks; a `save_interval` for Composer's CheckpointSaver."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since: float | None = None

    def __call__(self, state: State, event: Event) -> bool:
        """Return True if a checkpoint is due at this event."""
        if event not in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT):
            return False
        # All ranks have the same time, since Composer's clock takes it from rank 0.
        now = state.timestamp.total_wct.total_seconds()
        if self._since is None:
            self._since = now - state.timestamp.batch_wct.total_seconds()
        if not is_last_batch(state) and now - self._since < self.seconds:
            return False
        self._since = now
        return True

    def saved(self, stall_seconds: float, save_seconds: float) -> None:
        """Record how long a save blocked training, and its total duration; a collective."""


class AutoInterval(TimedInterval):
    """Save interval that minimizes lost time, within bounds: `trainer.save_interval: auto`.

    It is chosen from the duration of the latest saves and the expected time between failures. The latter depends on the
    number of devices and on the attempts recorded in the run's attempts.jsonl.
    """

    def __init__(self, run: Path | str) -> None:
        super().__init__(seconds=0.0)
        self._run = run
        self._stall: float | None = None
        self._duration: float | None = None

    def __call__(self, state: State, event: Event) -> bool:
        # The constructor cannot choose yet: it may run before the ranks can communicate.
        if not self.seconds:
            self._choose()
        return super().__call__(state, event)

    def saved(self, stall_seconds: float, save_seconds: float) -> None:
        # The average adapts to a file system that becomes slower, but not to a single slow save.
        self._stall = stall_seconds if self._stall is None else (self._stall + stall_seconds) / 2
        self._duration = save_seconds if self._duration is None else (self._duration + save_seconds) / 2
        self._choose()

    def _choose(self) -> None:
        """Choose the interval on rank 0, for all ranks."""
        chosen = [0.0]
        if dist.get_global_rank() == 0:
            stall, mtbf_hours = self._stall or FIRST_STALL_SECONDS, self._mtbf_hours()
            # Make the interval longer than a background save, since the next save must wait until it is complete.
            shortest = SAVES_PER_INTERVAL * (self._duration or 0.0)
            chosen = [max(chosen_interval(stall=stall, mtbf=3600 * mtbf_hours), shortest)]
            if abs(chosen[0] - self.seconds) > LOGGED_CHANGE * self.seconds:
                message = (
                    'checkpoints every %.3g minutes: a save blocks training for %.3g s, and a failure is expected '
                    'every %.3g hours'
                )
                log.info(message, chosen[0] / 60, stall, mtbf_hours)
        dist.broadcast_object_list(chosen, src=0)
        self.seconds = chosen[0]

    def _mtbf_hours(self) -> float:
        prior = default_mtbf_hours(dist.get_world_size())
        attempts: list[Attempt] = []
        try:
            attempts = read_attempts(self._run, QUICK)
        except OSError as error:  # the next save tries again
            log.warning('%s: the failures of this run cannot be read (%s)', self._run, error)
        except UserError:  # training was started by another program, which records no attempts
            pass
        # The last record is the current attempt, which has not ended.
        failures = sum(each.cause in FAILURES for each in attempts[:-1])
        hours = sum(max(0.0, each.end - each.begin) for each in attempts) / 3600
        return observed_mtbf_hours(prior_hours=prior, failures=failures, hours=hours)


class FailedSaves:
    """Counts a process's failed saves, which are the same on all ranks, and reports them on rank 0."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.on_failure = on_failure
        self.total = 0
        self._in_a_row = 0

    @property
    def next_is_last(self) -> bool:
        """True if the run ends when the next save fails."""
        return self._in_a_row + 1 >= MAX_FAILED_SAVES

    def succeeded(self) -> None:
        self._in_a_row = 0

    def continue_after(self, error: SaveFailed, logger: Logger) -> None:
        self._count(logger)
        count = f'failed save {self._in_a_row} of {MAX_FAILED_SAVES}'
        self._report(f'{error}; training continues to the next save ({count})')

    def end_after(self, error: SaveFailed, logger: Logger, newest: str) -> SaveFailed:
        """Count and report a failed save that ends the run; return the error to raise."""
        self._count(logger)
        row = f' ({self._in_a_row} saves in a row have failed)' if self._in_a_row > 1 else ''
        message = f'{error}{row}; newest checkpoint: {newest}; {way_out(error.errno)}'
        self._report(message)
        return SaveFailed(error.errno, message)

    def _count(self, logger: Logger) -> None:
        self.total += 1
        self._in_a_row += 1
        logger.log_metrics({'checkpoint/failed_saves': self.total})

    def _report(self, message: str) -> None:
        if dist.get_global_rank() == 0:
            log.error('%s', message)
            self.on_failure(message)


def make_room_after(error: SaveFailed, storage: RunStorage, keep: KeepConfig | None, batch: int) -> bool:
    """Remove old checkpoints after a save failed on a full disk; return True if a retry may succeed. A collective."""
    # The ranks may have hit different faults, but they must make room and retry together.
    if not any(dist.all_gather_object(error.errno in DISK_FULL_ERRORS)):
        return False
    removed = False
    try:
        removed = storage.make_room(keep, batch)
    except OSError as fault:
        log.warning('%s: old checkpoints are not removed (%s)', storage.place, fault)
    return any(dist.all_gather_object(removed))
