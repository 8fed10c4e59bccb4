"""Reads from object stores and mounts that end with an error when they stall."""

import io
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from diffusion.storage import bucket_interface
from diffusion.storage.bucket_clients import locate
from diffusion.storage.bucket_interface import Client, Location
from diffusion.storage.client_pool import acquire_client, release_after
from diffusion.storage.retry import DamagedDownload, RetryPolicy

PROGRESS_BYTES = 2**20
"""Bytes that a download must receive per timeout to continue; small, since 64 downloads may share a slow link."""
POLL_SECONDS = 0.02


class Watched(io.BufferedIOBase):
    """Output of a download that counts the received bytes; a write fails once the download is abandoned."""

    received = 0
    limit = float('inf')
    """Number of bytes beyond which a write fails: some servers answer a range with the whole object."""
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


def read_watched(
    url: str, file: Watched, span: tuple[int, int] | None, retry: RetryPolicy, *, version: str = ''
) -> None:
    """Read an object or a file, or its bytes in the half-open range `span`, into `file`, without retries.

    Raises:
        TimeoutError: Fewer than PROGRESS_BYTES arrived per timeout.
        Exception: An error of the client, with status 412 if the object no longer has this version.
    """
    # Read in a separate thread, since a read from a hung mount cannot be interrupted, and a client's own timeout
    # restarts with every byte received. A stalled thread is abandoned; it ends at its next write to `file` or when its
    # socket times out. It is a daemon, so that the interpreter does not wait for it at exit.
    read: Callable[[], None] = partial(_read_mount, url, file, span)
    if '://' in url:
        location = locate(url)
        # Create the client before the clock starts: importing packages and reading credentials is not the store's time.
        read = partial(_read_store, acquire_client(location, retry), location, file, span, version, retry)
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
    client: Client,
    location: Location,
    file: io.BufferedIOBase,
    span: tuple[int, int] | None,
    version: str,
    retry: RetryPolicy,
) -> None:
    """Download an object, or its bytes in the half-open range `span`, to an open file; then release the client."""
    with release_after(client, location, retry):
        client.read(location, file, span, version)
