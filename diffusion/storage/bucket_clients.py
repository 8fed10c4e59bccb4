"""Object store clients by URL scheme, with the interface `bucket_interface.Client`; they do not retry requests."""

# Do not use obstore: it has one Tokio runtime per process, which does not survive a fork. Tested with 0.12.1 against
# moto: after one request in the parent, every request in a forked child hangs, even with a new client; DataLoader
# workers are forked children.

import io
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage.bucket_interface import CONNECT_SECONDS, Client, FolderListing, Location, ObjectInfo
from diffusion.storage.retry import PreconditionFailed
from diffusion.storage.s3_client import S3Client


def locate(url: str) -> Location:
    """Split the URL of an object or folder in an object store into scheme, account, bucket and key."""
    scheme, separator, rest = url.partition('://')
    if not separator or scheme not in CLIENTS:
        schemes = ', '.join(f'{scheme}://' for scheme in CLIENTS)
        raise UserError(f'{url}: {scheme}:// is not supported; use {schemes}, or a mounted folder')
    bucket, _, key = rest.partition('/')
    key, account = key.lstrip('/'), ''
    if scheme == 'azure':
        account, (bucket, _, key) = bucket.partition('.')[0], key.partition('/')
    if not bucket:
        raise UserError(f'{url}: the bucket is missing; use a URL such as {scheme}://bucket/folder')
    return Location(scheme, account, bucket, key)


class GoogleClient(Client):
    """Client for Google Cloud Storage, with Application Default Credentials."""

    def __init__(self, _scheme: str, _account: str, timeout_seconds: float) -> None:
        from google.auth import default
        from google.cloud.storage import Client

        credentials, project = default()
        self.client: Any = Client(project=project, credentials=credentials)
        # Options for every request: timeouts for connecting and for each wait for data; `retry=None` turns off Google's
        # own retries.
        self.once: dict[str, Any] = {'timeout': (min(CONNECT_SECONDS, timeout_seconds), timeout_seconds), 'retry': None}

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        fields = 'items(name,size,etag),nextPageToken'
        for blob in self.client.list_blobs(location.bucket, prefix=location.key, fields=fields, **self.once):
            yield ObjectInfo(blob.name, blob.size, blob.etag)

    def list_folder(self, location: Location) -> FolderListing:
        options = {'prefix': location.key, 'delimiter': '/', 'fields': 'items(name,size,etag),prefixes,nextPageToken'}
        found = self.client.list_blobs(location.bucket, **options, **self.once)
        objects = [ObjectInfo(blob.name, blob.size, blob.etag) for blob in found]
        return [name.removesuffix('/') for name in found.prefixes], objects  # iterating over `found` sets `prefixes`

    def head(self, location: Location) -> ObjectInfo:
        blob = self._blob(location)
        blob.reload(**self.once)
        return ObjectInfo(location.key, blob.size, blob.etag)

    def current_version(self, location: Location) -> tuple[int, str]:
        """Return an object's size in bytes and its generation."""
        blob = self._blob(location)
        blob.reload(**self.once)
        return blob.size, str(blob.generation)

    def read(self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str) -> None:
        """Download an object's stored bytes, or a range of them, to a file without decompression.

        Google's client checks the hash of a whole object, but not of a range.
        """
        part = {} if span is None else {'start': span[0], 'end': span[1] - 1}
        if version:
            part['if_generation_match'] = int(version)
        self._blob(location).download_to_file(file, raw_download=True, **part, **self.once)

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        # For conditional uploads, Google supports only generations, not etags; generation 0 means that the object does
        # not exist.
        blob, condition = self._blob(location), {'if_generation_match': 0} if if_absent else {}
        if if_tag is not None:
            # This is free of races: reload() returns etag and generation together. A later write by another process
            # changes the generation, so the upload fails with status 412.
            blob.reload(**self.once)
            if blob.etag != if_tag:
                raise PreconditionFailed(f'gs://{location.bucket}/{location.key}: has etag {blob.etag}, not {if_tag}')
            condition = {'if_generation_match': blob.generation}
        if isinstance(content, bytes):
            blob.upload_from_string(content, 'application/octet-stream', **condition, **self.once)
        else:
            blob.upload_from_filename(str(content), **condition, **self.once)

    def delete(self, location: Location) -> None:
        self._blob(location).delete(**self.once)

    def _blob(self, location: Location) -> Any:
        return self.client.bucket(location.bucket).blob(location.key)


