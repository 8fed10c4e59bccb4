"""Download of a large object in ranges, several of them in parallel."""

import io
from functools import partial
from pathlib import Path

from diffusion.storage.bucket_clients import locate
from diffusion.storage.client_pool import client_of
from diffusion.storage.request_threads import run_all
from diffusion.storage.retry import DamagedDownload, PreconditionFailed, RetryPolicy
from diffusion.storage.watched_reads import WatchedFile, read_watched

RANGE_BYTES = 2**24
"""Size of a range; a range that fails is downloaded again."""


def current_version(url: str, retry: RetryPolicy) -> tuple[int, str]:
    """Return the size in bytes and the version of an object, without retries; '' if its store cannot pin versions."""
    location = locate(url)
    with client_of(location, retry) as client:
        return client.current_version(location)


def download_ranges(url: str, path: Path, size: int, version: str, retry: RetryPolicy) -> None:
    """Download one version of an object to a local path; each range is retried by itself.

    Raises:
        DamagedDownload: Another version has replaced this one.
        UserError: The object does not exist, or the store refuses the request.
        GaveUp: Every try of a range failed.
        OSError: The local disk is full.
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
    """Download the bytes of a version of an object in the half-open range `span` to the same place of a local file."""

    def attempt() -> None:
        with WatchedFile(io.FileIO(path, 'r+')) as file:
            file.seek(span[0])
            file.limit = span[1] - span[0]
            read_watched(url, file, span, retry, version=version)
            if file.received != file.limit:
                raise DamagedDownload(f'received {file.received} of {file.limit} bytes of range {span[0]}-{span[1]}')

    retry.run(attempt, url)
