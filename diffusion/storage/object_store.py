"""Object-store operations by URL (list, read, download, upload, write, delete), with retries by a `RetryPolicy`.

Supported schemes are those of `bucket_clients.CLIENTS`. Paths without a scheme can be read and downloaded too, with the
same timeout and retries, since a network mount may stall as a store does.
"""

import contextlib
import io
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage import bucket_interface, request_threads
from diffusion.storage.bucket_clients import CLIENTS, locate
from diffusion.storage.bucket_interface import Client, FolderListing, Location, ObjectInfo
from diffusion.storage.retry import DamagedDownload, PreconditionFailed, RetryPolicy, is_missing_object, status_of

log = logging.getLogger(__name__)

PROGRESS_BYTES = 2**20
"""Bytes that a download must receive per timeout to continue; small, since 64 downloads may share a slow link."""
GRACE_SECONDS = 5.0
"""Time that a client's own timeout is longer than the policy's; it ends the thread of an abandoned download."""
POLL_SECONDS = 0.02
COMPARED_BYTES = 2**26
"""Bytes of an object that are read at once to compare it with what was written."""
DEFAULT = RetryPolicy()

_idle: dict[tuple[Any, ...], list[Client]] = {}


def split(url: str) -> tuple[str, str]:
    """Split the URL of an object into its bucket (for azure://, account and host) and its key."""
    bucket, _, prefix = url.partition('://')[2].partition('/')
    return bucket, prefix.lstrip('/')


def list_objects(url: str, *, retry: RetryPolicy = DEFAULT) -> list[ObjectInfo]:
    """Return the metadata of the object at a URL and of all objects below it, with keys as returned by `split`.

    Raises:
        UserError: The store refuses the request, or the scheme is not supported.
        GaveUp: Every try failed.
    """
    location, key = locate(url), split(url)[1]
    below = key if not key or key.endswith('/') else f'{key}/'

    def attempt() -> list[ObjectInfo]:
        with _client(location, retry) as client:
            # Stores match prefixes as text: listing `set` returns `settings/` too.
            return [found for found in client.list(location) if found.key == key or found.key.startswith(below)]

    return retry.run(attempt, url)


def list_folder(url: str, *, retry: RetryPolicy = DEFAULT) -> FolderListing:
    """Return the folders and the objects directly in the folder at a URL, without listing what the folders contain.

    A folder is a common prefix of keys up to a slash. A folder that does not exist is empty.

    Returns:
        The keys of the folders, without a slash at the end, and the metadata of the objects, both sorted by key, with
        keys as returned by `split`.

    Raises:
        UserError: The store refuses the request, or the scheme is not supported.
        GaveUp: Every try failed.
    """
    location, key = locate(url), split(url)[1].rstrip('/')
    below = f'{key}/' if key else ''

    def attempt() -> FolderListing:
        prefix = location.key.rstrip('/')
        with _client(location, retry) as client:
            folders, objects = client.list_folder(location._replace(key=f'{prefix}/' if prefix else ''))
        # Without the object that some programs create for the folder itself, and, in fsspec, a file at the URL.
        objects = [found for found in objects if found.key.startswith(below) and found.key != below]
        return sorted(folders), sorted(objects)

    return retry.run(attempt, url)


def head(url: str, *, retry: RetryPolicy = DEFAULT) -> ObjectInfo:
    """Return the key, size and etag of the object at a URL.

    Raises:
        UserError: The object does not exist, or the store refuses the request.
        GaveUp: Every try failed.
    """
    location = locate(url)

    def attempt() -> ObjectInfo:
        with _client(location, retry) as client:
            return client.head(location)

    return retry.run(attempt, url)


def read(url: str, *, span: tuple[int, int] | None = None, retry: RetryPolicy = DEFAULT) -> bytes:
    """Return the content of the object or file at a URL or path, or only its bytes in the half-open range `span`.

    Raises:
        UserError: The object does not exist, or the store refuses the request.
        GaveUp: Every try failed.
    """
    return retry.run(partial(read_once, url, retry, span=span), url)


def read_if_exists(url: str, *, retry: RetryPolicy = DEFAULT) -> bytes | None:
    """Return the content of the object at a URL; None if the bucket has no such object.

    Raises:
        UserError: The store refuses the request, or there is no such bucket.
        GaveUp: Every try failed.
    """
    try:
        return read(url, retry=retry)
    except UserError as error:
        if status_of(error) != 404:
            raise
    # Not every store tells a missing object from a missing bucket, which cannot be listed.
    if any(found.key == split(url)[1] for found in list_objects(url, retry=retry)):
        return read(url, retry=retry)  # it has been written meanwhile
    return None


