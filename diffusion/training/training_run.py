"""The run that a process trains: its lock, the record of this attempt, notifications, and copies in an object store."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from composer.core import Callback

from diffusion.callbacks.loss_guard import LossGuard
from diffusion.callbacks.nan_guard import NaNGuard
from diffusion.callbacks.preemption import Preemption
from diffusion.callbacks.status_updates import RunStatus
from diffusion.checkpointing.bucket_storage import BucketStorage
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.checkpointing.run_mirror import MIRROR_RETRY, RunMirror, mirrored, try_to_push
from diffusion.config.recipe import NotifyConfig
from diffusion.errors import DataError, ExternalError, UserError, exit_status
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, INTERRUPTED, PREEMPTED, HardwareFault, Preempted
from diffusion.runs import attempts
from diffusion.runs.attempts import Attempt, Clock
from diffusion.runs.bounded_call import within_limit
from diffusion.runs.notify import NUMBER_VARIABLE, TRAINING_EVENTS, Notifier
from diffusion.runs.run_lock import LOCK_HELD_VARIABLE, hold_run_lock
from diffusion.runs.stop_signals import StoppedEarly, signal_of_exit
from diffusion.storage.places import is_url

_MAX_DETAIL = 300
"""Maximum length of an error message in the record, in characters."""
INTERRUPT_SECONDS = 1.0
"""Maximum time for recording a second Ctrl-C, and again for a notification about it: the process must end soon."""


@dataclass
class TrainingRun:
    """The run that this process trains."""

    place: str
    """The run's folder or URL."""
    config: NotifyConfig
    """The `notify` section of the recipe."""
    hide: Callable[[str], str] = str
    """Function that removes secrets from a text."""
    attempt: Attempt | None = None
    """Record of this attempt, updated while training; None if the node entry point records it, or if not rank 0."""
    notifier: Notifier = field(init=False)
    """Sender of notifications about the run, such as `started` and `loss_guard`."""
    _mirror: RunMirror | None = None
    _clock: Clock = field(default_factory=Clock)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run's lock, record the attempt, send notifications and copy files to the store in a `with` block.

        Only rank 0 does this. If the node entry point started it, it only copies files and sends some notifications.
        """
        is_rank_zero = os.environ.get('RANK', '0') == '0'
        # If the run's place is a URL, copy the recipe, metrics and images from rank 0's working folder to it.
        copied = mirrored(self.place) if is_rank_zero and is_url(self.place) else contextlib.nullcontext()
        if is_rank_zero and LOCK_HELD_VARIABLE not in os.environ:
            with hold_run_lock(self.place), copied as self._mirror, self._recorded():
                yield
            return
        number, config = os.environ.get(NUMBER_VARIABLE), self.config if is_rank_zero else NotifyConfig()
        attempt = None if number is None else int(number)
        self.notifier = Notifier(config, self.place, events=TRAINING_EVENTS, attempt=attempt, hide=self.hide)
        with contextlib.closing(self.notifier), copied as self._mirror:
            yield

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Record in attempts.jsonl that an attempt began and how the `with` block ended, and send notifications."""
        try:
            number = attempts.next_number(attempts.read_attempts(self.place))
        except UserError:  # the file does not exist before the first attempt
            number = 1
        devices = int(os.environ.get('WORLD_SIZE', '1'))
        self.attempt = attempt = Attempt(number, self._clock.now(), launched=False, devices=devices)
        self._record('begin', attempt)
        self.notifier = Notifier(self.config, self.place, attempt=number, hide=self.hide)
        self.notifier.send('started', f'started attempt {number}')
        try:
            yield
        except BaseException as error:
            attempt.status, attempt.cause, attempt.detail = outcome_of(error, self.hide)
            raise
        else:
            attempt.status, attempt.cause = 0, 'done'
        finally:
            attempt.end = self._clock.now()
            self._record('end', attempt)
            self.notifier.send_end(attempt)
            self.notifier.check_goodput()
            self.notifier.close()

    def connect(self, callbacks: Sequence[Callback]) -> None:
        """Make callbacks update the attempt's record, send notifications, and upload small files before checkpoints."""
        for callback in callbacks:
            if isinstance(callback, RunStatus) and self.attempt is not None:
                callback.attempt, callback.on_record = self.attempt, self._record_progress
            elif isinstance(callback, Preemption) and self.attempt is not None:
                callback.on_interrupt = partial(self._record_interrupt, self.attempt)
            elif isinstance(callback, LossGuard | NaNGuard):
                callback.on_bad_batch = partial(self.notifier.send, 'loss_guard')
            elif isinstance(callback, Checkpointer):
                callback.failed_saves.on_failure = partial(self.notifier.send, 'checkpoint_failed')
                if self._mirror is not None and isinstance(callback.storage, BucketStorage):
                    # Upload small files before each checkpoint, so that a run that resumes elsewhere has its metrics.
                    callback.storage.before_publish = partial(try_to_push, self._mirror, MIRROR_RETRY)

    def _record_progress(self, attempt: Attempt) -> None:
        self._record('progress', attempt)
        self.notifier.check_goodput()

    def _record_interrupt(self, attempt: Attempt, loss: str) -> None:
        """Record that a second Ctrl-C ends this process, and send a notification; takes at most two seconds."""
        attempt.status, attempt.cause, attempt.end = INTERRUPTED, 'stopped', self._clock.now()
        attempt.detail = f'ended by a second Ctrl-C: {loss}'
        within_limit(lambda: self._record('end', attempt), INTERRUPT_SECONDS)
        self.notifier.send_end(attempt)
        self.notifier.close(INTERRUPT_SECONDS)

    def _record(self, event: str, attempt: Attempt) -> None:
        """Append the state of an attempt to attempts.jsonl; ignore storage faults, since training can continue."""
        with contextlib.suppress(OSError):
            attempts.append_attempt(self.place, event, attempt, self._clock)


def outcome_of(error: BaseException, hide: Callable[[str], str] = str) -> tuple[int, str, str]:
    """Return the exit status, cause (a key of `attempts.CAUSES`) and detail of a run that ended with this exception."""
    number = signal_of_exit(error)
    if number is not None:  # Composer's signal handler raised this while the Trainer was built
        error = StoppedEarly(number)
    lines = hide(str(error)).splitlines() or ['']  # hide secrets before the text is truncated
    if isinstance(error, Preempted | StoppedEarly):
        cause = 'stopped' if error.by_user else 'preempted'
        return PREEMPTED, cause, lines[0] if isinstance(error, StoppedEarly) else ''
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, 'stopped', 'interrupted'
    if isinstance(error, HardwareFault):
        return BAD_HARDWARE, 'hardware', lines[0][:_MAX_DETAIL]
    is_known = isinstance(error, UserError | DataError | ExternalError)
    status = exit_status(error) if is_known else FAILED
    cause = 'mistake' if status == CONFIG_ERROR else 'crash'
    name = '' if is_known else f'{type(error).__name__}: '
    return status, cause, (name + lines[0])[:_MAX_DETAIL]
