"""Objects by URL: list, read, download, upload, write, delete, each tried as often as its `RetryPolicy` says.

Schemes are those of `bucket_clients.CLIENTS`; a path without a scheme can be read and downloaded too, since a mount may
stall as a store does.
"""

import contextlib
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from diffusion.storage import bucket_clients
from diffusion.storage.bucket_clients import CLIENTS, Client, Location, Object, locate
from diffusion.storage.retry import DamagedDownload, RetryPolicy, status_of

PROGRESS_BYTES = 2**20
"""Bytes that a download must bring within a timeout to go on: 64 of them may share a slow line."""
GRACE_SECONDS = 5.0
"""Time after which a client's own timeout ends the thread of a download that was given up."""
POLL_SECONDS = 0.02
DEFAULT = RetryPolicy()

_idle: dict[tuple[Any, ...], list[Client]] = {}


def split(url: str) -> tuple[str, str]:
    """Return the first part of a URL after its scheme, the bucket's name or Azure's account, and the rest."""
    bucket, _, prefix = url.partition('://')[2].partition('/')
    return bucket, prefix.lstrip('/')


def list_objects(url: str, *, retry: RetryPolicy = DEFAULT) -> list[Object]:
    """List the object of a URL and all below it, with their keys as `split` gives them.

    Raises:
        UserError: The store refuses, or its scheme is not supported.
        GaveUp: The store does not answer.
    """
    at, whole = locate(url), split(url)[1]
    below = whole if not whole or whole.endswith('/') else f'{whole}/'

    def attempt() -> list[Object]:
        with _client(at, retry) as client:
            # A prefix of the store's is any text: `set` finds `settings/` too.
            return [found for found in client.list(at) if found.key == whole or found.key.startswith(below)]

    return retry.run(attempt, url)


def head(url: str, *, retry: RetryPolicy = DEFAULT) -> Object:
    """Return the size and etag of an object.

    Raises:
        UserError: There is no such object, or the store refuses.
        GaveUp: The store does not answer.
    """
    at = locate(url)

    def attempt() -> Object:
        with _client(at, retry) as client:
            return client.head(at)

    return retry.run(attempt, url)


def read(url: str, *, span: tuple[int, int] | None = None, retry: RetryPolicy = DEFAULT) -> bytes:
    """Return the content of an object or a file, or its bytes from the first of `span` up to the second.

    Raises:
        UserError: There is no such object, or the store refuses.
        GaveUp: The store does not answer.
    """
    return retry.run(partial(read_once, url, retry, span=span), url)


def download(url: str, path: Path, *, size: int | None = None, retry: RetryPolicy = DEFAULT) -> None:
    """Copy an object or a file to a path.

    Args:
        url: The object, or a path.
        path: The copy; after a failure it may be there in part.
        size: Bytes that it must have; not every client notices a body that is cut short.
        retry: How patiently.

    Raises:
        UserError: There is no such object, or the store refuses.
        GaveUp: The store does not answer, or not with so many bytes.
        OSError: The local disk is full.
    """

    def attempt() -> None:
        download_once(url, path, retry)
        if size is not None and path.stat().st_size != size:
            raise DamagedDownload(f'{path.stat().st_size} bytes came of {size}')

    retry.run(attempt, url)


def upload(path: Path, folder: str, *, retry: RetryPolicy = DEFAULT) -> None:
    """Copy a file into a folder of a store, and verify that it arrived in full.

    Raises:
        UserError: The store refuses: there is no such bucket, no permission, no credentials.
        GaveUp: The store does not answer, or has another size.
    """
    write(f'{folder}/{path.name}', path, retry=retry)


def write(
    url: str, content: bytes | Path, *, if_absent: bool = False, if_tag: str | None = None, retry: RetryPolicy = DEFAULT
) -> Object:
    """Make an object of bytes or of a file's content, and verify its size; returns its size and etag.

    Args:
        url: The object.
        content: The bytes, or the path of a file.
        if_absent: Write only where there is no such object.
        if_tag: Write only where the object has this etag.
        retry: How patiently.

    Raises:
        UserError: The store refuses.
        PreconditionFailed: One of the conditions does not hold.
        GaveUp: The store does not answer, or has another size.
    """
    at, size = locate(url), len(content) if isinstance(content, bytes) else content.stat().st_size

    def attempt() -> Object:
        with _client(at, retry) as client:
            client.write(at, content, if_absent=if_absent, if_tag=if_tag)
        there = head(url, retry=retry)  # with tries of its own: it must not repeat a conditional write
        if there.size != size:
            raise DamagedDownload(f'it has {there.size} bytes of {size} after its upload')
        return there

    return retry.run(attempt, url, 'written')


