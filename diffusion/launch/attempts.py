"""Attempts (starts and restarts) of a training run, recorded in its attempts.jsonl, and the resulting goodput."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError

ATTEMPTS = 'attempts.jsonl'
STUCK_ATTEMPTS = 3
"""Number of consecutive attempts that fail at the same batch, over at least STUCK_SECONDS, after which the run is given
up."""
STUCK_SECONDS = 1800.0
"""Minimum duration of these STUCK_ATTEMPTS attempts together, so that a shorter outage does not end the run."""
CAUSES = {
    'done': 'completed',
    'preempted': 'preempted',
    'crash': 'process failed',
    'killed': 'process killed',
    'hang': 'hang',
    'hardware': 'bad hardware',
    'mistake': 'user error',
    'lost': 'node lost without a report',
}
"""Description of each cause for which an attempt ends."""


@dataclass
class Attempt:
    """Record of one start or restart of a training run. Times are seconds since 1970 by the clock of the first node.

    Attributes:
        number: Index of the attempt within the run, from 0.
        begin: Time when the attempt began.
        end: Time when the attempt ended, or the time of its last record if the end was not recorded.
        first: Number of batches that the run had completed when the attempt began its first batch; None if it began
            none.
        first_at: Time when the first batch of the attempt began.
        last: Number of batches that the run had completed when the attempt ended.
        last_at: Time when the last batch of the attempt ended.
        status: Exit status, or None if it was not recorded.
        cause: Cause of the end, a key of `CAUSES`.
        detail: Further description of the cause, such as the ranks that failed.
    """

    number: int
    begin: float
    end: float = 0.0
    first: int | None = None
    first_at: float = 0.0
    last: int | None = None
    last_at: float = 0.0
    status: int | None = None
    cause: str = 'lost'
    detail: str = ''


def describe_attempt(cause: str, detail: str) -> str:
    """Return the cause of an attempt's end with its detail, such as 'process killed (rank 3 by SIGKILL)'."""
    return CAUSES.get(cause, cause) + (f' ({detail})' if detail else '')


