"""Object store operations by URL (list, read, download, write, delete), with retries by a `RetryPolicy`.

Supported schemes are those in `bucket_clients.CLIENTS`. Paths without a scheme can be read and downloaded too, with the
same timeout and retries, since a network mount may stall like a store.

All functions raise UserError if the store rejects the request (for example, because the object does not exist) or if
the scheme is not supported, and GaveUp if every attempt failed.
"""

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from diffusion.errors import UserError
from diffusion.storage import transfers
from diffusion.storage.atomic import write_atomically
from diffusion.storage.bucket_clients import locate
from diffusion.storage.bucket_interface import FolderListing, ObjectInfo
from diffusion.storage.retry import (
    DamagedDownload,
    GaveUp,
    PreconditionFailed,
    RetryPolicy,
    is_missing_object,
    status_of,
)
from diffusion.storage.transfers import (
    WatchedBuffer,
    WatchedFile,
    client_of,
    current_version,
    download_ranges,
    read_watched,
)

log = logging.getLogger(__name__)

RANGED_BYTES = 2**26
COMPARED_BYTES = 2**26
"""Number of bytes to read at a time when comparing an object with what was written."""
DEFAULT = RetryPolicy()
Collected = TypeVar('Collected')


def split(url: str) -> tuple[str, str]:
    """Split the URL of an object into bucket and key; for azure://, into the account's host, and container and key."""
    bucket, _, prefix = url.partition('://')[2].partition('/')
    return bucket, prefix.lstrip('/')


def list_objects(url: str, *, retry: RetryPolicy = DEFAULT) -> list[ObjectInfo]:
    """Return the metadata of the object at a URL and of all objects below it, with keys as returned by `split`."""
    return collect_objects(url, list, retry=retry)


def collect_objects(
    url: str, collect: Callable[[Iterator[ObjectInfo]], Collected], *, retry: RetryPolicy = DEFAULT
) -> Collected:
    """Call a function with an iterator over the objects that `list_objects` would return, which may not fit in memory.

    The function is called again if the listing fails.
    """
    location, key = locate(url), split(url)[1]
    below = key if not key or key.endswith('/') else f'{key}/'

    def attempt() -> Collected:
        with client_of(location, retry) as client:
            # Stores match prefixes as text: listing `set` also returns `settings/`.
            return collect(each for each in client.list(location) if each.key == key or each.key.startswith(below))

    return retry.run(attempt, url)


def list_folder(url: str, *, retry: RetryPolicy = DEFAULT) -> FolderListing:
    """Return the folders and objects directly in the folder at a URL, without listing the contents of these folders.

    A folder is a common prefix of keys up to a slash, returned without the slash. Both lists are sorted by key, with
    keys as returned by `split`; they are empty for a folder that does not exist.
    """
    location, key = locate(url), split(url)[1].rstrip('/')
    below = f'{key}/' if key else ''

    def attempt() -> FolderListing:
        prefix = location.key.rstrip('/')
        with client_of(location, retry) as client:
            folders, objects = client.list_folder(location._replace(key=f'{prefix}/' if prefix else ''))
        # Skip the empty object that some programs create for a folder, and on Hugging Face a file at the folder's URL.
        objects = [found for found in objects if found.key.startswith(below) and found.key != below]
        return sorted(folders), sorted(objects)

    return retry.run(attempt, url)


def head(url: str, *, retry: RetryPolicy = DEFAULT) -> ObjectInfo:
    location = locate(url)

    def attempt() -> ObjectInfo:
        with client_of(location, retry) as client:
            return client.head(location)

    return retry.run(attempt, url)


def read(url: str, *, span: tuple[int, int] | None = None, retry: RetryPolicy = DEFAULT) -> bytes:
    """Return the content of the object or file at a URL or path, or only the half-open byte range `span`."""
    return retry.run(partial(read_once, url, retry, span=span), url)


