"""Object stores by Streaming's own clients and credentials: listing, downloading, uploading; errors say what to do.

Streaming lists names alone, and we need sizes and tags too; so we list with the client that its downloader makes.
"""

import errno
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

from diffusion.errors import UserError

ATTEMPTS = 4
BACKOFF_SECONDS = 1.0
"""Before the second attempt; doubles with each."""
TIMEOUT_SECONDS = 60.0
"""For which a store may stay silent."""
_GOOGLE = 'set GCS_KEY and GCS_SECRET, or Application Default Credentials'
_AZURE = 'set AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY'
CREDENTIALS = {
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and S3_ENDPOINT_URL for another than AWS',
    'gs': _GOOGLE,
    'oci': 'write ~/.oci/config',
    'azure': _AZURE,
    'azure-dl': _AZURE,
}
NO_CREDENTIALS = frozenset(
    {
        *('NoCredentialsError', 'PartialCredentialsError', 'CredentialRetrievalError', 'ProfileNotFound'),  # botocore
        *('DefaultCredentialsError', 'ConfigFileNotFound', 'InvalidConfig', 'ClientAuthenticationError'),  # others
    }
)
"""Names of the errors; importing the packages for their classes takes seconds."""
OF_THIS_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
Result = TypeVar('Result')


class Object(NamedTuple):
    """An object of a store: its key in the bucket, its bytes, and its ETag."""

    key: str
    size: int
    tag: str


def list_objects(url: str) -> list[Object]:
    """Objects whose keys begin with what a URL names.

    Raises:
        UserError: The store refuses, or cannot be listed.
        OSError: It does not answer.
    """
    scheme = urlparse(url).scheme
    if scheme not in _LISTINGS:
        raise UserError(f'{url}: {scheme}:// cannot be listed; use {", ".join(_LISTINGS)}, or copy it to a folder')
    return persist(url, lambda: list(_LISTINGS[scheme](url)))


def download(url: str, path: Path, *, size: int | None = None) -> None:
    """Copy an object to a path, after several attempts if need be.

    Args:
        size: Bytes it must have; not every client notices a body that is cut short.

    Raises:
        UserError: The store refuses: there is no such object, no permission, no credentials.
        OSError: It does not answer, or not with so many bytes.
    """
    if not {'?', '#', ';'}.isdisjoint(url):
        raise UserError(f"{url}: Streaming's clients cannot read an object with ?, # or ; in its name; rename it")

    def attempt() -> None:
        path.unlink(missing_ok=True)
        _downloader(urlparse(url).scheme).download(url, str(path), TIMEOUT_SECONDS)
        if size is not None and path.stat().st_size != size:
            raise OSError(f'{path.stat().st_size} bytes came of {size}')

    persist(url, attempt)


def upload(path: Path, folder: str) -> None:
    """Copy a file into a folder of a store, after several attempts if need be, and see that it is there in full.

    Raises:
        UserError: The store refuses: there is no such bucket, no permission, no credentials.
        OSError: It does not answer, or has not got all of it.
    """
    url, size = f'{folder}/{path.name}', path.stat().st_size

    def attempt() -> None:
        uploader = _uploader(folder)
        uploader.local, uploader.remote = str(path.parent), folder
        uploader.upload_file(path.name)
        there = {found.key: found.size for found in _LISTINGS[urlparse(url).scheme](url)}.get(split(url)[1])
        if there != size:
            raise OSError(f'it has {there} bytes of {size} after its upload')

    persist(url, attempt, 'written')


def persist(url: str, attempt: Callable[[], Result], what: str = 'read') -> Result:
    """The result of an attempt on a store; what may pass, such as an answer of 500, is tried again.

    Args:
        url: What the attempt is on.
        attempt: May be made several times.
        what: It is that cannot be done when all attempts have failed.

    Raises:
        UserError: The store refuses; the message says what to do.
        OSError: It failed `ATTEMPTS` times, or there is no room here.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Exception as error:  # each cloud's client has errors of its own
            if isinstance(error, OSError) and error.errno in OF_THIS_DISK:
                raise
            reason = refusal(error, url)
            if reason:
                raise UserError(f'{url}: {reason}') from error
            if number == ATTEMPTS - 1:
                raise OSError(f'{url}: cannot be {what}, tried {ATTEMPTS} times ({_text(error)})') from error
        time.sleep(BACKOFF_SECONDS * 2**number)
    raise AssertionError('unreachable')


def refusal(error: Exception, url: str) -> str | None:
    """Why a store will go on refusing and what to do; None for what may pass."""
    scheme = urlparse(url).scheme
    credentials = CREDENTIALS.get(scheme, "see Streaming's documentation of its clients")
    chain = list(_chain(error))
    if any(type(link).__name__ in NO_CREDENTIALS for link in chain):
        return f'there are no credentials ({_text(error)}); {credentials}'
    if isinstance(error, ImportError):
        return f"the {scheme}:// client cannot be imported ({error}); install Streaming's extra for it"
    status = next((status for link in chain if (status := _status(link)) is not None), None)
    if status in (401, 403):
        return f'the store refuses access ({status}); check the permissions, and the credentials: {credentials}'
    if status == 404:
        return 'there is no such bucket or object (404); check the spelling'
    if status is not None and 300 <= status < 500 and status not in (408, 425, 429):
        return f'the store refuses ({_text(error)}); check the location, and the credentials: {credentials}'
    if isinstance(error, ValueError) or type(error).__name__ == 'ParamValidationError':
        return f'cannot be used ({_text(error)}); {credentials}'
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that a client's error carries."""
    if isinstance(error, FileNotFoundError) and error.errno is None:  # what some of Streaming's clients make of a 404
        return 404
    response = getattr(error, 'response', None)
    if isinstance(response, dict):  # botocore
        return response.get('ResponseMetadata', {}).get('HTTPStatusCode')
    for name in ('status_code', 'status', 'code'):  # Azure, Oracle, Google
        value = getattr(error, name, None)
        if isinstance(value, int):
            return int(value)
    return None


