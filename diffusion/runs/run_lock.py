"""Lock on a run's folder: two jobs that save to the same folder would resume from each other's checkpoints.

The file or object run.lock names the lock's owner, which rewrites it every few seconds. A job on the owner's machine
checks if the owner's process exists. A job on any other machine can only check if the content still changes.

An object is written only if it has not changed since it was read (compare-and-set). For files, two jobs may both find
the lock free, because file locks do not work on every cluster's file system.
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

# Do not use flock or fcntl here: clusters often mount network file systems without working locks. Do not compare
# timestamps either: the clocks of two machines differ.
LOCK = 'run.lock'
RELEASED = '{"owner": null, "released": true}\n'
"""Content of a lock object that no job holds."""
ONCE = RetryPolicy(tries=1, timeout_seconds=5.0)
"""Retry policy of refreshes: a short timeout, and no retries, since the next refresh follows soon."""
LOCK_HELD_VARIABLE = 'DIFFUSION_RUN_LOCK'
"""Environment variable that tells workers that the node entry point holds the lock for them."""
_JOB_ID_VARIABLES = ('SLURM_JOB_ID', 'SKYPILOT_TASK_ID', 'TRAINING_JOB_NAME', 'RUN_NAME')
"""Scheduler variables that keep their value when a job is restarted."""
REFRESH_SECONDS = 5.0
BUCKET_REFRESH_SECONDS = 15.0
"""Interval for refreshing a lock object. It is longer than for a file because stores charge for requests: one PUT and
three GETs per refresh, about 0.0015 USD per hour in S3. The owner looks dead only after eight failed refreshes."""
STALE_SECONDS = 120.0
"""Time without a change of the lock after which an owner on another machine counts as dead. It is long because a file
system may be slow during the write of a checkpoint."""
POLL_SECONDS = 0.5
ACQUIRE_TRIES = 10
"""Number of tries to take a free lock; a try fails only if another job took the lock at the same time."""
BUCKET_POLL_SECONDS = 2.0
"""Interval at which a waiting job reads a lock object (one GET request); POLL_SECONDS is for files."""
SAME_JOB_SECONDS = 240.0
"""Maximum time to wait for an earlier attempt of the same job to end on another machine. It is less than the five
minutes that the other nodes of this attempt wait."""


class LockContent(NamedTuple):
    """Content of a lock, as last read."""

    text: str
    version: str = ''
    """Version of the content, such as an etag, for conditional writes."""
    readable: bool = True
    """False if the content is unknown because the storage did not respond."""


UNREADABLE = LockContent('', readable=False)


class RunLock:
    """File or object (`in_bucket`) that holds the lock of a run."""

    def __init__(self, run: Path | str) -> None:
        self.run, self.in_bucket = run, is_url(run)
        self.path = self._place().locate(LOCK)

    def read(self, *, patient: bool = False) -> LockContent | None:
        """Return the content, None without a lock, or UNREADABLE if the lock is a file and the storage fails.

        `patient` retries after storage faults.

        Raises:
            OSError: The object cannot be read.
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
        """Return the current content: None without a lock, UNREADABLE if the storage fails.

        For an object whose content is still `content`, this is cheaper than `read`.
        """
        if not self.in_bucket:
            return self.read()
        try:
            return content if object_store.head(self.path, retry=ONCE).tag == content.version else self.read()
        except (OSError, UserError) as error:
            return None if status_of(error) == 404 else UNREADABLE

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        """Replace the content of the lock, which must be `expected`; `patient` retries after storage faults.

        Raises:
            PreconditionFailed: The lock has changed since `expected` was read; only for an object.
            OSError: The storage failed; the content may have been written.
            UserError: The store refuses the request, or the file is a link.
        """
        place = self._place(patient=patient)
        if self.in_bucket:
            place.replace(LOCK, text.encode(), None if expected is None else expected.version)
        else:
            # A reader may see a partial write; it then treats the lock as changed, but without an owner.
            place.write(LOCK, text, in_place=True)

    def release(self, expected: LockContent) -> None:
        """Release the lock, whose content is `expected`; raises the same errors as `write`."""
        if self.in_bucket:
            # Overwrite instead of deleting: a later attempt of this job may take the lock just before the deletion, and
            # stores have no delete that is conditional on an etag.
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
    """Name of the job; empty if it has none."""
    number: str
    """Scheduler's job id; empty if there is none."""
    attempt: int
    """Number of restarts by the scheduler, or -1 if unknown."""
    host: str
    machine: str
    """Boot id and PID namespace. Processes with equal values can see each other."""
    pid: int
    started: str
    """Start time of the process in ticks since boot, which tells it from a later process with the same id."""
    since: float
    """Time when the process took the lock, in seconds since 1970."""

    @staticmethod
    def current(environ: Mapping[str, str]) -> 'Owner':
        attempt = environ.get(environment.ATTEMPT, '')
        return Owner(
            uuid4().hex,
            environ.get(environment.JOB, ''),
            job_id(environ),
            int(attempt) if attempt.isdigit() else -1,
            environment.machine_name(environ),
            _machine_id(),
            os.getpid(),
            start_ticks(os.getpid()),
            time.time(),
        )

    def is_later_attempt_of(self, other: 'Owner') -> bool:
        """Return True if this owner is a later attempt of the job of `other`, which must therefore have ended."""
        return bool(self.number) and self.number == other.number and self.attempt > other.attempt >= 0

    def may_be_same_job_as(self, other: 'Owner') -> bool:
        """Return True if both owners may be attempts of the same job, judging by job name and id."""
        different_ids = self.number and other.number and self.number != other.number
        return bool(self.job) and self.job == other.job and not different_ids

    def is_alive(self) -> bool | None:
        """Return True if the owner's process is running, False if not, None if this machine cannot determine it."""
        if not self.machine or self.machine != _machine_id():
            return None
        return start_ticks(self.pid) == self.started

    def __str__(self) -> str:
        job = f'job {self.job}{f" ({self.number})" * bool(self.number)}, ' if self.job else ''
        since = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))
        return f'{job}process {self.pid} on {self.host}, since {since}'