def download(url: str, path: Path, *, size: int | None = None, retry: RetryPolicy = DEFAULT) -> None:
    """Download the object at a URL, or copy a file from a mounted file system, to a local path.

    Objects above 64 MiB (RANGED_BYTES) are downloaded in ranges by `transfers.THREADS` threads per process. All
    ranges are from the same version: if the object is overwritten meanwhile, the download starts again. Hugging Face
    objects are read in one stream, since the client cannot request a version.

    Args:
        path: Path of the copy; after a failure, it may be incomplete.
        size: Expected size in bytes, checked because not every client detects a truncated body. None skips the check
            but costs one more request.

    Raises:
        GaveUp: Every attempt failed or returned a different size.
        OSError: The local disk is full.
    """

    def attempt() -> None:
        found, version = size, ''
        if '://' in url and (size is None or size > RANGED_BYTES):
            found, version = current_version(url, retry)
        if version and found is not None and found > RANGED_BYTES:
            if size not in (None, found):
                raise DamagedDownload(f'the object has {found} instead of {size} bytes')
            download_ranges(url, path, found, version, retry)
            return
        download_once(url, path, retry)
        if size is not None and path.stat().st_size != size:
            raise DamagedDownload(f'received {path.stat().st_size} of {size} bytes')

    retry.run(attempt, url)


def write(
    url: str, content: bytes | Path, *, if_absent: bool = False, if_tag: str | None = None, retry: RetryPolicy = DEFAULT
) -> ObjectInfo:
    """Upload an object, verify its size in the store, and return its key, size and etag.

    If the response to a conditional write is lost (status 5xx, timeout or connection reset), the write may have
    succeeded, and the next attempt then fails because of this call's own object. So the content is compared: if the
    store has exactly `content`, the write succeeded. If another process writing the same bytes must count as a
    conflict, make the content unique, for example with a random identifier.

    Args:
        content: The bytes, or the path of a file.
        if_absent: Write only if the object does not exist.
        if_tag: Write only if the object exists and has this etag.

    Raises:
        PreconditionFailed: A condition is not met.
        GaveUp: Every attempt failed, or the written object has a different size. The object may have been written.
    """
    location, size = locate(url), len(content) if isinstance(content, bytes) else content.stat().st_size
    answer_lost = False

    def attempt() -> ObjectInfo:
        nonlocal answer_lost
        try:
            with client_of(location, retry) as client:
                client.write(location, content, if_absent=if_absent, if_tag=if_tag)
        except Exception as error:
            status = 412 if isinstance(error, PreconditionFailed) else status_of(error)
            if status == 404 and if_tag is not None:  # no such object; its bucket exists, as it gave the etag
                raise PreconditionFailed(f'{url}: does not exist') from error
            if status == 412 and answer_lost and (found := _stored_equal(url, content, retry)) is not None:
                log.warning('%s: written by an earlier attempt whose response was lost', url)
                return found
            answer_lost = answer_lost or status is None or status >= 500
            raise
        # `head` retries by itself. If a single failure here repeated the write, a conditional write would fail because
        # of the object that it has just written.
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
            return stored if head(url, retry=retry) == stored else None  # None if it was overwritten meanwhile
        except UserError as error:
            if status_of(error) == 404:  # another process has deleted the object
                return None
            raise


def delete(url: str, *, missing_ok: bool = False, retry: RetryPolicy = DEFAULT) -> None:
    """Delete the object at a URL; with `missing_ok`, no error is raised if it does not exist (S3 never raises one)."""
    location = locate(url)
    answer_lost = False

    def attempt() -> None:
        nonlocal answer_lost
        try:
            with client_of(location, retry) as client:
                client.delete(location)
        except Exception as error:
            # The object may be missing because an earlier attempt, whose response was lost, has deleted it.
            if (missing_ok or answer_lost) and is_missing_object(error):
                return
            answer_lost = answer_lost or (status_of(error) or 500) >= 500
            raise

    retry.run(attempt, url, 'deleted')


