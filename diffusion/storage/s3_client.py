"""Client for S3, S3-compatible stores, and Google Cloud Storage through its S3 interface."""

import contextlib
import functools
import io
import os
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage import bucket_interface
from diffusion.storage.bucket_interface import CONNECT_SECONDS, Client, FolderListing, Location, ObjectInfo

PART_BYTES = 2**26
"""Part size of multipart uploads in bytes; larger files are uploaded in parts, several in parallel."""
WAIT_SECONDS = 0.01
"""Interval in seconds at which the upload of a file calls the policy's `wait`, which may raise an error to end it."""
GOOGLE_S3 = 'https://storage.googleapis.com'
"""Google's S3-compatible endpoint, used with the HMAC keys in GCS_KEY and GCS_SECRET."""


@functools.cache
def _model_loader(data_path: str | None) -> Any:
    """Return botocore's loader of API descriptions; clients share it, since parsing takes most of their start time."""
    import botocore.loaders

    return botocore.loaders.create_loader(data_path)


class S3Client(Client):
    """Client for S3 and S3-compatible stores, with boto3's credentials, and for gs:// URLs, with HMAC keys.

    Without boto3's credentials, it can use only public buckets.
    """

    def __init__(self, scheme: str, _account: str, timeout_seconds: float) -> None:
        import boto3
        import botocore.session
        from boto3.s3.transfer import TransferConfig
        from botocore import UNSIGNED
        from botocore.config import Config

        self.google = scheme == 'gs'
        endpoint = os.environ.get('S3_ENDPOINT_URL')
        if endpoint and not endpoint.startswith(('http://', 'https://')):
            raise UserError(f'S3_ENDPOINT_URL: {endpoint} is not a URL; set it to https://{endpoint}')
        settings: dict[str, Any] = {'endpoint_url': endpoint}
        source = botocore.session.get_session()
        source.register_component('data_loader', _model_loader(source.get_config_variable('data_path')))
        # Try several times: an instance's metadata service throttles requests if many processes start at the same time.
        # By default, botocore tries only once, and then continues without credentials.
        if 'AWS_METADATA_SERVICE_NUM_ATTEMPTS' not in os.environ:
            source.set_config_variable('metadata_service_num_attempts', 4)
        session = boto3.Session(botocore_session=source)
        self.anonymous = not self.google and session.get_credentials() is None
        options: dict[str, Any] = {'signature_version': UNSIGNED} if self.anonymous else {}
        if self.google:
            keys = {'aws_access_key_id': os.environ['GCS_KEY'], 'aws_secret_access_key': os.environ['GCS_SECRET']}
            settings = {'endpoint_url': GOOGLE_S3, 'region_name': 'auto', **keys}
            # Google's S3 interface does not support the checksums that boto3 adds to requests by default.
            options = dict.fromkeys(('request_checksum_calculation', 'response_checksum_validation'), 'when_required')
        config = Config(
            connect_timeout=min(CONNECT_SECONDS, timeout_seconds),
            read_timeout=timeout_seconds,
            retries={'total_max_attempts': 1},  # no retries by botocore, since `RetryPolicy` retries
            **options,
        )
        self.client: Any = session.client('s3', config=config, **settings)
        self.transfer = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES)
        # Streaming defines this variable: the comma-separated names of requester-pays buckets.
        payers = os.environ.get('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', '')
        self.requester_pays = {name.strip() for name in payers.split(',') if name.strip()}

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        for page in self._pages('list_objects_v2', location, **self._payer(location)):
            yield from map(self._object, page.get('Contents', ()))

    def list_folder(self, location: Location) -> FolderListing:
        folders: list[str] = []
        objects: list[ObjectInfo] = []
        for page in self._pages('list_objects_v2', location, Delimiter='/', **self._payer(location)):
            folders += [found['Prefix'].removesuffix('/') for found in page.get('CommonPrefixes', ())]
            objects += map(self._object, page.get('Contents', ()))
        return folders, objects

    def head(self, location: Location) -> ObjectInfo:
        found = self._call(self.client.head_object, Bucket=location.bucket, Key=location.key, **self._payer(location))
        return ObjectInfo(location.key, found['ContentLength'], found['ETag'].strip('"'))

    def read(self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str) -> None:
        """Download an object or a byte range to a file; botocore checks the length and, if present, the checksum."""
        part = {} if span is None else {'Range': f'bytes={span[0]}-{span[1] - 1}'}
        if version:
            part['IfMatch'] = f'"{version}"'
        answer = self._call(
            self.client.get_object, Bucket=location.bucket, Key=location.key, **part, **self._payer(location)
        )
        with contextlib.closing(answer['Body']) as body:
            for chunk in body.iter_chunks(bucket_interface.CHUNK_BYTES):
                file.write(chunk)

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload an object in one request; large files without a condition are uploaded in parts."""
        # Streaming defines this variable: a canned ACL, such as bucket-owner-full-control.
        extra = {'ACL': os.environ['S3_CANNED_ACL']} if os.environ.get('S3_CANNED_ACL') else {}
        conditions = {'IfNoneMatch': '*'} if if_absent else {'IfMatch': f'"{if_tag}"'} if if_tag else {}
        if conditions and self.google:
            raise UserError(
                f'gs://{location.bucket}: conditional writes need Application Default Credentials; '
                'unset GCS_KEY and GCS_SECRET'
            )
        if isinstance(content, Path) and not conditions:
            return self._call(self._upload, content, location, extra)
        # Use put_object, which is limited to 5 GiB: boto3's upload_file does not support conditions.
        with contextlib.nullcontext(content) if isinstance(content, bytes) else content.open('rb') as body:
            self._call(
                self.client.put_object, Bucket=location.bucket, Key=location.key, Body=body, **extra, **conditions
            )

    def _upload(self, path: Path, location: Location, extra: dict[str, str]) -> None:
        """Upload a file like boto3's `upload_file`, but end the upload if the policy's `wait` raises."""
        from boto3.s3.transfer import create_transfer_manager

        # An exception in this block cancels the parts not yet sent.
        with create_transfer_manager(self.client, self.transfer) as manager:
            future = manager.upload(str(path), location.bucket, location.key, extra_args=extra)
            while not future.done():
                self.policy.wait()
                time.sleep(WAIT_SECONDS)
            future.result()

    def delete(self, location: Location) -> None:
        self._call(self.client.delete_object, Bucket=location.bucket, Key=location.key)

    def abort_uploads(self, location: Location, older_than_seconds: float) -> Iterator[str]:
        from botocore.exceptions import ClientError

        folder = f'{location.key.rstrip("/")}/'.lstrip('/')
        for page in self._pages('list_multipart_uploads', location):
            now = parsedate_to_datetime(page['ResponseMetadata']['HTTPHeaders']['date'])
            for upload in page.get('Uploads', ()):
                age_seconds = (now - upload['Initiated']).total_seconds()
                inside = upload['Key'] == location.key or upload['Key'].startswith(folder)
                if age_seconds < older_than_seconds or not inside:
                    continue
                settings = {'Bucket': location.bucket, 'Key': upload['Key'], 'UploadId': upload['UploadId']}
                try:
                    self._call(self.client.abort_multipart_upload, **settings)
                except ClientError as error:
                    if error.response['Error']['Code'] != 'NoSuchUpload':
                        raise
                    continue  # do not yield an upload that another process has finished or aborted
                yield upload['Key']

    def _pages(self, method: str, location: Location, **settings: str) -> Iterator[dict[str, Any]]:
        request = {'Bucket': location.bucket, 'Prefix': location.key, **settings}
        pages = iter(self.client.get_paginator(method).paginate(**request))
        while page := self._call(next, pages, None):
            yield page

    @staticmethod
    def _object(found: dict[str, Any]) -> ObjectInfo:
        return ObjectInfo(found['Key'], found['Size'], found['ETag'].strip('"'))

    def _payer(self, location: Location) -> dict[str, str]:
        """Return the request parameter that accepts the cost for a requester-pays bucket; empty for other buckets."""
        return {'RequestPayer': 'requester'} if location.bucket in self.requester_pays else {}

    def _call(self, request: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Call a client's method; if access is denied to a request without credentials, raise NoCredentialsError."""
        from botocore.exceptions import ClientError, NoCredentialsError

        try:
            return request(*args, **settings)
        except ClientError as error:
            # The bucket is not public: the reason is missing credentials, not missing permissions.
            if self.anonymous and error.response['ResponseMetadata']['HTTPStatusCode'] in (401, 403):
                raise NoCredentialsError from error
            raise