def delete(url: str, *, retry: RetryPolicy = DEFAULT) -> None:
    """Remove an object.

    Raises:
        UserError: The store refuses, or, in some stores, there is no such object.
        GaveUp: The store does not answer.
    """
    at = locate(url)

    def attempt() -> None:
        with _client(at, retry) as client:
            client.delete(at)

    retry.run(attempt, url, 'deleted')


def download_once(url: str, path: Path, retry: RetryPolicy) -> None:
    """Copy an object or a file to a path in a single try, whose errors are those of the store's client.

    Raises:
        TimeoutError: It stalled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # a try that stalled may still have it open
    with _WatchedFile(io.FileIO(path, 'wb')) as file:
        _read_watched(url, file, None, retry)


def read_once(url: str, retry: RetryPolicy, *, span: tuple[int, int] | None = None) -> bytes:
    """Return the content of an object or a file in a single try, whose errors are those of the store's client.

    Raises:
        TimeoutError: It stalled.
    """
    file = _WatchedBuffer()
    _read_watched(url, file, span, retry)
    return file.getvalue()


class _Watched(io.BufferedIOBase):
    """A file that counts what is written to it, and that ends a download which nobody waits for any more."""

    received = 0
    abandoned = False

    def write(self, data: Any, /) -> int:
        if self.abandoned:
            raise TimeoutError('nobody waits for it any more')
        count = super().write(data)
        self.received += count
        return count


class _WatchedFile(_Watched, io.BufferedWriter):
    pass


class _WatchedBuffer(_Watched, io.BytesIO):
    pass


def _read_watched(url: str, file: _Watched, span: tuple[int, int] | None, retry: RetryPolicy) -> None:
    """Read into a file, and raise TimeoutError where less than PROGRESS_BYTES come within the timeout.

    A read of a mount that hangs cannot be interrupted, and a client's own timeout starts anew with every byte. So the
    read has a thread of its own, which is left behind when it stalls, and ends with its next bytes or its socket.
    """
    read: Callable[[], None] = partial(_read_mount, url, file, span)
    if '://' in url:
        at = locate(url)
        # Made here, since the time that it takes to make one is not the store's.
        read = partial(_read_store, _taken(at, retry), at, file, span, retry)
    errors: list[BaseException] = []
    reader = threading.Thread(target=_call, args=(read, errors), daemon=True)
    reader.start()
    seen, since = 0, time.monotonic()
    try:
        while reader.is_alive():
            reader.join(POLL_SECONDS)
            retry.wait()
            now = time.monotonic()
            if now - since <= retry.timeout_seconds:
                continue
            if reader.is_alive() and file.received < seen + PROGRESS_BYTES:
                raise TimeoutError(f'{file.received} bytes came in {retry.timeout_seconds:g} s and more')
            seen, since = file.received, now
    except BaseException:
        file.abandoned = True
        raise
    if errors:
        raise errors[0]


def _call(read: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        read()
    except BaseException as error:
        errors.append(error)


def _read_mount(path: str, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
    with open(path, 'rb') as source:
        if span is None:
            shutil.copyfileobj(source, file, bucket_clients.CHUNK_BYTES)
        else:
            source.seek(span[0])
            file.write(source.read(span[1] - span[0]))


def _read_store(
    client: Client, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, retry: RetryPolicy
) -> None:
    with _given_back(client, at, retry):
        client.read(at, file, span)


def _client(at: Location, retry: RetryPolicy) -> contextlib.AbstractContextManager[Client]:
    """Lend a client."""
    return _given_back(_taken(at, retry), at, retry)


@contextlib.contextmanager
def _given_back(client: Client, at: Location, retry: RetryPolicy) -> Iterator[Client]:
    """Keep a client after its use, unless it was refused: its credentials may have expired; a new one reads them."""
    keep = True
    try:
        yield client
    except Exception as error:
        keep = status_of(error) not in (400, 401, 403)
        raise
    finally:
        if keep:
            _clients(at, retry).append(client)


def _taken(at: Location, retry: RetryPolicy) -> Client:
    with contextlib.suppress(IndexError):  # another thread may take the last one first
        return _clients(at, retry).pop()
    return CLIENTS[at.scheme](at.scheme, at.account, retry.timeout_seconds + GRACE_SECONDS)


def _clients(at: Location, retry: RetryPolicy) -> list[Client]:
    """Return the clients that no thread uses. They are kept, since making one takes 0.1 to 0.5 s.

    None of before a fork is among them: both processes would write to its connections.
    """
    return _idle.setdefault((os.getpid(), at.scheme, at.account, retry.timeout_seconds), [])