def download(url: str, path: Path, *, size: int | None = None, retry: RetryPolicy = DEFAULT) -> None:
    """Download the object at a URL, or copy a file from a mount, to a local path.

    Args:
        url: URL of the object, or path of the file.
        path: Path of the copy; after a failure it may be incomplete.
        size: Expected size in bytes, checked since not every client detects a truncated body; None skips the check.
        retry: Number of tries and timeout.

    Raises:
        UserError: The object does not exist, or the store refuses the request.
        GaveUp: Every try failed, or returned another size.
        OSError: The local disk is full.
    """

    def attempt() -> None:
        download_once(url, path, retry)
        if size is not None and path.stat().st_size != size:
            raise DamagedDownload(f'received {path.stat().st_size} of {size} bytes')

    retry.run(attempt, url)


def upload(path: Path, folder: str, *, retry: RetryPolicy = DEFAULT) -> None:
    """Upload a file into a folder of a store and verify its size there.

    Raises:
        UserError: The store refuses the request: no such bucket, no permission, or no credentials.
        GaveUp: Every try failed, or the uploaded object has another size.
    """
    write(f'{folder}/{path.name}', path, retry=retry)


def write(
    url: str, content: bytes | Path, *, if_absent: bool = False, if_tag: str | None = None, retry: RetryPolicy = DEFAULT
) -> ObjectInfo:
    """Upload an object, verify its size in the store, and return its key, size and etag.

    If the answer to a conditional write is lost (status 5xx, a timeout or a reset connection), the write may have
    succeeded, and the next try then fails because of this call's own object. Its content decides: if the store has
    exactly `content`, the write succeeded. Make the content unique, such as by a random identifier, where another
    process writing the same bytes must count as a conflict.

    Args:
        url: URL of the object.
        content: The bytes, or the path of a file.
        if_absent: Write only if the object does not exist.
        if_tag: Write only if the object exists and has this etag.
        retry: Number of tries and timeout.

    Raises:
        UserError: The store refuses the request.
        PreconditionFailed: A condition does not hold.
        GaveUp: Every try failed, or the written object has another size. The object may have been written.
    """
    location, size = locate(url), len(content) if isinstance(content, bytes) else content.stat().st_size
    answer_lost = False

    def attempt() -> ObjectInfo:
        nonlocal answer_lost
        try:
            with _client(location, retry) as client:
                client.write(location, content, if_absent=if_absent, if_tag=if_tag)
        except Exception as error:
            status = 412 if isinstance(error, PreconditionFailed) else status_of(error)
            if status == 404 and if_tag is not None:  # S3 and Google; the etag came from an object in this bucket
                raise PreconditionFailed(f'{url}: does not exist') from error
            if status == 412 and answer_lost and (found := _stored_equal(url, content, retry)) is not None:
                log.warning('%s: written by an earlier try whose answer was lost', url)
                return found
            answer_lost = answer_lost or status is None or status >= 500
            raise
        # `head` retries by itself. If it failed here in a single try, the write would be repeated, and a conditional
        # write would then fail because of the object that it has just written.
        stored = head(url, retry=retry)
        if stored.size != size:
            raise DamagedDownload(f'the uploaded object has {stored.size} of {size} bytes')
        return stored

    return retry.run(attempt, url, 'written')


def _stored_equal(url: str, content: bytes | Path, retry: RetryPolicy) -> ObjectInfo | None:
    """Return the metadata of an object if its content equals `content`, otherwise None."""
    file = io.BytesIO(content) if isinstance(content, bytes) else content.open('rb')
    with file:
        try:
            stored = head(url, retry=retry)
            if stored.size != file.seek(0, os.SEEK_END):
                return None
            file.seek(0)
            for start in range(0, stored.size, COMPARED_BYTES):
                expected = file.read(COMPARED_BYTES)
                if read(url, span=(start, start + len(expected)), retry=retry) != expected:
                    return None
            return stored if head(url, retry=retry) == stored else None  # None if overwritten while it was compared
        except UserError as error:
            if status_of(error) == 404:  # deleted by another process
                return None
            raise


def delete(url: str, *, missing_ok: bool = False, retry: RetryPolicy = DEFAULT) -> None:
    """Delete the object at a URL.

    Args:
        url: URL of the object.
        missing_ok: Accept that there is no such object; S3 accepts it always.
        retry: Number of tries and timeout.

    Raises:
        UserError: The store refuses the request, there is no such bucket, or, in some stores, no such object.
        GaveUp: Every try failed.
    """
    location = locate(url)
    answer_lost = False

    def attempt() -> None:
        nonlocal answer_lost
        try:
            with _client(location, retry) as client:
                client.delete(location)
        except Exception as error:
            # After a lost answer the object may be missing because an earlier try has deleted it.
            if (missing_ok or answer_lost) and is_missing_object(error):
                return
            answer_lost = answer_lost or (status_of(error) or 500) >= 500
            raise

    retry.run(attempt, url, 'deleted')


def delete_all(urls: Iterable[str], *, retry: RetryPolicy = DEFAULT) -> None:
    """Delete the objects at some URLs in parallel, in any order; return when none of them exists.

    Raises:
        UserError: The store refuses a request; some objects may be left.
        GaveUp: Every try to delete one of the objects failed; others may be left.
    """
    request_threads.run_all([lambda policy, url=url: delete(url, missing_ok=True, retry=policy) for url in urls], retry)


