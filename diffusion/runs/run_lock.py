"""Lock on a run's folder: two jobs that save to one folder would resume from each other's checkpoints.

The file or object run.lock names its owner, which rewrites it every few seconds. A job on the owner's machine looks for
the owner's process. A job on any other machine can only check whether the content still changes.

An object is written only if it has not changed since it was read (compare-and-set). A file is always written, because
file locks do not work on the file system of every cluster, so two jobs may both find the lock free.
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
from typing import Any, NamedTuple, get_type_hints
from uuid import uuid4

from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.runs import environment
from diffusion.runs.bounded_call import STORAGE_SECONDS, within_limit
from diffusion.storage import object_store
from diffusion.storage.places import PATIENT, Place, files_of_run, is_url
from diffusion.storage.retry import PreconditionFailed, RetryPolicy, status_of

# This module avoids flock and fcntl, because network file systems of clusters are often mounted without working locks.
# It compares no timestamps, because the clocks of two machines differ.
LOCK = 'run.lock'
RELEASED = '{"owner": null, "released": true}\n'
"""Content of the lock object of a run that no job holds."""
ONCE = RetryPolicy(tries=1, timeout_seconds=5.0)
"""Policy of refreshes: the next refresh is the next try, and a store that hangs must not make the owner look dead."""
LOCK_HELD_VARIABLE = 'DIFFUSION_RUN_LOCK'
"""Environment variable that marks the workers of a node entry point, which holds the lock for them."""
_JOB_ID_VARIABLES = ('SLURM_JOB_ID', 'SKYPILOT_TASK_ID', 'TRAINING_JOB_NAME', 'RUN_NAME')
"""Scheduler variables that keep their value when a job is restarted."""
REFRESH_SECONDS = 5.0
BUCKET_REFRESH_SECONDS = 15.0
"""Interval of the refreshes of an object, longer since a store charges for requests. A refresh takes one PUT and three
GET requests: in S3, 240 and 720 per hour, about 0.0015 USD. Eight of them may fail before the owner looks dead."""
STALE_SECONDS = 120.0
"""Time without a change of the lock after which an owner on another machine counts as dead. A file system that is busy
with a checkpoint may be slow."""
POLL_SECONDS = 0.5
ACQUIRE_TRIES = 10
"""Number of tries to write a free lock; each fails only if another job has just taken and released it."""
BUCKET_POLL_SECONDS = 2.0
"""Interval at which a job that waits for a lock object reads it, with one GET request; POLL_SECONDS is for files."""
SAME_JOB_SECONDS = 240.0
"""Maximum wait for an earlier attempt of the same job to end on another machine. It is less than the five minutes for
which the other nodes of this attempt wait."""


class LockContent(NamedTuple):
    """Content of a lock as it was read."""

    text: str
    version: str = ''
    """Version by which a conditional write recognizes this content."""
    readable: bool = True
    """False if the storage did not respond, so that the content is unknown."""


UNREADABLE = LockContent('', readable=False)


class RunLock:
    """File or object that holds the lock of a run.

    Attributes:
        in_bucket: True if it is an object.
        path: Its path or URL.
    """

    def __init__(self, run: Path | str) -> None:
        self.run, self.in_bucket = run, is_url(run)
        self.path = self._place().locate(LOCK)

    def read(self, *, patient: bool = False) -> LockContent | None:
        """Return the content, or None if there is no lock; UNREADABLE for a file whose storage fails.

        Args:
            patient: True to retry.

        Raises:
            OSError: Every try failed.
            UserError: The store refuses the request, or the file is a link.
        """
        try:
            found = self._place(patient=patient).read_version(LOCK)
        except OSError:  # for example ESTALE while a network file system fails over
            if self.in_bucket:
                raise
            return UNREADABLE
        return None if found is None else LockContent(found.content.decode(errors='replace'), found.version)

    def poll(self, content: LockContent) -> LockContent | None:
        """Return the current content, UNREADABLE after a fault; cheaper than `read` if it still is `content`."""
        if not self.in_bucket:
            return self.read()
        try:
            return content if object_store.head(self.path, retry=ONCE).tag == content.version else self.read()
        except (OSError, UserError) as error:
            return None if status_of(error) == 404 else UNREADABLE

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        """Write the content.

        Args:
            expected: The content that it replaces, or None if there was no lock.
            patient: True to retry.

        Raises:
            PreconditionFailed: The lock has changed since `expected` was read; only for an object.
            OSError: The storage failed; the content may have been written.
            UserError: The store refuses the request, or the file is a link.
        """
        place = self._place(patient=patient)
        if self.in_bucket:
            place.replace(LOCK, text.encode(), None if expected is None else expected.version)
        else:
            # A reader may see a partial write, which counts as a change without an owner.
            place.write(LOCK, text, in_place=True)

    def release(self, expected: LockContent) -> None:
        """Free the lock, whose content is `expected`; raises as `write` does."""
        if self.in_bucket:
            # Overwrite the object, since stores cannot delete one on the condition of its etag: a later attempt of this
            # job may take the lock between the last look and the deletion.
            self.write(RELEASED, expected)
        else:
            self._place().delete([LOCK])

    def _place(self, *, patient: bool = False) -> Place:
        return files_of_run(self.run, PATIENT if patient else ONCE, refusal_is_fault=False)


class RunLocked(UserError):
    """Raised when another job holds the lock of a run's folder.

    Attributes:
        retry: True if the owner may be an earlier attempt of the same job, so that a later attempt may succeed.
    """

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


@dataclass(frozen=True)
class Owner:
    """Process that holds the lock of a run's folder. The fields are the keys of `owner` in run.lock."""

    token: str
    job: str
    """Name of the job, or empty if there is none."""
    number: str
    """Job id of the scheduler, or empty if there is none."""
    attempt: int
    """Number of restarts by the scheduler, or -1 if unknown."""
    host: str
    machine: str
    """Boot id and PID namespace. Processes with the same value can see each other."""
    pid: int
    started: str
    """Start time of the process in ticks since boot, which distinguishes it from a later process with the same id."""
    since: float
    """Time when the process took the lock, in seconds since 1970."""

    @staticmethod
    def current(environ: Mapping[str, str]) -> 'Owner':
        """Return the record of this process as an owner of the lock."""
        number = job_id(environ)
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
        """Return True if this owner is a later attempt of the job of `other`, so that `other` must have ended."""
        return bool(self.number) and self.number == other.number and self.attempt > other.attempt >= 0

    def may_be_same_job_as(self, other: 'Owner') -> bool:
        """Return True if both lock owners may be attempts of one job, judging by job name and id."""
        different_ids = self.number and other.number and self.number != other.number
        return bool(self.job) and self.job == other.job and not different_ids

    def is_alive(self) -> bool | None:
        """Return True if the owner's process is running, False if not, or None if it cannot be determined here."""
        if not self.machine or self.machine != _machine_id():
            return None
        return start_ticks(self.pid) == self.started

    def __str__(self) -> str:
        job = f'job {self.job}{f" ({self.number})" * bool(self.number)}, ' if self.job else ''
        since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))
        return f'{job}process {self.pid} on {self.host}, since {since}'


