"""Clients of object stores behind the same five requests; each request is made once, and `retry` judges its errors.

S3, Google and Azure are reached through the packages of their makers, which Streaming brings. Not through obstore,
whose one Tokio runtime per process does not survive a fork: measured with 0.12.1 against moto, a process that has used
it once forks children in which every request hangs, through a new client too, and DataLoader workers are such children.
"""

import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from diffusion.errors import UserError
from diffusion.storage.retry import PreconditionFailed

CHUNK_BYTES = 2**18
PART_BYTES = 2**26
"""Part of an upload; a larger file is uploaded in several, some of them at once."""
CONNECT_SECONDS = 10.0
GOOGLE_S3 = 'https://storage.googleapis.com'
"""Google's S3 interface, for the HMAC keys in GCS_KEY and GCS_SECRET."""


class Object(NamedTuple):
    """An object of a store: its key in the bucket, its bytes, and its etag."""

    key: str
    size: int
    tag: str


class Location(NamedTuple):
    """An object, or all whose keys begin alike.

    `account` is that of Azure, else empty. Keys of `Object` are those of URLs: what follows the first slash, which in
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY has the container in it, and in all other URLs is the key.
    """

    scheme: str
    account: str
    bucket: str
    key: str


class Client(Protocol):
    """Requests to one kind of store. A client serves one thread at a time, in the process that made it."""

    def list(self, at: Location) -> Iterator[Object]:
        """Yield the objects whose keys begin with that of `at`."""
        ...

    def head(self, at: Location) -> Object:
        """Return the size and etag of an object; an error of status 404 where there is none."""
        ...

    def read(self, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
        """Write an object's content to a file, or its bytes from the first of `span` up to the second."""
        ...

    def write(self, at: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Make an object of bytes or of a file.

        Args:
            at: The object.
            content: The bytes, or the path of a file.
            if_absent: Fail with status 412 where there is such an object.
            if_tag: Fail with status 412 where the object has another etag.
        """
        ...

    def delete(self, at: Location) -> None:
        """Remove an object."""
        ...


def locate(url: str) -> Location:
    """Parse the URL of an object or a folder.

    Raises:
        UserError: Its scheme has no client, or it names no bucket.
    """
    scheme, separator, rest = url.partition('://')
    if not separator or scheme not in CLIENTS:
        schemes = ', '.join(f'{scheme}://' for scheme in CLIENTS)
        raise UserError(f'{url}: {scheme}:// is not supported; use {schemes}, or a folder that is mounted')
    bucket, _, key = rest.partition('/')
    key, account = key.lstrip('/'), ''
    if scheme == 'azure':
        account, (bucket, _, key) = bucket.partition('.')[0], key.partition('/')
    if not bucket:
        raise UserError(f'{url}: names no bucket; write it as {scheme}://bucket/folder')
    return Location(scheme, account, bucket, key)


class S3Client:
    """S3, and what speaks its language: every source of credentials that boto3 has, or none for public buckets."""

    def __init__(self, scheme: str, _account: str, timeout_seconds: float) -> None:
        import boto3
        import botocore.session
        from boto3.s3.transfer import TransferConfig
        from botocore import UNSIGNED
        from botocore.config import Config

        self.google = scheme == 'gs'
        endpoint = os.environ.get('S3_ENDPOINT_URL')
        if endpoint and not endpoint.startswith(('http://', 'https://')):
            raise UserError(f'S3_ENDPOINT_URL={endpoint}: is no URL; write https://{endpoint}')
        settings: dict[str, Any] = {'endpoint_url': endpoint}
        options: dict[str, Any] = {}
        source = botocore.session.get_session()
        # An instance's metadata service turns many processes that start at once away; without its answer there would
        # be no credentials. botocore asks it once.
        if 'AWS_METADATA_SERVICE_NUM_ATTEMPTS' not in os.environ:
            source.set_config_variable('metadata_service_num_attempts', 4)
        session = boto3.Session(botocore_session=source)
        self.anonymous = not self.google and session.get_credentials() is None
        if self.anonymous:
            options['signature_version'] = UNSIGNED
        if self.google:
            keys = {'aws_access_key_id': os.environ['GCS_KEY'], 'aws_secret_access_key': os.environ['GCS_SECRET']}
            settings = {'endpoint_url': GOOGLE_S3, 'region_name': 'auto', **keys}
            # Google knows none of the checksums that boto3 adds to S3's requests.
            options |= {
                'request_checksum_calculation': 'when_required',
                'response_checksum_validation': 'when_required',
            }
        config = Config(
            connect_timeout=min(CONNECT_SECONDS, timeout_seconds),
            read_timeout=timeout_seconds,
            retries={'total_max_attempts': 1},
            **options,
        )
        self.client: Any = session.client('s3', config=config, **settings)
        self.transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
        payers = os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '')
        self.requester_pays = {name.strip() for name in payers.split(',') if name.strip()}

    def list(self, at: Location) -> Iterator[Object]:
        """List in pages of 1000."""
        request, token = {'Bucket': at.bucket, 'Prefix': at.key, **self._payer(at)}, {}
        while True:
            page = self._call(self.client.list_objects_v2, **request, **token)
            for found in page.get('Contents', ()):
                yield Object(found['Key'], found['Size'], found['ETag'].strip('"'))
            if not page.get('IsTruncated'):
                return
            token = {'ContinuationToken': page['NextContinuationToken']}

    def head(self, at: Location) -> Object:
        """Ask for the metadata."""
        found = self._call(self.client.head_object, Bucket=at.bucket, Key=at.key, **self._payer(at))
        return Object(at.key, found['ContentLength'], found['ETag'].strip('"'))

    def read(self, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
        """Stream the body; botocore sees to its length, and to its checksum where S3 sends one."""
        part = {} if span is None else {'Range': f'bytes={span[0]}-{span[1] - 1}'}
        answer = self._call(self.client.get_object, Bucket=at.bucket, Key=at.key, **part, **self._payer(at))
        with contextlib.closing(answer['Body']) as body:
            for chunk in body.iter_chunks(CHUNK_BYTES):
                file.write(chunk)

    def write(self, at: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload in one request, or a large file in parts."""
        # Streaming's variable: a canned ACL such as bucket-owner-full-control.
        extra = {'ACL': os.environ['S3_CANNED_ACL']} if os.environ.get('S3_CANNED_ACL') else {}
        conditions = {'IfNoneMatch': '*'} if if_absent else {'IfMatch': f'"{if_tag}"'} if if_tag else {}
        if conditions and self.google:
            raise UserError(
                f'gs://{at.bucket}: conditional writes need Application Default Credentials; '
                'unset GCS_KEY and GCS_SECRET'
            )
        if isinstance(content, bytes):
            self._call(self.client.put_object, Bucket=at.bucket, Key=at.key, Body=content, **extra, **conditions)
        elif conditions:  # in one request, which S3 takes up to 5 GiB
            with content.open('rb') as body:
                self._call(self.client.put_object, Bucket=at.bucket, Key=at.key, Body=body, **extra, **conditions)
        else:
            upload = self.client.upload_file
            self._call(upload, str(content), at.bucket, at.key, ExtraArgs=extra, Config=self.transfer)

    def delete(self, at: Location) -> None:
        """Remove; S3 says nothing where there is none."""
        self._call(self.client.delete_object, Bucket=at.bucket, Key=at.key)

    def _payer(self, at: Location) -> dict[str, str]:
        return {'RequestPayer': 'requester'} if at.bucket in self.requester_pays else {}

    def _call(self, request: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        from botocore.exceptions import ClientError, NoCredentialsError

        try:
            return request(*args, **settings)
        except ClientError as error:
            if self.anonymous and error.response['ResponseMetadata']['HTTPStatusCode'] in (401, 403):
                raise NoCredentialsError from error  # the bucket is not public
            raise


class GoogleClient:
    """Google Cloud Storage by Application Default Credentials."""

    def __init__(self, _scheme: str, _account: str, timeout_seconds: float) -> None:
        from google.auth import default
        from google.cloud.storage import Client

        credentials, project = default()
        self.client: Any = Client(project=project, credentials=credentials)
        self.once: dict[str, Any] = {'timeout': (min(CONNECT_SECONDS, timeout_seconds), timeout_seconds), 'retry': None}

    def list(self, at: Location) -> Iterator[Object]:
        """List in pages of 1000."""
        fields = 'items(name,size,etag),nextPageToken'
        for blob in self.client.list_blobs(at.bucket, prefix=at.key, fields=fields, **self.once):
            yield Object(blob.name, blob.size, blob.etag)

    def head(self, at: Location) -> Object:
        """Ask for the metadata."""
        blob = self._blob(at)
        blob.reload(**self.once)
        return Object(at.key, blob.size, blob.etag)

    def read(self, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
        """Stream the body as it is stored; Google's client checks its hash."""
        part = {} if span is None else {'start': span[0], 'end': span[1] - 1}
        self._blob(at).download_to_file(file, raw_download=True, **part, **self.once)

    def write(self, at: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload; conditions of Google's are on an object's generation, and 0 stands for none."""
        blob, condition = self._blob(at), {'if_generation_match': 0} if if_absent else {}
        if if_tag is not None:
            blob.reload(**self.once)
            if blob.etag != if_tag:
                raise PreconditionFailed(f'gs://{at.bucket}/{at.key}: has etag {blob.etag}, not {if_tag}')
            condition = {'if_generation_match': blob.generation}
        if isinstance(content, bytes):
            blob.upload_from_string(content, 'application/octet-stream', **condition, **self.once)
        else:
            blob.upload_from_filename(str(content), **condition, **self.once)

    def delete(self, at: Location) -> None:
        """Remove."""
        self._blob(at).delete(**self.once)

    def _blob(self, at: Location) -> Any:
        return self.client.bucket(at.bucket).blob(at.key)


class AzureClient:
    """Azure Blob Storage, and Data Lake by its blob interface, with an access key or Azure's chain of credentials."""

    def __init__(self, _scheme: str, account: str, timeout_seconds: float) -> None:
        from azure.core.credentials import AzureNamedKeyCredential
        from azure.storage.blob import BlobServiceClient

        account = os.environ.get('AZURE_ACCOUNT_NAME') or account or os.environ.get('AZURE_STORAGE_ACCOUNT_NAME', '')
        if not account:
            raise UserError('az://: set AZURE_ACCOUNT_NAME, or write azure://ACCOUNT.blob.core.windows.net/CONTAINER')
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
            retry_total=0,
            connection_timeout=min(CONNECT_SECONDS, timeout_seconds),
            read_timeout=timeout_seconds,
        )

    def list(self, at: Location) -> Iterator[Object]:
        """List in pages of 5000."""
        for blob in self.client.get_container_client(at.bucket).list_blobs(name_starts_with=at.key):
            yield Object(self._key(at, blob.name), blob.size, (blob.etag or '').strip('"'))

    def head(self, at: Location) -> Object:
        """Ask for the metadata."""
        found = self._blob(at).get_blob_properties()
        return Object(self._key(at, at.key), found.size, (found.etag or '').strip('"'))

    def read(self, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
        """Stream the body, in ranges of 4 MiB after the first 32 MiB."""
        part = {} if span is None else {'offset': span[0], 'length': span[1] - span[0]}
        self._blob(at).download_blob(**part).readinto(file)

    def write(self, at: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload, a large file in blocks."""
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError

        condition = {'etag': f'"{if_tag}"', 'match_condition': MatchConditions.IfNotModified} if if_tag else {}
        try:
            if isinstance(content, bytes):
                self._blob(at).upload_blob(content, overwrite=not if_absent, **condition)
            else:
                with content.open('rb') as body:
                    size = content.stat().st_size
                    self._blob(at).upload_blob(body, length=size, overwrite=not if_absent, **condition)
        except ResourceExistsError as error:  # 409, which elsewhere means that one should try again
            if not if_absent:
                raise
            raise PreconditionFailed(f'{at.bucket}/{at.key}: is there already') from error

    def delete(self, at: Location) -> None:
        """Remove."""
        self._blob(at).delete_blob()

    def _blob(self, at: Location) -> Any:
        return self.client.get_blob_client(at.bucket, at.key)

    @staticmethod
    def _key(at: Location, name: str) -> str:
        return f'{at.bucket}/{name}' if at.scheme == 'azure' else name


class FsspecClient:
    """A file system of fsspec: Hugging Face's, which is only read here, and Oracle's, for which ocifs is needed."""

    def __init__(self, scheme: str, _account: str, _timeout_seconds: float) -> None:
        self.files = self.file_system(scheme)

    def file_system(self, scheme: str) -> Any:
        """Make an instance that nobody shares."""
        import fsspec

        try:
            return fsspec.filesystem(scheme, skip_instance_cache=True)
        except ImportError as error:
            raise UserError(f'{scheme}://: needs the package {scheme}fs; pip install {scheme}fs') from error

    def list(self, at: Location) -> Iterator[Object]:
        """List what is at or below a path."""
        self.files.invalidate_cache()
        for path, found in self.files.find(f'{at.bucket}/{at.key}'.rstrip('/'), detail=True).items():
            yield self._object(path, found)

    def head(self, at: Location) -> Object:
        """Ask for the metadata."""
        self.files.invalidate_cache()
        return self._object(f'{at.bucket}/{at.key}', self.files.info(f'{at.bucket}/{at.key}'))

    def read(self, at: Location, file: io.BufferedIOBase, span: tuple[int, int] | None) -> None:
        """Stream the content."""
        path = f'{at.bucket}/{at.key}'
        if span is None:
            self.files.get_file(path, file)
        else:
            file.write(self.files.cat_file(path, start=span[0], end=span[1]))

    def write(self, at: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload."""
        if at.scheme == 'hf' or if_absent or if_tag:
            kind = 'conditional writes are' if at.scheme != 'hf' else 'uploading is'
            raise UserError(f'{at.scheme}://{at.bucket}/{at.key}: {kind} not supported here; use another store')
        if isinstance(content, bytes):
            self.files.pipe_file(f'{at.bucket}/{at.key}', content)
        else:
            self.files.put_file(str(content), f'{at.bucket}/{at.key}')

    def delete(self, at: Location) -> None:
        """Remove."""
        self.files.rm_file(f'{at.bucket}/{at.key}')

    @staticmethod
    def _object(path: str, found: dict[str, Any]) -> Object:
        tag = next((found[name] for name in ('etag', 'ETag', 'blob_id', 'md5') if found.get(name)), '')
        return Object(path.strip('/').partition('/')[2], found['size'], str(tag).strip('"'))


def _google(scheme: str, account: str, timeout_seconds: float) -> Client:
    kind = S3Client if 'GCS_KEY' in os.environ and 'GCS_SECRET' in os.environ else GoogleClient
    return kind(scheme, account, timeout_seconds)


CLIENTS: dict[str, Callable[[str, str, float], Client]] = {
    's3': S3Client,
    'gs': _google,
    'azure': AzureClient,
    'az': AzureClient,
    'azure-dl': AzureClient,
    'oci': FsspecClient,
    'hf': FsspecClient,
}
"""Constructors by scheme, called with the scheme, the account, and the seconds in which a request must be answered."""