def _text(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'.rstrip(': ')


def _downloader(scheme: str) -> Any:
    # A client serves one thread, and none survives a fork.
    return _downloader_of(scheme, os.getpid(), threading.get_ident())


@functools.lru_cache(maxsize=64)
def _downloader_of(scheme: str, _process: int, _thread: int) -> Any:
    from streaming.base.storage.download import CloudDownloader  # brings torch with it: seconds

    return CloudDownloader.get(f'{scheme}://')


def _uploader(folder: str) -> Any:
    # One for all folders of a bucket, and of a container, which in Azure's URLs comes after the account.
    return _uploader_of('/'.join(folder.split('/')[:4]), os.getpid(), threading.get_ident())


@functools.lru_cache(maxsize=64)
def _uploader_of(root: str, _process: int, _thread: int) -> Any:
    from streaming.base.storage.upload import CloudUploader

    with tempfile.TemporaryDirectory() as empty:  # it refuses a local folder that is not
        return CloudUploader.get((empty, root), keep_local=True, retry=1)


def split(url: str) -> tuple[str, str]:
    """Bucket and what the keys begin with."""
    bucket, _, prefix = url.split('://', 1)[1].partition('/')
    return bucket, prefix.lstrip('/')


def _list_s3(url: str) -> Iterator[Object]:
    downloader = _downloader('s3')
    if downloader._s3_client is None:
        downloader._create_s3_client(timeout=TIMEOUT_SECONDS)
    yield from _pages_of_s3(downloader._s3_client, *split(url))


def _pages_of_s3(client: Any, bucket: str, prefix: str) -> Iterator[Object]:
    for page in client.get_paginator('list_objects_v2').paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get('Contents', ()):
            yield Object(found['Key'], found['Size'], found['ETag'].strip('"'))


def _list_gs(url: str) -> Iterator[Object]:
    downloader = _downloader('gs')
    if downloader._gcs_client is None:
        downloader._create_gcs_client()
    client: Any = downloader._gcs_client
    bucket, prefix = split(url)
    if hasattr(client, 'get_paginator'):  # with GCS_KEY it is a client of Google's S3 interface
        yield from _pages_of_s3(client, bucket, prefix)
    else:
        for blob in client.list_blobs(bucket, prefix=prefix):
            yield Object(blob.name, blob.size, blob.etag)


def _list_oci(url: str) -> Iterator[Object]:
    downloader = _downloader('oci')
    if downloader._oci_client is None:
        downloader._create_oci_client()
    client: Any = downloader._oci_client
    namespace, (bucket, prefix) = client.get_namespace().data, split(url)
    bucket, start = bucket.split('@' + namespace)[0], None
    while True:
        page = client.list_objects(namespace, bucket, prefix=prefix, start=start, fields='name,size,etag').data
        yield from (Object(found.name, found.size, found.etag) for found in page.objects)
        start = page.next_start_with
        if not start:
            return


def _list_azure(url: str) -> Iterator[Object]:
    """Of azure://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX; keys begin with the container, as in the URL."""
    downloader = _downloader('azure')
    if downloader._azure_client is None:
        downloader._create_azure_client(url)
    client: Any = downloader._azure_client
    container, _, prefix = split(url)[1].partition('/')
    for blob in client.get_container_client(container).list_blobs(name_starts_with=prefix):
        yield Object(f'{container}/{blob.name}', blob.size, blob.etag)


_LISTINGS: dict[str, Callable[[str], Iterator[Object]]] = {
    's3': _list_s3,
    'gs': _list_gs,
    'oci': _list_oci,
    'azure': _list_azure,
}