def job_id(environ: Mapping[str, str]) -> str:
    """Return the scheduler's id of this job, the same on all nodes and after a restart; empty if it sets none."""
    return next((environ[name] for name in _JOB_ID_VARIABLES if environ.get(name)), '')


@contextlib.contextmanager
def hold_run_lock(
    run: Path | str, environ: Mapping[str, str] = os.environ, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Owner]:
    """Hold the lock of a run in a `with` block; if another job takes over the lock, exit this process.

    Args:
        stopped: Polled while waiting for an owner that may be dead; the wait ends when it returns True.

    Raises:
        RunLocked: Another job holds the lock and is alive.
        UserError: The store refuses to read or write the lock.
        OSError: The storage does not respond.
    """
    this_owner, lock = Owner.current(environ), RunLock(run)
    if not lock.in_bucket:
        Path(run).mkdir(parents=True, exist_ok=True)
    _acquire(lock, this_owner, stopped)
    done = threading.Event()
    thread = threading.Thread(target=_refresh, args=(lock, this_owner, done), daemon=True)
    thread.start()
    try:
        yield this_owner
    finally:
        done.set()
        # A storage that does not respond must not keep this process from ending; the lock then expires.
        thread.join(STORAGE_SECONDS)
        if not thread.is_alive():
            within_limit(lambda: _release(lock, this_owner))