def job_id(environ: Mapping[str, str]) -> str:
    """Return the scheduler's id of this job, the same on all nodes and after restarts; empty if none is set."""
    return next((environ[name] for name in _JOB_ID_VARIABLES if environ.get(name)), '')


@contextlib.contextmanager
def hold_run_lock(
    run: Path | str, environ: Mapping[str, str] = os.environ, *, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Owner]:
    """Hold a run's lock in a `with` block. If another job takes over the lock, this process exits.

    Args:
        stopped: Polled while this process waits for another owner; the wait ends when it returns True.

    Raises:
        RunLocked: Another job holds the lock and is alive, or `stopped` has ended the wait.
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
        # Wait only briefly: storage that does not respond must not keep this process alive (the lock then expires).
        thread.join(STORAGE_SECONDS)
        if not thread.is_alive():
            within_limit(lambda: _release(lock, this_owner))


def _acquire(lock: RunLock, this_owner: Owner, stopped: Callable[[], bool]) -> None:
    """Take a lock as soon as it is free; raises the same errors as `hold_run_lock`."""
    for _ in range(ACQUIRE_TRIES):
        # Files have no atomic compare-and-set, so two jobs may both find the lock free. The job that writes last wins;
        # the other finds a foreign token at its next refresh and exits. For an object, only the first write succeeds.
        found = _wait_until_free(lock, this_owner, stopped)
        try:
            return lock.write(_content(this_owner, 0), found, patient=True)
        except PreconditionFailed:
            # Either another job took the lock: check that owner next. Or the store does not recognize its own etags.
            time.sleep(_interval(lock, REFRESH_SECONDS, BUCKET_POLL_SECONDS))
        if stopped():
            raise RunLocked(f'{lock.path}: asked to stop while waiting for the lock', retry=True)
    raise OSError(f'{lock.path}: changed at each of {ACQUIRE_TRIES} tries to take it')


def _release(lock: RunLock, this_owner: Owner) -> None:
    """Free a lock, unless another job took it while this process was suspended."""
    content = lock.read()
    other = None if content is None else parse_owner(content.text)
    if content is not None and other is not None and other.token == this_owner.token:
        # If the store refuses the release, other jobs wait until the lock expires.
        with contextlib.suppress(PreconditionFailed, UserError):
            lock.release(content)


def owner_of(run: Path | str) -> Owner | None:
    """Return the owner recorded in a run's lock, or None without a lock or without a valid owner."""
    return parse_owner(read_lock(RunLock(run)))


def parse_owner(content: str | None) -> Owner | None:
    """Return the owner in the content of a lock, or None if it cannot be parsed."""
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        owner = Owner(**json.loads(content or '')['owner'])
        kinds = get_type_hints(Owner)
        # The file may have been edited, so check the types of all fields.
        if all(isinstance(getattr(owner, name), kinds[name]) for name in kinds) and 0 <= owner.since < 1e11:
            return owner
    return None