def download_once(url: str, path: Path, retry: RetryPolicy) -> None:
    """Download an object or copy a file, to a local path, without retries; errors of the client are raised unchanged.

    Raises:
        TimeoutError: The download stalled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The thread of an earlier try that stalled may still have the file open and write to it: give this try a new one.
    path.unlink(missing_ok=True)
    with _WatchedFile(io.FileIO(path, 'wb')) as file:
        _read_watched(url, file, None, retry)


def read_once(url: str, retry: RetryPolicy, *, span: tuple[int, int] | None = None) -> bytes:
    """Return the content of an object or a file, read without retries; errors of the client are raised unchanged.

    Raises:
        TimeoutError: The download stalled.
    """
    file = _WatchedBuffer()
    _read_watched(url, file, span, retry)
    return file.getvalue()


class _Watched(io.BufferedIOBase):
    """Output file of a download that counts the received bytes; a write fails once the download is abandoned."""

    received = 0
    abandoned = False

    def write(self, data: Any, /) -> int:
        if self.abandoned:
            raise TimeoutError('the download was abandoned')
        count = super().write(data)
        self.received += count
        return count


class _WatchedFile(_Watched, io.BufferedWriter):
    pass


class _WatchedBuffer(_Watched, io.BytesIO):
    pass


def _read_watched(url: str, file: _Watched, span: tuple[int, int] | None, retry: RetryPolicy) -> None:
    """Read an object or a file into `file`; raise TimeoutError if fewer than PROGRESS_BYTES arrive per timeout."""
    # In a separate thread, since a read from a hung mount cannot be interrupted, and a client's own timeout restarts
    # with every byte received. A stalled thread is abandoned; it ends at its next write to `file` or when its socket
    # times out. It is a daemon, so that the interpreter does not wait for it at exit.
    read: Callable[[], None] = partial(_read_mount, url, file, span)
    if '://' in url:
        location = locate(url)
        # Created before the clock starts: importing the package and reading credentials is not the store's time.
        read = partial(_read_store, _acquire_client(location, retry), location, file, span, retry)
    errors: list[BaseException] = []
    reader = threading.Thread(target=_capture_error, args=(read, errors), daemon=True)
    reader.start()
    seen, since = 0, time.monotonic()
    try:
        while reader.is_alive():
            reader.join(POLL_SECONDS)
            retry.wait()  # raises if, for example, another rank has failed
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


def _capture_error(read: Callable[[], None], errors: list[BaseException]) -> None:
    """Call `read`, and append an exception to `errors`, for another thread to raise; the target of a thread."""
    try:
        read()
    except BaseException as error:
        errors.append(error)


def _read_mount(path: str, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
    """Copy a file, or its bytes in the half-open range `span`, to an open file."""
    with open(path, 'rb') as source:
        if span is None:
            shutil.copyfileobj(source, file, bucket_interface.CHUNK_BYTES)
        else:
            source.seek(span[0])
            file.write(source.read(span[1] - span[0]))


def _read_store(
    client: Client, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, retry: RetryPolicy
) -> None:
    """Download an object, or its bytes in the half-open range `span`, to an open file; then release the client."""
    with _release_after(client, location, retry):
        client.read(location, file, span)


def _client(location: Location, retry: RetryPolicy) -> contextlib.AbstractContextManager[Client]:
    """Return a context manager that yields a client of a store, and afterwards returns the client to the pool."""
    return _release_after(_acquire_client(location, retry), location, retry)


@contextlib.contextmanager
def _release_after(client: Client, location: Location, retry: RetryPolicy) -> Iterator[Client]:
    """Yield a client, then return it to the pool of idle clients; drop it after HTTP 400, 401 or 403."""
    # After a refusal the client is dropped: its credentials may have expired, and the next try's new client reads them
    # again.
    keep = True
    try:
        yield client
    except Exception as error:
        keep = status_of(error) not in (400, 401, 403)
        raise
    finally:
        if keep:
            _idle_clients(location, retry).append(client)


def _acquire_client(location: Location, retry: RetryPolicy) -> Client:
    """Return an idle client from the pool, or a new client if there is none."""
    # pop() without a check: another thread may take the last client between a check and the pop.
    with contextlib.suppress(IndexError):
        return _idle_clients(location, retry).pop()
    return CLIENTS[location.scheme](location.scheme, location.account, retry.timeout_seconds + GRACE_SECONDS)


def _idle_clients(location: Location, retry: RetryPolicy) -> list[Client]:
    """Return the pool of clients that no thread uses, kept since creating a client takes 0.1 to 0.5 s."""
    # Keyed by process ID: after a fork, parent and child would write to the same connections of an inherited client.
    return _idle.setdefault((os.getpid(), location.scheme, location.account, retry.timeout_seconds), [])