def append_attempt(run: Path, event: str, attempt: Attempt) -> None:
    """Append the state of an attempt to attempts.jsonl in the run's folder; `event` is begin, progress or end."""
    run.mkdir(parents=True, exist_ok=True)
    # A killed node can leave a partial line. A single write() to a file opened with O_APPEND leaves it at the end of
    # the file only, and the leading newline keeps the next record off that line.
    line = '\n' + json.dumps({'event': event, 'at': time.time()} | asdict(attempt)) + '\n'
    # fsync, so that the record survives the loss of the node.
    descriptor = os.open(run / ATTEMPTS, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_attempts(run: Path) -> list[Attempt]:
    """Return the attempts recorded in attempts.jsonl of a run, in order, each with the values of its last record.

    Raises:
        UserError: The run has no attempts.jsonl.
    """
    path = run / ATTEMPTS
    if not path.exists():
        raise UserError(f'{path} does not exist; only runs started by diffusion launch record their attempts')
    found: dict[tuple[int, float], Attempt] = {}
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
            event, recorded_at = values.pop('event'), values.pop('at')
            attempt = Attempt(**values)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # an empty line, or a partial record of a killed node
        # Without an 'end' record the node was lost. Its last 'begin' or 'progress' record is the best estimate of the
        # end.
        if event != 'end':
            attempt.end = recorded_at
        found[attempt.number, attempt.begin] = attempt
    return list(found.values())


def reason_to_give_up(earlier: Sequence[Attempt], max_restarts: int) -> str | None:
    """Return the reason not to restart a run (no restarts left, or no progress in the last attempts), else None."""
    if len(earlier) > max_restarts:
        return f'all {max_restarts} restarts are used; raise max_restarts, or delete this file'
    last = earlier[-STUCK_ATTEMPTS:]
    # Preemption and bad hardware are no evidence of a broken run, since the next machines may get further. A run that
    # ends with 'mistake' is not restarted by default.
    failed = all(attempt.cause in ('crash', 'killed', 'hang', 'lost') for attempt in last)
    if len(last) < STUCK_ATTEMPTS or not failed or len({attempt.last for attempt in last}) > 1:
        return None
    if last[-1].end - last[0].begin < STUCK_SECONDS:
        return None
    position = 'before the first batch' if last[-1].last is None else f'after batch {last[-1].last}'
    return (
        f'the last {STUCK_ATTEMPTS} attempts ended {position} ({last[-1].detail}); fix the cause and delete this file'
    )


@dataclass
class TimeBreakdown:
    """Time from the first start of a training run to its end, in seconds by category.

    Attributes:
        wall: Total elapsed time.
        productive: Time in batches that no later attempt repeated.
        starting: Time from the start of each attempt to its first batch.
        redone: Time in batches that a later attempt repeated.
        down: Time between attempts.
        ending: Time from the last batch of each attempt to its end.
    """

    wall: float
    productive: float = 0.0
    starting: float = 0.0
    redone: float = 0.0
    down: float = 0.0
    ending: float = 0.0

    @property
    def goodput(self) -> float:
        """Fraction of the elapsed time spent in batches that no later attempt repeated."""
        return self.productive / self.wall if self.wall else 0.0


def time_breakdown(attempts: Sequence[Attempt]) -> tuple[TimeBreakdown, dict[str, float]]:
    """Return the time of a run by category, and the seconds lost to each cause for which its attempts ended.

    The lost time is that of shutdown, downtime, startup of the next attempt, and batches that had to be repeated.
    """
    found = TimeBreakdown(attempts[-1].end - attempts[0].begin)
    lost: dict[str, float] = defaultdict(float)
    for index, attempt in enumerate(attempts):
        later = attempts[index + 1 :]
        began = attempt.first is not None
        # The categories partition the elapsed time: each second of a run is counted once.
        training = attempt.last_at - attempt.first_at if began else 0.0
        ending = attempt.end - attempt.last_at if began else 0.0
        redone = _fraction_redone(attempt, later) * training
        down = later[0].begin - attempt.end if later else 0.0
        found.starting += _starting(attempt)
        found.productive += training - redone
        found.redone += redone
        found.ending += ending
        found.down += down
        if later:
            # Startup of the next attempt is charged to the cause too: without it, that would not have been needed.
            lost[attempt.cause] += ending + down + redone + _starting(later[0])
    return found, dict(lost)


def _starting(attempt: Attempt) -> float:
    """Return the seconds from the start of an attempt to its first batch, or to its end if it began no batch."""
    return (attempt.end if attempt.first is None else attempt.first_at) - attempt.begin


def _fraction_redone(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """Return the fraction of an attempt's batches that later attempts repeated."""
    starts = [each.first for each in later if each.first is not None]
    if attempt.first is None or attempt.last is None or attempt.last == attempt.first or not starts:
        return 0.0
    # The earliest later start counts: falling back to an older checkpoint repeats the batches of several attempts.
    kept = min(max(min(starts), attempt.first), attempt.last)
    return (attempt.last - kept) / (attempt.last - attempt.first)


def format_attempts_report(run: Path) -> str:
    """Return a text report of a run's attempts, its goodput and the time lost to each cause.

    Raises:
        UserError: The run has no attempts.jsonl.
    """
    attempts = read_attempts(run)
    found, lost = time_breakdown(attempts)
    lines = [f'{run}: {len(attempts)} attempt{"s" * (len(attempts) > 1)}']
    for attempt in attempts:
        batches = 'no batch' if attempt.first is None else f'batches {attempt.first} to {attempt.last}'
        status = '' if attempt.status is None else f', exit status {attempt.status}'
        begin = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(attempt.begin))
        reason = describe_attempt(attempt.cause, attempt.detail)
        duration = _format_duration(attempt.end - attempt.begin)
        lines.append(f'  {attempt.number:3d}  {begin}  {duration:>8}  {batches}; {reason}{status}')
    parts = {
        'productive': found.productive,
        'starting': found.starting,
        'repeated': found.redone,
        'ending': found.ending,
        'down': found.down,
    }
    shares = ', '.join(f'{name} {_format_duration(seconds)}' for name, seconds in parts.items())
    lines.append(f'goodput {found.goodput:.3f} of {_format_duration(found.wall)}: {shares}')
    for cause, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        if cause != 'done':
            lines.append(f'  time lost ({CAUSES.get(cause, cause)}): {_format_duration(seconds)}')
    return '\n'.join(lines)


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f'{seconds:.1f} s'
    return f'{seconds / 60:.1f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'