def delete_all(urls: Iterable[str], *, retry: RetryPolicy = DEFAULT) -> None:
    """Delete the objects at several URLs in parallel, in any order; after an error, some may remain."""
    transfers.run_all([lambda policy, url=url: delete(url, missing_ok=True, retry=policy) for url in urls], retry)


def abort_uploads(url: str, *, older_than_seconds: float, retry: RetryPolicy = DEFAULT) -> int:
    """Abort multipart uploads left by killed processes, to the object at a URL or below it; return their number.

    The parts of such uploads are not listed as objects, but use storage until aborted. Only S3 and S3-compatible stores
    need this: Google and Azure delete unfinished uploads after a week, and a failed upload aborts itself. If a store
    does not allow listing or aborting uploads, or does not answer, a warning is logged: nothing else depends on it.

    Args:
        older_than_seconds: Minimum age, by the store's clock; must be longer than any upload takes, since aborting a
            running upload makes it fail.
    """
    location = locate(url)
    aborted: list[str] = []

    def attempt() -> None:
        with client_of(location, retry) as client:
            aborted.extend(client.abort_uploads(location, older_than_seconds))

    try:
        retry.run(attempt, url, 'cleared of unfinished uploads')
    except (UserError, GaveUp) as error:
        log.warning(
            'unfinished uploads are not aborted (%s) and take up storage. To fix: allow s3:ListBucketMultipartUploads '
            'and s3:AbortMultipartUpload, or add a lifecycle rule to the bucket that aborts them',
            error,
        )
    return len(aborted)


def download_once(url: str, path: Path, retry: RetryPolicy) -> None:
    """Download an object or copy a file, without retries; raises the client's errors, or TimeoutError if it stalls."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Use a new file: the thread of an earlier, stalled attempt may still have the old one open and write to it.
    path.unlink(missing_ok=True)
    with WatchedFile(io.FileIO(path, 'wb')) as file:
        read_watched(url, file, None, retry)


def read_once(url: str, retry: RetryPolicy, *, span: tuple[int, int] | None = None) -> bytes:
    """Read an object or a file without retries; raises the same errors as `download_once`."""
    file = WatchedBuffer()
    read_watched(url, file, span, retry)
    return file.getvalue()


@dataclass(frozen=True)
class RemoteFolder:
    """Folder in an object store or a mounted file system, from which files are downloaded with retries."""

    url: str
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def address(self, name: str) -> str:
        return f'{self.url.rstrip("/")}/{name}'

    def persist(self, make: Callable[[], None], name: str) -> None:
        """Call `make`, which must download and check the file `name`, with retries; raise GaveUp if all fail."""
        self.retry.run(make, self.address(name))

    def download(self, name: str, path: Path) -> None:
        """Download a file from the folder without retries; call this inside `persist`, which retries."""
        download_once(self.address(name), path, self.retry)

    def read(self, name: str) -> bytes:
        """Read a small file from the folder without retries; call this inside `persist`, which retries."""
        return read_once(self.address(name), self.retry)

    def refresh(self, name: str, path: Path) -> None:
        """Download a small file to `path`; if this fails and the file already exists, log a warning and keep it."""
        # Always download the file: no index contains its size or hash, so stale copies cannot be recognized.
        try:
            self.persist(lambda: write_atomically(path, self.read(name)), name)
        except (GaveUp, UserError) as error:
            if not path.exists():
                raise
            log.warning('%s; using the existing copy %s', error, path)

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[Path]:
        """Yield a local folder with these files: this folder if it is local, else a temporary folder with copies."""
        if '://' not in self.url:
            if not Path(self.url).is_dir():
                raise FileNotFoundError(f'{self.url} is not a folder')
            yield Path(self.url)
            return
        with tempfile.TemporaryDirectory() as scratch:
            for name in names:
                download(self.address(name), Path(scratch, name), retry=self.retry)
            yield Path(scratch)
