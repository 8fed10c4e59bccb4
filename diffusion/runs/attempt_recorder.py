"""Record an attempt of a training run that was started by `python run.py`, without the node entry point."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from diffusion.config.recipe import NotifyConfig
from diffusion.errors import DataError, ExternalError, UserError, exit_status
from diffusion.exit_codes import (
    BAD_HARDWARE,
    CONFIG_ERROR,
    FAILED,
    INTERRUPTED,
    PREEMPTED,
    HardwareFault,
    Preempted,
)
from diffusion.runs import attempts
from diffusion.runs.attempts import Attempt, Clock
from diffusion.runs.bounded_call import within_limit
from diffusion.runs.notify import Notifier, ended_values
from diffusion.runs.stop_signals import StoppedEarly, signal_of_exit

_MAX_DETAIL = 300
"""Maximum length of an error message in the record, in characters."""
INTERRUPT_SECONDS = 1.0
"""Maximum wait for recording a second Ctrl-C, and for its message, because the process must end immediately."""
_clock = Clock()


@contextlib.contextmanager
def recording_attempt(
    run: Path | str, config: NotifyConfig, hide: Callable[[str], str] = str
) -> Iterator[tuple[Attempt, Notifier]]:
    """Record in attempts.jsonl that an attempt began and how the `with` block ended, and send messages about it.

    For runs that it starts, the node entry point does this.

    Args:
        config: The `notify` section of the recipe.
        hide: Function that removes secrets from a text.

    Yields:
        The record of the attempt, and the notifier that sends its messages.
    """
    try:
        number = len(attempts.read_attempts(run))
    except UserError:  # there is no record before the first attempt
        number = 0
    attempt = Attempt(number, _clock.now(), launched=False, devices=int(os.environ.get('WORLD_SIZE', '1')))
    record(run, 'begin', attempt)
    notifier = Notifier(config, run, attempt=number, hide=hide)
    notifier.send('started', f'started attempt {number}')
    try:
        yield attempt, notifier
    except BaseException as error:
        attempt.status, attempt.cause, attempt.detail = outcome_of(error, hide)
        raise
    else:
        attempt.status, attempt.cause = 0, 'done'
    finally:
        attempt.end = _clock.now()
        record(run, 'end', attempt)
        _send_end(attempt, notifier)
        notifier.check_goodput()
        notifier.close()


def record_interrupt(run: Path | str, attempt: Attempt, notifier: Notifier, loss: str) -> None:
    """Record that a second Ctrl-C ends this process, and send a message about it; takes at most two seconds.

    `loss` is the result of `describe_loss`.
    """
    attempt.status, attempt.cause, attempt.end = INTERRUPTED, 'preempted', _clock.now()
    attempt.detail = f'ended by a second Ctrl-C: {loss}'
    within_limit(lambda: record(run, 'end', attempt), INTERRUPT_SECONDS)
    _send_end(attempt, notifier)
    notifier.close(INTERRUPT_SECONDS)


def _send_end(attempt: Attempt, notifier: Notifier) -> None:
    reason = attempts.describe_attempt(attempt.cause, attempt.detail)
    notifier.send('ended', f'ended: {reason}', **ended_values(attempt))


def record(run: Path | str, event: str, attempt: Attempt) -> None:
    """Append the state of an attempt to attempts.jsonl; ignore storage faults, since training can continue."""
    with contextlib.suppress(OSError):
        attempts.append_attempt(run, event, attempt, _clock)


def outcome_of(error: BaseException, hide: Callable[[str], str] = str) -> tuple[int, str, str]:
    """Return the exit status, cause (a key of `attempts.CAUSES`) and detail of a run that ended with this exception."""
    number = signal_of_exit(error)
    if number is not None:  # raised by Composer's signal handler while the Trainer is built
        error = StoppedEarly(number)
    lines = hide(str(error)).splitlines() or ['']  # hide secrets before the text is truncated
    if isinstance(error, Preempted | StoppedEarly):
        return PREEMPTED, 'preempted', lines[0] if isinstance(error, StoppedEarly) else ''
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, 'preempted', 'interrupted'
    if isinstance(error, HardwareFault):
        return BAD_HARDWARE, 'hardware', lines[0][:_MAX_DETAIL]
    is_known = isinstance(error, UserError | DataError | ExternalError)
    status = exit_status(error) if is_known else FAILED
    cause = 'mistake' if status == CONFIG_ERROR else 'crash'
    name = '' if is_known else f'{type(error).__name__}: '
    return status, cause, (name + lines[0])[:_MAX_DETAIL]