def _wait_until_free(lock: RunLock, this_owner: Owner, stopped: Callable[[], bool]) -> LockContent | None:
    """Wait until a lock has no owner, or one that has ended or counts as dead; return its content, if any.

    Raises:
        RunLocked: The owner is alive, or `stopped` returned True.
        OSError: The storage has not responded for STALE_SECONDS.
    """
    content, refreshed, announced = lock.read(patient=True), False, False
    begin = changed = responded = time.monotonic()  # do not count the read, whose retries may take minutes
    while content is not None and content.text != RELEASED:
        other = parse_owner(content.text)
        if other is not None and other.token == this_owner.token:
            return content  # this process took the lock, but the store's response was lost
        if other is not None and (this_owner.is_later_attempt_of(other) or other.is_alive() is False):
            return content
        # Any change of the content shows that the owner is alive, even a partial write. Do not use the modification
        # time, which is from another machine's clock.
        now, current = time.monotonic(), lock.poll(content)
        if current is not None and not current.readable:
            # Do not count time in which the storage does not respond: the owner cannot refresh the lock then either.
            changed = time.monotonic()
            if now - responded > STALE_SECONDS:
                raise OSError(f'{lock.path}: cannot be read for {STALE_SECONDS:.0f} s')
        else:
            responded = now
            if current != content:
                # Ignore the first change after a fault: it is a change from UNREADABLE, not by the owner.
                refreshed = refreshed or content.readable
                content, changed = current, time.monotonic()
                if content is None or content.text == RELEASED:
                    break
            elif now - changed > STALE_SECONDS:
                return content
        if other is not None and (refreshed or other.is_alive()):
            # The owner is alive. Wait only for an earlier attempt of this job, which is about to end.
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
    """Return the maximum number of seconds to wait for a live owner to end; 0 if it belongs to another job."""
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
        # Survive any error, even a lack of threads: without refreshes, another job would take over this run.
        except Exception as error:
            # Do not warn about files: faults are common on busy file systems, and lasting ones show in the next save.
            if not failing and lock.in_bucket:
                print(f'warning: {error}; the lock of the run is not refreshed meanwhile', file=sys.stderr, flush=True)
            failing = True
        else:
            failing = False


def _refresh_once(lock: RunLock, this_owner: Owner, count: int) -> None:
    """Rewrite a lock, or exit if another job has taken it over; raises the same errors as `RunLock.write`."""
    # Try twice: if another job writes between read and write, the second try finds that job as the owner.
    for _ in range(2):
        content = lock.read()
        other = None if content is None else parse_owner(content.text)
        taken_over = f'{other}, took over the lock' if other is not None and other.token != this_owner.token else ''
        if content is not None and content.text == RELEASED:  # this process releases it only after the last refresh
            taken_over = 'another job took over the lock and has ended'
        if taken_over:
            # This process was considered dead, for example because its machine was suspended. The folder now belongs to
            # the other job, whose run any further write would damage. os._exit skips all cleanup, which might write a
            # checkpoint or delete the other job's lock. CONFIG_ERROR prevents a retry that would compete for the
            # folder.
            print(f'error: {lock.path}: {taken_over}; this process exits', file=sys.stderr, flush=True)
            os._exit(CONFIG_ERROR)
        with contextlib.suppress(PreconditionFailed):
            return lock.write(_content(this_owner, count), content)


def _content(this_owner: Owner, count: int) -> str:
    content: dict[str, Any] = {'owner': asdict(this_owner), 'count': count, 'at': time.time()}
    return json.dumps(content) + '\n'


def read_lock(lock: RunLock) -> str | None:
    """Return the content of a lock; None if no job holds it, empty if the storage does not respond."""
    try:
        content = lock.read()
    except (OSError, UserError):
        return ''
    return None if content is None or content.text == RELEASED else content.text


def _machine_id() -> str:
    """Return the boot id and PID namespace of this machine; empty if they cannot be read."""
    # Include the PID namespace, because containers on one machine share the boot id but not process ids.
    boot = boot_id()
    try:
        return f'{boot} {os.readlink("/proc/self/ns/pid")}' if boot else ''
    except OSError:
        return ''


def boot_id() -> str:
    """Return the machine's boot id, which identifies its monotonic clock; empty if unknown."""
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()
    except OSError:
        return ''


def start_ticks(pid: int) -> str:
    """Return a process's start time in clock ticks since boot; empty if the process has ended or is a zombie."""
    try:
        content = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return ''
    # Parse after the last parenthesis: field 2 is the program's name in parentheses, which may itself contain spaces
    # and parentheses. Field 22 is the start time (man 5 proc).
    state, *fields = content.rpartition(')')[2].split()
    return '' if state in 'ZX' else fields[18]
