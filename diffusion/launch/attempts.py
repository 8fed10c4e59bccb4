"""attempts.jsonl beside the checkpoints of a run: when it was tried, what ended it, and what that cost."""

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
"""So many that end at the same batch are enough, if they took long enough for an outage to pass."""
STUCK_SECONDS = 1800.0
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
    """One start of a run, by the clock of its first node.

    Attributes:
        number: 0 at first.
        begin: Seconds since 1970.
        end: Where it is not known, the time of the last batch.
        first: Batches done when the first batch of the attempt began; None where none began.
        first_at: When it began.
        last: Batches done in the end.
        last_at: When the last of them ended.
        status: The exit status.
        cause: A key of `CAUSES`.
        detail: For people.
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
    """Why an attempt ended, in words."""
    return CAUSES.get(cause, cause) + (f' ({detail})' if detail else '')


def append_attempt(run: Path, event: str, attempt: Attempt) -> None:
    """Add a line, in one write, so that a kill leaves no half of it but at the very end of the file."""
    run.mkdir(parents=True, exist_ok=True)
    # It begins a line even where a node was killed in the middle of its own.
    line = '\n' + json.dumps({'event': event, 'at': time.time()} | asdict(attempt)) + '\n'
    descriptor = os.open(run / ATTEMPTS, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_attempts(run: Path) -> list[Attempt]:
    """The attempts of a run, in order; of each what its last line says.

    Raises:
        UserError: The run has none.
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
            continue  # nothing, or half of what a node wrote that was killed
        if event != 'end':
            attempt.end = at
        found[attempt.number, attempt.begin] = attempt
    return list(found.values())


def hopeless(earlier: Sequence[Attempt], max_restarts: int) -> str | None:
    """Why a further attempt has no point, or None."""
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
    """Where the time between a run's first start and its end went, in seconds.

    Attributes:
        wall: In all.
        productive: In batches that count, those done again left out.
        starting: From an attempt's start to its first batch.
        redone: In batches that a later attempt did again.
        down: Between attempts.
        ending: From an attempt's last batch to its end.
    """

    wall: float
    productive: float = 0.0
    starting: float = 0.0
    redone: float = 0.0
    down: float = 0.0
    ending: float = 0.0

    @property
    def goodput(self) -> float:
        """Productive time over wall time."""
        return self.productive / self.wall if self.wall else 0.0


def account(attempts: Sequence[Attempt]) -> tuple[Account, dict[str, float]]:
    """Where the time went, and what was lost to each cause: its ending, the time down, the next start, work redone."""
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
    """Seconds before the first batch."""
    return (attempt.end if attempt.first is None else attempt.first_at) - attempt.begin


def _share_redone(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """The share of an attempt's batches that were done again."""
    starts = [each.first for each in later if each.first is not None]
    if attempt.first is None or attempt.last is None or attempt.last == attempt.first or not starts:
        return 0.0
    kept = min(max(min(starts), attempt.first), attempt.last)
    return (attempt.last - kept) / (attempt.last - attempt.first)


def report(run: Path) -> str:
    """A run's attempts and its goodput, for people.

    Raises:
        UserError: The run has none.
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
