"""Downloads from object stores and mounted file systems, and the clients and threads used for them.

A stalled read ends with an error. Large objects are downloaded in ranges, several in parallel.
"""

import contextlib
import io
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from diffusion.storage import bucket_interface
from diffusion.storage.bucket_clients import CLIENTS, locate
from diffusion.storage.bucket_interface import Client, Location
from diffusion.storage.retry import DamagedDownload, PreconditionFailed, RetryPolicy, status_of

GRACE_SECONDS = 5.0
"""Seconds added to the policy's timeout for a client's own timeout, which ends threads of abandoned downloads."""

idle: dict[tuple[Any, ...], list[Client]] = {}
"""Pool of unused clients, by process id, URL scheme, account and timeout. Creating a client takes 0.1 to 0.5 s."""


def client_of(location: Location, retry: RetryPolicy) -> contextlib.AbstractContextManager[Client]:
    """Return a context manager that yields a client for a store, and then returns it to the pool."""
    return _release_after(acquire_client(location, retry), location, retry)


@contextlib.contextmanager
def _release_after(client: Client, location: Location, retry: RetryPolicy) -> Iterator[Client]:
    """Yield a client, then return it to the pool of idle clients; drop it after HTTP 400, 401 or 403."""
    # Drop the client after a rejected request: its credentials may have expired, and a new client reads them again.
    keep = True
    try:
        yield client
    except Exception as error:
        keep = status_of(error) not in (400, 401, 403)
        raise
    finally:
        if keep:
            _idle_clients(location, retry).append(client)


def acquire_client(location: Location, retry: RetryPolicy) -> Client:
    # Call pop() without checking first: another thread could take the last client between a check and the pop.
    client: Client
    try:
        client = _idle_clients(location, retry).pop()
    except IndexError:
        client = CLIENTS[location.scheme](location.scheme, location.account, retry.timeout_seconds + GRACE_SECONDS)
    client.policy = retry
    return client


def _idle_clients(location: Location, retry: RetryPolicy) -> list[Client]:
    # Include the process ID: with a client inherited through a fork, parent and child would share connections.
    return idle.setdefault((os.getpid(), location.scheme, location.account, retry.timeout_seconds), [])


THREADS = 8
"""Threads per process, shared by all calls of `run_all`, so that eight ranks of a node have at most 64 connections."""
POLL_SECONDS = 0.02
Task = Callable[[RetryPolicy], None]


class Stopped(Exception):
    """Raised to end a task because another task of the same call failed; it is not retried."""


def run_all(tasks: Iterable[Task], retry: RetryPolicy) -> None:
    """Call all tasks in threads; on the first error, end the other tasks and raise the error.

    No task is running any more when this returns. A task must not call this function. Each task gets a retry policy,
    whose `wait` ends the task when another one has failed; the `wait` of `retry` is called in this thread.
    """
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise Stopped('another request failed')

    policy, pool = replace(retry, wait=check), _process_pool()
    pending = {pool.submit(task, policy) for task in tasks}
    try:
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            retry.wait()
    except BaseException:
        stopped.set()
        # Wait for the requests already sent, which end no later than the client's timeout.
        wait({future for future in pending if not future.cancel()})
        raise


class _Pool:
    """Threads that run submitted tasks, oldest first."""

    # Do not use ThreadPoolExecutor: its threads are not daemons, and at exit it still runs its whole queue.

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Future[None], Task, RetryPolicy]] = queue.SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=self._work, name=f'object-store-{number}', daemon=True).start()

    def submit(self, task: Task, policy: RetryPolicy) -> Future[None]:
        future: Future[None] = Future()
        self.tasks.put((future, task, policy))
        return future

    def _work(self) -> None:
        while True:
            future, task, policy = self.tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task(policy)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, task, policy  # free these objects before the thread waits for the next task


def _process_pool() -> _Pool:
    global _pool
    with _lock:
        if _pool is None:
            _pool = _Pool()
        return _pool


def _forget_pool() -> None:
    """Replace the parent process's pool and lock in a forked child."""
    # The parent's threads do not exist in the child, and the lock stays locked forever if one of them held it.
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


_lock = threading.Lock()
_pool: _Pool | None = None
os.register_at_fork(after_in_child=_forget_pool)