def _acquire(lock: RunLock, this_owner: Owner, stopped: Callable[[], bool]) -> None:
    """Take a lock as soon as it is free; raises as `hold_run_lock` does."""
    for _ in range(ACQUIRE_TRIES):
        # A file has no atomic test-and-set, and two jobs may both find it free. The one that writes last wins; the
        # other finds a foreign token at its next refresh and exits. For an object, only the first write succeeds.
        found = _wait_until_free(lock, this_owner, stopped)
        try:
            return lock.write(_content(this_owner, 0), found, patient=True)
        except PreconditionFailed:
            # Another job was faster, and its owner decides; or the store does not recognize its own etags.
            time.sleep(_interval(lock, REFRESH_SECONDS, BUCKET_POLL_SECONDS))
        if stopped():
            raise RunLocked(f'{lock.path}: asked to stop while waiting for the lock', retry=True)
    raise OSError(f'{lock.path}: changed at each of {ACQUIRE_TRIES} tries to take it')


def _release(lock: RunLock, this_owner: Owner) -> None:
    """Free a lock, unless another job took it while this process was suspended."""
    content = lock.read()
    other = None if content is None else parse_owner(content.text)
    if content is not None and other is not None and other.token == this_owner.token:
        # The lock expires if the store refuses to release it.
        with contextlib.suppress(PreconditionFailed, UserError):
            lock.release(content)


def owner_of(run: Path | str) -> Owner | None:
    """Return the owner recorded in the lock of a run, or None if there is none or it cannot be parsed."""
    return parse_owner(read_lock(RunLock(run)))


