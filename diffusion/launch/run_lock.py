"""The lock of a run's folder, because two jobs that save into one folder would resume from each other's checkpoints.

The file run.lock names its owner, who rewrites it every few seconds. On the owner's own machine another job looks for
the owner's process. From any other machine it can only see whether the file still changes: the clocks of two machines
differ, and the file systems of clusters have no locks to rely on.
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
"""Environment variable of the workers of a node entry point, which holds the lock for them."""
_JOB_NUMBERS = ('SLURM_JOB_ID', 'SKYPILOT_TASK_ID', 'TRAINING_JOB_NAME', 'RUN_NAME')
"""Variables of schedulers that stay the same when a job is restarted."""
REFRESH_SECONDS = 5.0
WATCH_SECONDS = 120.0
"""An owner on another machine is dead after this time without a change of the file; a file system that takes a
checkpoint may be slow."""
SAME_JOB_SECONDS = 240.0
"""Longest wait for the end of an earlier attempt of the same job on another machine; the other nodes of this attempt
wait for five minutes."""


class RunLocked(UserError):
    """Another job holds the lock.

    Attributes:
        retry: The owner may be an earlier attempt of the same job, so that a later try may find it gone.
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    token: str
    job: str
    """Name of its job; empty if there is none."""
    number: str
    """The scheduler's number for the job; empty if there is none."""
    attempt: int
    """Number of restarts by the scheduler; -1 if unknown."""
    host: str
    machine: str
    """Boot and process namespace of its machine; two processes of the same one can see each other."""
    pid: int
    started: str
    """Its start in ticks since the boot, to tell it from a later process of the same number."""
    since: float
    """Time when it took the lock."""

    @staticmethod
    def current(environ: Mapping[str, str]) -> 'Owner':
        """Describe this process."""
        number = next((environ[name] for name in _JOB_NUMBERS if environ.get(name)), '')
        attempt = environ.get(environment.ATTEMPT, '')
        return Owner(
            uuid4().hex,
            environ.get(environment.JOB, ''),
            number,
            int(attempt) if attempt.isdigit() else -1,
            environment.machine_name(environ),
            _machine_id(),
            os.getpid(),
            start_ticks(os.getpid()),
            time.time(),
        )

    def is_later_attempt_of(self, other: 'Owner') -> bool:
        """Return True if this is a later attempt of the same job, so that the scheduler has ended the other one."""
        return bool(self.number) and self.number == other.number and self.attempt > other.attempt >= 0

    def may_be_same_job_as(self, other: 'Owner') -> bool:
        """Return True if both may be attempts of one job, as far as their names and numbers tell."""
        different = self.number and other.number and self.number != other.number
        return bool(self.job) and self.job == other.job and not different

    def is_alive(self) -> bool | None:
        """Return True if the process is running; None if that cannot be seen from this machine."""
        if not self.machine or self.machine != _machine_id():
            return None
        return start_ticks(self.pid) == self.started

    def __str__(self) -> str:
        job = f'job {self.job}{f" ({self.number})" * bool(self.number)}, ' if self.job else ''
        since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))
        return f'{job}process {self.pid} on {self.host}, since {since}'


@contextlib.contextmanager
def held(
    run: Path, environ: Mapping[str, str] = os.environ, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Owner]:
    """Hold the lock of a run's folder; if another job takes it over meanwhile, this process ends at once.

    Args:
        run: The run's folder.
        environ: The environment of this job.
        stopped: Called while waiting for an owner that may be dead; True ends the wait.

    Raises:
        RunLocked: Another job holds the lock and is alive.
    """
    own, path = Owner.current(environ), run / LOCK
    run.mkdir(parents=True, exist_ok=True)
    _wait_until_free(path, own, stopped)
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
    """Read the owner of a lock file; None if there is no file or it cannot be parsed."""
    return _parse_owner(_read(path))


def _parse_owner(content: str | None) -> Owner | None:
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return Owner(**json.loads(content or '')['owner'])
    return None


def _wait_until_free(path: Path, own: Owner, stopped: Callable[[], bool]) -> None:
    """Return when there is no owner or it is known to be dead; raise RunLocked if it lives."""
    begin = changed = time.monotonic()
    content, announced = _read(path), False
    while content is not None:
        other = _parse_owner(content)
        if other is not None and (own.is_later_attempt_of(other) or other.is_alive() is False):
            return
        # A changed file is a sign of life, whoever wrote it; its time stamps are by another machine's clock.
        now, newer = time.monotonic(), _read(path)
        if newer != content:
            content, changed = newer, now
        elif now - changed > WATCH_SECONDS:
            return
        if other is not None and (changed > begin or other.is_alive()):
            if stopped() or now - begin > _longest_wait(own, other):
                raise RunLocked(
                    f'{path}: {other}, trains into this folder; wait for its end, or give this run another name '
                    '(name=...). When its owner is gone, the lock needs no removing',
                    retry=own.may_be_same_job_as(other),
                )
            if not announced:
                announced = True
                print(f'{path}: {other}, is still there; waiting for its end', file=sys.stderr, flush=True)
        if stopped():
            raise RunLocked(f'{path}: told to stop, before it was known whether its owner lives', retry=True)
        time.sleep(min(0.5, REFRESH_SECONDS))


def _longest_wait(own: Owner, other: Owner) -> float:
    """Return how long to wait for the end of a living owner: only an earlier attempt of this job is about to end."""
    if not own.may_be_same_job_as(other):
        return 0.0
    return WATCH_SECONDS if other.is_alive() else SAME_JOB_SECONDS


def _refresh(path: Path, own: Owner, done: threading.Event) -> None:
    count = 0
    while not done.wait(REFRESH_SECONDS):
        other = owner_of(path)
        if other is not None and other.token != own.token:
            # This process was taken for dead, on a machine that was suspended for example. The folder now belongs to
            # the other job, and anything that this process still wrote would damage its run: end without any cleanup.
            print(f'error: {path}: {other}, has taken over; this process ends', file=sys.stderr, flush=True)
            os._exit(CONFIG_ERROR)
        count += 1
        with contextlib.suppress(OSError):  # the disk may be full, or gone for a while
            _write(path, own, count)


def _write(path: Path, own: Owner, count: int) -> None:
    # In place, unlike a heartbeat: a network file system shows a changed file sooner than a new one of the same name.
    # A reader may see half of it, which counts as a change without an owner.
    line: dict[str, Any] = {'owner': asdict(own), 'count': count, 'at': time.time()}
    content = json.dumps(line).encode() + b'\n'
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> str | None:
    """Return the content of a lock file; None if there is none, empty if the file system does not answer."""
    try:
        return path.read_text(encoding='utf-8', errors='replace')
    except FileNotFoundError:
        return None
    except OSError:  # a network file system that is away
        return ''


def _machine_id() -> str:
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
        return f'{boot} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return ''


def start_ticks(pid: int) -> str:
    """Return when a process was started, in clock ticks since the boot; empty if it is gone or dead."""
    try:
        content = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
    # The second field, the program's name, may hold spaces and parentheses.
    state, *fields = content.rpartition(')')[2].split()
    return '' if state in 'ZX' else fields[18]