class AzureClient(Client):
    """Client for Azure Blob Storage and Data Lake, with an access key or Azure's credential chain."""

    def __init__(self, _scheme: str, account: str, timeout_seconds: float) -> None:
        from azure.core.credentials import AzureNamedKeyCredential
        from azure.storage.blob import BlobServiceClient

        account = os.environ.get('AZURE_ACCOUNT_NAME') or account or os.environ.get('AZURE_STORAGE_ACCOUNT_NAME', '')
        if not account:
            raise UserError(
                'az://: the account is missing; set AZURE_ACCOUNT_NAME, or use a URL such as '
                'azure://ACCOUNT.blob.core.windows.net/CONTAINER'
            )
        key = os.environ.get('AZURE_ACCOUNT_ACCESS_KEY') or os.environ.get('AZURE_STORAGE_ACCOUNT_KEY')
        if key:
            credential = AzureNamedKeyCredential(account, key)
        else:
            from azure.identity import AzureCliCredential, ChainedTokenCredential, DefaultAzureCredential

            credential = ChainedTokenCredential(AzureCliCredential(), DefaultAzureCredential())
        endpoint = os.environ.get('AZURE_STORAGE_ENDPOINT') or f'https://{account}.blob.core.windows.net'
        self.client = BlobServiceClient(
            endpoint,
            credential=credential,
            retry_total=0,  # no retries by the client: `RetryPolicy` retries
            connection_timeout=min(CONNECT_SECONDS, timeout_seconds),
            read_timeout=timeout_seconds,
        )

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        for blob in self.client.get_container_client(location.bucket).list_blobs(name_starts_with=location.key):
            yield self._object(location, blob)

    def list_folder(self, location: Location) -> FolderListing:
        from azure.storage.blob import BlobPrefix

        folders: list[str] = []
        objects: list[ObjectInfo] = []
        for found in self.client.get_container_client(location.bucket).walk_blobs(name_starts_with=location.key):
            if isinstance(found, BlobPrefix):
                folders.append(self._key(location, found.name.removesuffix('/')))
            else:
                objects.append(self._object(location, found))
        return folders, objects

    def head(self, location: Location) -> ObjectInfo:
        return self._object(location, self._blob(location).get_blob_properties())

    def read(self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str) -> None:
        """Download an object, or only its bytes [span[0], span[1]), into an open file.

        Azure's client requests the first 32 MiB in one request, and the rest in requests of 4 MiB.
        """
        from azure.core import MatchConditions

        part: dict[str, Any] = {} if span is None else {'offset': span[0], 'length': span[1] - span[0]}
        if version:
            part |= {'etag': f'"{version}"', 'match_condition': MatchConditions.IfNotModified}
        self._blob(location).download_blob(**part).readinto(file)

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload an object from bytes or a file; large files are uploaded in blocks."""
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError

        condition = {'etag': f'"{if_tag}"', 'match_condition': MatchConditions.IfNotModified} if if_tag else {}
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        try:
            with nullcontext(content) if isinstance(content, bytes) else content.open('rb') as body:
                self._blob(location).upload_blob(body, length=size, overwrite=not if_absent, **condition)
        except ResourceExistsError as error:
            # If the object exists, Azure answers `overwrite=False` with status 409 instead of 412, and 409 would be
            # retried.
            if not if_absent:
                raise
            raise PreconditionFailed(f'{location.bucket}/{location.key}: already exists') from error

    def delete(self, location: Location) -> None:
        self._blob(location).delete_blob()

    def _blob(self, location: Location) -> Any:
        return self.client.get_blob_client(location.bucket, location.key)

    def _object(self, location: Location, found: Any) -> ObjectInfo:
        return ObjectInfo(self._key(location, found.name), found.size, (found.etag or '').strip('"'))

    @staticmethod
    def _key(location: Location, name: str) -> str:
        """Return an object's key as it appears in URLs; for azure:// it starts with the container."""
        return f'{location.bucket}/{name}' if location.scheme == 'azure' else name


class HubClient(Client):
    """Read-only client for Hugging Face."""

    def __init__(self, _scheme: str, _account: str, _timeout_seconds: float) -> None:
        self.files = self.file_system()

    def file_system(self) -> Any:
        from huggingface_hub import HfFileSystem

        # Instances are cached per process by default, but a client here may be used by only one thread at a time.
        return HfFileSystem(skip_instance_cache=True)

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        # Listings are cached, but another process may have written since.
        self.files.invalidate_cache()
        for path, found in self.files.find(self._path(location), detail=True).items():
            yield self._object(path, found)

    def list_folder(self, location: Location) -> FolderListing:
        self.files.invalidate_cache()
        try:
            entries = self.files.ls(self._path(location), detail=True)
        except FileNotFoundError:  # treat a missing folder as empty, as in other stores
            return [], []
        folders = [found['name'].strip('/').partition('/')[2] for found in entries if found['type'] == 'directory']
        return folders, [self._object(found['name'], found) for found in entries if found['type'] == 'file']

    def head(self, location: Location) -> ObjectInfo:
        self.files.invalidate_cache()
        return self._object(self._path(location), self.files.info(self._path(location)))

    def current_version(self, location: Location) -> tuple[int, str]:
        """Return an object's size in bytes, without a version: the file system has no conditional reads."""
        return self.head(location).size, ''

    def read(self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str) -> None:
        """Download an object, or a byte range in one request, to a file; specific versions are not supported."""
        assert not version
        if span is None:
            self.files.get_file(self._path(location), file)
        else:
            file.write(self.files.cat_file(self._path(location), start=span[0], end=span[1]))

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        self._refuse(location, 'uploading')

    def delete(self, location: Location) -> None:
        self._refuse(location, 'deleting')

    def _refuse(self, location: Location, action: str) -> None:
        raise UserError(f'hf://{self._path(location)}: {action} is not supported; use another store')

    @staticmethod
    def _path(location: Location) -> str:
        return f'{location.bucket}/{location.key}'.rstrip('/')

    @staticmethod
    def _object(path: str, found: dict[str, Any]) -> ObjectInfo:
        tag = next((found[name] for name in ('etag', 'ETag', 'blob_id', 'md5') if found.get(name)), '')
        return ObjectInfo(path.strip('/').partition('/')[2], found['size'], str(tag).strip('"'))


def _google(scheme: str, account: str, timeout_seconds: float) -> Client:
    """Return a client for Google Cloud Storage: for its S3 interface if HMAC keys are set, otherwise Google's own."""
    kind = S3Client if 'GCS_KEY' in os.environ and 'GCS_SECRET' in os.environ else GoogleClient
    return kind(scheme, account, timeout_seconds)


CLIENTS: dict[str, Callable[[str, str, float], Client]] = {
    's3': S3Client,
    'gs': _google,
    'azure': AzureClient,
    'az': AzureClient,
    'azure-dl': AzureClient,
    'hf': HubClient,
}
"""Client constructors by URL scheme; called with the scheme, the account, and a timeout in seconds for each wait
for data."""
