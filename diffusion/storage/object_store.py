"""Object-store operations by URL (list, read, download, upload, write, delete) with retries by a `RetryPolicy`.

Supported schemes are those of `bucket_clients.CLIENTS`. Paths without a scheme can be read and downloaded too, with the
same timeout and retries, since a network mount may stall as a store does.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from diffusion.errors import UserError
from diffusion.storage import request_threads
from diffusion.storage.bucket_clients import locate
from diffusion.storage.bucket_interface import FolderListing, ObjectInfo
from diffusion.storage.client_pool import client_of
from diffusion.storage.ranged_download import current_version, download_ranges
from diffusion.storage.retry import (
    DamagedDownload,
    GaveUp,
    PreconditionFailed,
    RetryPolicy,
    is_missing_object,
    status_of,
)
from diffusion.storage.watched_reads import WatchedBuffer, WatchedFile, read_watched

log = logging.getLogger(__name__)

RANGED_BYTES = 2**26
"""Size above which an object is downloaded in ranges."""
COMPARED_BYTES = 2**26
"""Bytes of an object that are read at once to compare it with what was written."""
DEFAULT = RetryPolicy()
Collected = TypeVar('Collected')


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
    return collect_objects(url, list, retry=retry)


def collect_objects(
    url: str, collect: Callable[[Iterator[ObjectInfo]], Collected], *, retry: RetryPolicy = DEFAULT
) -> Collected:
    """Call a function with an iterator over the result of `list_objects`, for long listings, and return its result.

    Args:
        collect: Function that is given the metadata one by one; it is called again if the listing fails.
    """
    location, key = locate(url), split(url)[1]
    below = key if not key or key.endswith('/') else f'{key}/'

    def attempt() -> Collected:
        with client_of(location, retry) as client:
            # Stores match prefixes as text: listing `set` returns `settings/` too.
            return collect(each for each in client.list(location) if each.key == key or each.key.startswith(below))

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
        with client_of(location, retry) as client:
            folders, objects = client.list_folder(location._replace(key=f'{prefix}/' if prefix else ''))
        # Leave out the object that some programs create for the folder itself, and, on Hugging Face, a file at the URL.
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
        with client_of(location, retry) as client:
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
    # Some stores do not distinguish a missing object from a missing bucket; a missing bucket cannot be listed.
    if any(found.key == split(url)[1] for found in list_objects(url, retry=retry)):
        return read(url, retry=retry)  # another process has just written it
    return None


def download(url: str, path: Path, *, size: int | None = None, retry: RetryPolicy = DEFAULT) -> None:
    """Download the object at a URL, or copy a file from a mount, to a local path.

    An object of more than RANGED_BYTES is downloaded in ranges by parallel threads (`request_threads.THREADS` per
    process), all from one version of the object: if it is overwritten during the download, that starts again. Hugging
    Face is read in one stream, since its client cannot request a version.

    Args:
        url: URL of the object, or path of the file.
        path: Path of the copy; after a failure it may be incomplete.
        size: Expected size in bytes, checked since not every client detects a truncated body; None skips the check,
            and costs one more request.

    Raises:
        UserError: The object does not exist, or the store refuses the request.
        GaveUp: Every try failed, or returned another size.
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

    If the answer to a conditional write is lost (status 5xx, a timeout or a reset connection), the write may have
    succeeded, and the next try then fails because of this call's own object. Its content decides: if the store has
    exactly `content`, the write succeeded. Make the content unique, such as by a random identifier, where another
    process writing the same bytes must count as a conflict.

    Args:
        content: The bytes, or the path of a file.
        if_absent: Write only if the object does not exist.
        if_tag: Write only if the object exists and has this etag.

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
            with client_of(location, retry) as client:
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
        missing_ok: Accept that there is no such object; S3 always does.

    Raises:
        UserError: The store refuses the request, there is no such bucket, or, in some stores, no such object.
        GaveUp: Every try failed.
    """
    location = locate(url)
    answer_lost = False

    def attempt() -> None:
        nonlocal answer_lost
        try:
            with client_of(location, retry) as client:
                client.delete(location)
        except Exception as error:
            # The object may be missing because an earlier try, whose answer was lost, has deleted it.
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


def abort_uploads(url: str, *, older_than_seconds: float, retry: RetryPolicy = DEFAULT) -> int:
    """Abort multipart uploads to the object at a URL or below it that a killed process has left; return their number.

    Their parts are not listed as objects, but cost storage until they are aborted. Only S3 and S3-compatible stores
    need this: Google and Azure delete unfinished uploads after a week, and a failed upload aborts itself. A store that
    refuses to list or abort uploads, or does not answer, is logged as a warning: nothing else depends on it.

    Args:
        url: URL of an object or a folder.
        older_than_seconds: Minimum age by the store's clock; longer than any upload takes, since a running upload
            that is aborted fails.
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
            'unfinished uploads are not aborted (%s); they cost storage: allow s3:ListBucketMultipartUploads and '
            's3:AbortMultipartUpload, or set a lifecycle rule of the bucket that aborts them',
            error,
        )
    return len(aborted)


def download_once(url: str, path: Path, retry: RetryPolicy) -> None:
    """Download an object or copy a file, to a local path, without retries; errors of the client are raised unchanged.

    Raises:
        TimeoutError: The download stalled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The thread of an earlier try that stalled may still have the file open and write to it: give this try a new one.
    path.unlink(missing_ok=True)
    with WatchedFile(io.FileIO(path, 'wb')) as file:
        read_watched(url, file, None, retry)


def read_once(url: str, retry: RetryPolicy, *, span: tuple[int, int] | None = None) -> bytes:
    """Return the content of an object or a file, read without retries; errors of the client are raised unchanged.

    Raises:
        TimeoutError: The download stalled.
    """
    file = WatchedBuffer()
    read_watched(url, file, span, retry)
    return file.getvalue()
