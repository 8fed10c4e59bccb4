"""The lock of a run's folder: two jobs that save into one folder would each resume from the other's checkpoints.

`run.lock` says whose the run is, and is written again every few seconds. Whether its owner lives is told by the process
where both are on one machine, and else by whether the file still changes: clocks of two machines differ, and file
systems of clusters have no locks to rely on.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch import environment

LOCK = 'run.lock'
HELD = 'DIFFUSION_RUN_LOCK'
"""Set where the node entry point has the lock for its processes."""
_NUMBERS = ('SLURM_JOB_ID', 'SKYPILOT_TASK_ID', 'TRAINING_JOB_NAME', 'RUN_NAME')
"""Schedulers' variables that stay the same when they restart a job."""
REFRESH_SECONDS = 5.0
WATCH_SECONDS = 120.0
"""Without a sign of life in which the owner is taken for dead; a file system that takes a checkpoint may be slow."""
SAME_JOB_SECONDS = 240.0
"""For an earlier attempt of the same job to end, of which the scheduler says that it has; the other nodes of this one
wait for five minutes."""


class Taken(UserError):
    """Another job has the folder.

    Attributes:
        again: Whether it seems to be an earlier attempt of this one, so that a later try may find it gone.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@dataclass(frozen=True)
class Owner:
    """Who has a lock."""

    token: str
    job: str
    """The job's name, or nothing."""
    number: str
    """The scheduler's number for the job, or nothing."""
    attempt: int
    """How often the scheduler has restarted it; -1 where it does not say."""
    host: str
    machine: str
    """A boot of a machine, and the processes that see each other there."""
    pid: int
    started: str
    """When the process was, by its machine's own count."""
    since: float

    @staticmethod
    def here(environ: Mapping[str, str]) -> 'Owner':
        """This process."""
        number = next((environ[name] for name in _NUMBERS if environ.get(name)), '')
        attempt = environ.get(environment.ATTEMPT, '')
        return Owner(
            uuid4().hex,
            environ.get(environment.JOB, ''),
            number,
            int(attempt) if attempt.isdigit() else -1,
            environment.machine_name(environ),
            _machine(),
            os.getpid(),
            started(os.getpid()),
            time.time(),
        )

    def follows(self, other: 'Owner') -> bool:
        """Whether this is a later attempt of the same job, so that the scheduler has ended the other one."""
        return bool(self.number) and self.number == other.number and self.attempt > other.attempt >= 0

    def may_follow(self, other: 'Owner') -> bool:
        """Whether this may be another attempt of the same job, by all that is known of both."""
        different = self.number and other.number and self.number != other.number
        return bool(self.job) and self.job == other.job and not different

    def lives(self) -> bool | None:
        """Whether the process is there; None where that cannot be seen from here."""
        if not self.machine or self.machine != _machine():
            return None
        return started(self.pid) == self.started

    def __str__(self) -> str:
        job = f'job {self.job}{f" ({self.number})" * bool(self.number)}, ' if self.job else ''
        since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))
        return f'{job}process {self.pid} on {self.host}, since {since}'


@contextlib.contextmanager
def held(
    run: Path, environ: Mapping[str, str] = os.environ, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Owner]:
    """Have the lock of a run's folder; a process that loses it to somebody ends at once.

    Args:
        run: The folder.
        environ: Of this job.
        stopped: Whether to stop waiting for an owner who may be dead.

    Raises:
        Taken: Another job has it, and lives.
    """
    own, path = Owner.here(environ), run / LOCK
    run.mkdir(parents=True, exist_ok=True)
    _wait_for(path, own, stopped)
    _write(path, own, 0)
    done = threading.Event()
    thread = threading.Thread(target=_refresh, args=(path, own, done), daemon=True)
    thread.start()
    try:
        yield own
    finally:
        done.set()
        thread.join()
        other = owner_of(path)
        if other is not None and other.token == own.token:
            path.unlink(missing_ok=True)


def owner_of(path: Path) -> Owner | None:
    """What a lock says; None where there is none, or nobody can read it."""
    return _owner_in(_content(path))


def _owner_in(content: str | None) -> Owner | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return Owner(**json.loads(content or '')['owner'])
    return None


def _wait_for(path: Path, own: Owner, stopped: Callable[[], bool]) -> None:
    """Until there is no owner, or he is known to be dead."""
    begin = changed = time.monotonic()
    content, told = _content(path), False
    while content is not None:
        other = _owner_in(content)
        if other is not None and (own.follows(other) or other.lives() is False):
            return
        now, newer = time.monotonic(), _content(path)
        if newer != content:
            content, changed = newer, now
        elif now - changed > WATCH_SECONDS:
            return
        if other is not None and (changed > begin or other.lives()):
            if stopped() or now - begin > _patience(own, other):
                raise Taken(
                    f'{path}: {other}, trains into this folder; wait for its end, or give this run another name '
                    '(name=...). When its owner is gone, the lock needs no removing',
                    again=own.may_follow(other),
                )
            if not told:
                told = True
                print(f'{path}: {other}, is still there; waiting for its end', file=sys.stderr, flush=True)
        if stopped():
            raise Taken(f'{path}: told to stop, before it was known whether its owner lives', again=True)
        time.sleep(min(0.5, REFRESH_SECONDS))


def _patience(own: Owner, other: Owner) -> float:
    """How long to wait for the end of somebody who lives: only an attempt of before is about to end."""
    if not own.may_follow(other):
        return 0.0
    return WATCH_SECONDS if other.lives() else SAME_JOB_SECONDS


def _refresh(path: Path, own: Owner, done: threading.Event) -> None:
    count = 0
    while not done.wait(REFRESH_SECONDS):
        other = owner_of(path)
        if other is not None and other.token != own.token:
            # Nothing that this process still writes would be right.
            print(f'error: {path}: {other}, has taken over; this process ends', file=sys.stderr, flush=True)
            os._exit(CONFIG_ERROR)
        count += 1
        with contextlib.suppress(OSError):  # the disk may be full, or gone for a while
            _write(path, own, count)


def _write(path: Path, own: Owner, count: int) -> None:
    # In place: a file system over a network shows a changed file sooner than another one by the same name.
    line: dict[str, Any] = {'owner': asdict(own), 'count': count, 'at': time.time()}
    content = json.dumps(line).encode() + b'\n'
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _content(path: Path) -> str | None:
    try:
        return path.read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:
        return None
    except OSError:  # of a file system over a network
        return ''


def _machine() -> str:
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def started(pid: int) -> str:
    """When a process was started, in ticks since the boot; nothing where it is not there, or dead."""
    try:
        content = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
    # The name of a program, the second field, may hold spaces and parentheses.
    state, *fields = content.rpartition(')')[2].split()
    return '' if state in 'ZX' else fields[18]
