"""The attempts of a run in attempts.jsonl beside its checkpoints: when each began, why it ended, and the goodput."""

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
"""A run is given up after this many attempts that end at the same batch over at least STUCK_SECONDS."""
STUCK_SECONDS = 1800.0
"""Long enough for an outage to pass."""
CAUSES = {
    'done': 'it was done',
    'preempted': 'the machines were taken away',
    'crash': 'a process failed',
    'killed': 'a process was killed',
    'hang': 'no batch came',
    'hardware': 'a node was not fit',
    'mistake': 'the recipe is wrong',
    'lost': 'the node ended without a word',
}


@dataclass
class Attempt:
    """One start of a run. Times are seconds since 1970 by the clock of the job's first node.

    Attributes:
        number: Counts the run's attempts from 0.
        begin: Time when the attempt began.
        end: Time when it ended; if that was not recorded, the time of its last record.
        first: Batches the run had done when the attempt began its first batch; None if it began none.
        first_at: Time when that batch began.
        last: Batches the run had done at the attempt's end.
        last_at: Time when the last of them ended.
        status: The exit status, or None if it was not recorded.
        cause: A key of `CAUSES`.
        detail: More about the cause, for people.
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
    """Describe in words why an attempt ended."""
    return CAUSES.get(cause, cause) + (f' ({detail})' if detail else '')


def append_attempt(run: Path, event: str, attempt: Attempt) -> None:
    """Append a record in one write, so that a killed process can leave half a line only at the end of the file."""
    run.mkdir(parents=True, exist_ok=True)
    # The leading newline starts a line of its own even after half a line of a killed node.
    line = '\n' + json.dumps({'event': event, 'at': time.time()} | asdict(attempt)) + '\n'
    descriptor = os.open(run / ATTEMPTS, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_attempts(run: Path) -> list[Attempt]:
    """Read the attempts of a run in order, each as its last record has it.

    Raises:
        UserError: The run has no attempts.jsonl.
    """
    path = run / ATTEMPTS
    if not path.exists():
        raise UserError(f'{path}: is not there; only runs under diffusion launch keep an account of their attempts')
    found: dict[tuple[int, float], Attempt] = {}
    for line in path.read_text(encoding='utf-8').splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
            event, at = values.pop('event'), values.pop('at')
            attempt = Attempt(**values)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # an empty line, or half a record of a killed node
        if event != 'end':
            attempt.end = at
        found[attempt.number, attempt.begin] = attempt
    return list(found.values())


def reason_to_give_up(earlier: Sequence[Attempt], max_restarts: int) -> str | None:
    """Explain why another attempt would be useless: restarts used up, or no progress; None if it may help."""
    if len(earlier) > max_restarts:
        return f'all {max_restarts} restarts are used up; raise max_restarts, or remove the file'
    last = earlier[-STUCK_ATTEMPTS:]
    failed = all(attempt.cause in ('crash', 'killed', 'hang', 'lost') for attempt in last)
    if len(last) < STUCK_ATTEMPTS or not failed or len({attempt.last for attempt in last}) > 1:
        return None
    if last[-1].end - last[0].begin < STUCK_SECONDS:
        return None
    where = 'before the first batch' if last[-1].last is None else f'after batch {last[-1].last}'
    return f'the last {STUCK_ATTEMPTS} attempts ended {where} ({last[-1].detail}); mend that, and remove the file'


@dataclass
class Account:
    """Breakdown of the time between a run's first start and its end, in seconds.

    Attributes:
        wall: The whole time.
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
        """Share of the wall time that was productive."""
        return self.productive / self.wall if self.wall else 0.0


def account(attempts: Sequence[Attempt]) -> tuple[Account, dict[str, float]]:
    """Break down the time of a run, and sum what each cause cost: ending, downtime, next start and repeated batches."""
    found = Account(attempts[-1].end - attempts[0].begin)
    lost: dict[str, float] = defaultdict(float)
    for index, attempt in enumerate(attempts):
        later = attempts[index + 1 :]
        began = attempt.first is not None
        training = attempt.last_at - attempt.first_at if began else 0.0
        ending = attempt.end - attempt.last_at if began else 0.0
        redone = _share_redone(attempt, later) * training
        down = later[0].begin - attempt.end if later else 0.0
        found.starting += _starting(attempt)
        found.productive += training - redone
        found.redone += redone
        found.ending += ending
        found.down += down
        if later:
            lost[attempt.cause] += ending + down + redone + _starting(later[0])
    return found, dict(lost)


def _starting(attempt: Attempt) -> float:
    """Return the seconds before an attempt's first batch."""
    return (attempt.end if attempt.first is None else attempt.first_at) - attempt.begin


def _share_redone(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """Return the share of an attempt's batches that later attempts repeated."""
    starts = [each.first for each in later if each.first is not None]
    if attempt.first is None or attempt.last is None or attempt.last == attempt.first or not starts:
        return 0.0
    kept = min(max(min(starts), attempt.first), attempt.last)
    return (attempt.last - kept) / (attempt.last - attempt.first)


def report(run: Path) -> str:
    """Format a run's attempts, its goodput and the time lost to each cause, for people.

    Raises:
        UserError: The run has no attempts.jsonl.
    """
    attempts = read_attempts(run)
    found, lost = account(attempts)
    lines = [f'{run}: {len(attempts)} attempt{"s" * (len(attempts) > 1)}']
    for attempt in attempts:
        batches = 'no batch' if attempt.first is None else f'batches {attempt.first} to {attempt.last}'
        status = '' if attempt.status is None else f', exit status {attempt.status}'
        begin = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(attempt.begin))
        why = describe_attempt(attempt.cause, attempt.detail)
        took = _span(attempt.end - attempt.begin)
        lines.append(f'  {attempt.number:3d}  {begin}  {took:>8}  {batches}; {why}{status}')
    parts = {
        'productive': found.productive,
        'starting': found.starting,
        'done again': found.redone,
        'ending': found.ending,
        'down': found.down,
    }
    shares = ', '.join(f'{name} {_span(seconds)}' for name, seconds in parts.items())
    lines.append(f'goodput {found.goodput:.3f} of {_span(found.wall)}: {shares}')
    for cause, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        if cause != 'done':
            lines.append(f'  lost because {CAUSES.get(cause, cause)}: {_span(seconds)}')
    return '\n'.join(lines)


def _span(seconds: float) -> str:
    if seconds < 120:
        return f'{seconds:.1f} s'
    return f'{seconds / 60:.1f} min' if seconds < 7200 else f'{seconds / 3600:.1f} h'