PROGRESS_BYTES = 2**20
"""Bytes that a download must receive within each period of the policy's timeout, otherwise it counts as stalled. They
are few, since 64 downloads may share a slow link."""


class Watched(io.BufferedIOBase):
    """File to which a download is written: counts received bytes, and fails writes after the download is abandoned."""

    received = 0
    limit = float('inf')
    """Writes beyond this number of bytes fail: some servers answer a range request with the whole object."""
    abandoned = False

    def write(self, data: Any, /) -> int:
        if self.abandoned:
            raise TimeoutError('the download was abandoned')
        if self.received + len(data) > self.limit:
            raise DamagedDownload(f'received more than {self.limit} bytes')
        count = super().write(data)
        self.received += count
        return count


class WatchedFile(Watched, io.BufferedWriter):
    pass


class WatchedBuffer(Watched, io.BytesIO):
    pass


def read_watched(url: str, file: Watched, span: tuple[int, int] | None, retry: RetryPolicy, version: str = '') -> None:
    """Read an object or a file, or only the half-open byte range `span`, into `file`, without retries.

    Raises:
        TimeoutError: Fewer than PROGRESS_BYTES arrived within a period of `retry.timeout_seconds`.
        Exception: An error from the client, with status 412 if the object no longer has this version.
    """
    # Create the client before the clock starts: time for imports and reading credentials must not count.
    source = client_of(locate(url), retry) if '://' in url else None
    errors: list[BaseException] = []

    def read() -> None:
        try:
            if source is None:
                _read_mount(url, file, span)
            else:
                with source as client:
                    client.read(locate(url), file, span, version)
        except BaseException as error:
            errors.append(error)

    # Read in a separate thread, because a read from a hung mount cannot be interrupted, and a client's own timeout
    # restarts with every byte received. A stalled thread is abandoned; it ends at its next write to `file` or when its
    # socket times out. It is a daemon thread, so that the interpreter does not wait for it at exit.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    seen, since = 0, time.monotonic()
    try:
        while reader.is_alive():
            reader.join(POLL_SECONDS)
            retry.wait()  # may raise an error to end the download, such as after a failure of another rank
            now = time.monotonic()
            if now - since <= retry.timeout_seconds:
                continue
            if reader.is_alive() and file.received < seen + PROGRESS_BYTES:
                raise TimeoutError(f'stalled after {file.received} bytes (timeout {retry.timeout_seconds:g} s)')
            seen, since = file.received, now
    except BaseException:
        file.abandoned = True
        raise
    if errors:
        raise errors[0]


def _read_mount(path: str, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
    with open(path, 'rb') as source:
        if span is None:
            shutil.copyfileobj(source, file, bucket_interface.CHUNK_BYTES)
        else:
            source.seek(span[0])
            file.write(source.read(span[1] - span[0]))


RANGE_BYTES = 2**24
"""Size of a range in bytes; if a range fails, only this range is downloaded again."""


def current_version(url: str, retry: RetryPolicy) -> tuple[int, str]:
    """Return an object's size in bytes and version ('' if its store cannot read by version), without retries."""
    location = locate(url)
    with client_of(location, retry) as client:
        return client.current_version(location)


def download_ranges(url: str, path: Path, size: int, version: str, retry: RetryPolicy) -> None:
    """Download one version of an object to a local path; each range is retried separately.

    Raise DamagedDownload if the object was replaced by another version.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with path.open('wb') as file:
        file.truncate(size)
    spans = [(start, min(start + RANGE_BYTES, size)) for start in range(0, size, RANGE_BYTES)]
    try:
        run_all([partial(_download_range, url, path, span, version) for span in spans], retry)
    except PreconditionFailed as error:
        raise DamagedDownload('the object was overwritten while it was downloaded') from error


def _download_range(url: str, path: Path, span: tuple[int, int], version: str, retry: RetryPolicy) -> None:
    def attempt() -> None:
        with WatchedFile(io.FileIO(path, 'r+')) as file:
            file.seek(span[0])
            file.limit = span[1] - span[0]
            read_watched(url, file, span, retry, version)
            if file.received != file.limit:
                raise DamagedDownload(f'received {file.received} of {file.limit} bytes of range {span[0]}-{span[1]}')

    retry.run(attempt, url)