def parse_owner(content: str | None) -> Owner | None:
    """Return the owner in the content of a lock, or None if it cannot be parsed."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        owner = Owner(**json.loads(content or '')['owner'])
        kinds = get_type_hints(Owner)
        # A file that this program did not write may have any content.
        if all(isinstance(getattr(owner, name), kinds[name]) for name in kinds) and 0 <= owner.since < 1e11:
            return owner
    return None


def _wait_until_free(lock: RunLock, this_owner: Owner, stopped: Callable[[], bool]) -> LockContent | None:
    """Wait until a lock has no owner or its owner is known to be dead; return its content then.

    Raises:
        RunLocked: The owner is alive, or `stopped` returned True.
        OSError: The storage has not responded for STALE_SECONDS.
    """
    content, refreshed, announced = lock.read(patient=True), False, False
    begin = changed = responded = time.monotonic()  # after the read: its retries may take minutes
    while content is not None and content.text != RELEASED:
        other = parse_owner(content.text)
        if other is not None and other.token == this_owner.token:
            return content  # written by this process, but the answer of the store was lost
        if other is not None and (this_owner.is_later_attempt_of(other) or other.is_alive() is False):
            return content
        # Any change of the content shows that its writer is alive, even if the content cannot be parsed (a reader may
        # see a partial write). The modification time is not evidence: it is from the clock of another machine.
        now, current = time.monotonic(), lock.poll(content)
        if current is not None and not current.readable:
            # The owner cannot refresh the lock either while the storage does not respond.
            changed = time.monotonic()
            if now - responded > STALE_SECONDS:
                raise OSError(f'{lock.path}: cannot be read since {STALE_SECONDS:.0f} s')
        else:
            responded = now
            if current != content:
                # The first content that can be read after a fault says nothing about the owner.
                refreshed = refreshed or content.readable
                content, changed = current, time.monotonic()
                if content is None or content.text == RELEASED:
                    break
            elif now - changed > STALE_SECONDS:
                return content
        if other is not None and (refreshed or other.is_alive()):
            # The owner is alive. Only an earlier attempt of this job is about to end; any other job is refused
            # immediately.
            if stopped() or now - begin > _max_wait(this_owner, other):
                raise RunLocked(
                    f'{lock.path}: {other}, trains this run; wait for it to end, or set another run name (name=...). '
                    'The lock expires two minutes after its owner has died',
                    retry=this_owner.may_be_same_job_as(other),
                )
            if not announced:
                announced = True
                print(f'{lock.path}: {other}, holds the lock; waiting for it to end', file=sys.stderr, flush=True)
        if stopped():
            raise RunLocked(f'{lock.path}: asked to stop while waiting to see if the lock owner is alive', retry=True)
        time.sleep(_interval(lock, min(POLL_SECONDS, REFRESH_SECONDS), BUCKET_POLL_SECONDS))
    return content


def _max_wait(this_owner: Owner, other: Owner) -> float:
    """Return the maximum seconds to wait for a live lock owner to end; 0 if the owner belongs to another job."""
    if not this_owner.may_be_same_job_as(other):
        return 0.0
    return STALE_SECONDS if other.is_alive() else SAME_JOB_SECONDS


def _interval(lock: RunLock, file_seconds: float, bucket_seconds: float) -> float:
    return bucket_seconds if lock.in_bucket else file_seconds


def _refresh(lock: RunLock, this_owner: Owner, done: threading.Event) -> None:
    """Rewrite a lock every few seconds until `done`; exit this process if another job takes over the lock."""
    count, failing = 0, False
    while not done.wait(_interval(lock, REFRESH_SECONDS, BUCKET_REFRESH_SECONDS)):
        count += 1
        try:
            _refresh_once(lock, this_owner, count)
        # Survive any error, such as a lack of threads: without refreshes, another job would take over this run.
        except Exception as error:
            # A file's fault shows up in the next save, and is common enough on a busy file system.
            if not failing and lock.in_bucket:
                print(f'warning: {error}; the lock of the run is not refreshed meanwhile', file=sys.stderr, flush=True)
            failing = True
        else:
            failing = False


def _refresh_once(lock: RunLock, this_owner: Owner, count: int) -> None:
    """Rewrite a lock, or exit this process if another job has taken it over; raises as `RunLock.write` does."""
    # Try again if another job has written between reading and writing: the second try then finds the other owner.
    for _ in range(2):
        content = lock.read()
        other = None if content is None else parse_owner(content.text)
        if other is not None and other.token != this_owner.token:
            # This process was taken for dead, for example because its machine was suspended. The folder now belongs to
            # the other job, and any further write would damage its run. os._exit skips all cleanup, which might write a
            # checkpoint or delete the lock of the other job. CONFIG_ERROR keeps the scheduler from starting a retry
            # that competes for the folder.
            print(f'error: {lock.path}: {other}, took over the lock; this process exits', file=sys.stderr, flush=True)
            os._exit(CONFIG_ERROR)
        if content is not None and content.text == RELEASED:
            # Another job took over the lock, trained and ended: this process releases it only after its last refresh.
            reason = 'another job took over the lock and has ended; this process exits'
            print(f'error: {lock.path}: {reason}', file=sys.stderr, flush=True)
            os._exit(CONFIG_ERROR)
        with contextlib.suppress(PreconditionFailed):
            return lock.write(_content(this_owner, count), content)


def _content(this_owner: Owner, count: int) -> str:
    """Return the content of a lock: the owner and the number of refreshes."""
    content: dict[str, Any] = {'owner': asdict(this_owner), 'count': count, 'at': time.time()}
    return json.dumps(content) + '\n'


def read_lock(lock: RunLock) -> str | None:
    """Return the content of a lock; None if nobody holds it, empty if the storage does not respond."""
    try:
        content = lock.read()
    except (OSError, UserError):
        return ''
    return None if content is None or content.text == RELEASED else content.text


def _machine_id() -> str:
    """Return the boot id and PID namespace of this machine; empty if they cannot be read."""
    # Include the PID namespace: containers on one machine share the kernel, but not their process ids.
    boot = boot_id()
    try:
        return f'{boot} {os.readlink("/proc/self/ns/pid")}' if boot else ''
    except OSError:
        return ''


def boot_id() -> str:
    """Return the id of this machine's boot, within which all processes share the monotonic clock; empty if unknown."""
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
    except OSError:
        return ''


def start_ticks(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if the process has ended or is a zombie."""
    try:
        content = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
    # Parse after the last parenthesis: field 2 is the program name in parentheses, which may contain spaces and
    # parentheses itself. Field 22 is the start time (man 5 proc).
    state, *fields = content.rpartition(')')[2].split()
    return '' if state in 'ZX' else fields[18]
