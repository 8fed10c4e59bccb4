"""S3 server on localhost (moto's) that fails requests on demand and records all requests."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test', 'AWS_DEFAULT_REGION': 'us-east-1'}
CODES = {403: 'AccessDenied', 404: 'NoSuchKey', 500: 'InternalError', 503: 'SlowDown'}
ALWAYS = 10**9


@dataclass
class Fault:
    """Fault that is injected into the next matching requests."""

    words: str
    """Words that a request must all contain, such as `GET shard.00000`."""
    what: int | str | float
    """Kind of fault: an integer is an HTTP status; a float is the number of seconds that the body takes; `cut` halves
    the body, `flip` flips a bit of it, `whole` ignores a requested range, `reset` resets the connection, `hang` waits a
    minute and then resets it, `done 500` and `done reset` carry out the request and then answer 500 or reset the
    connection; any other text is an S3 error code with status 400."""
    times: int
    """Number of further requests that fail."""


@dataclass
class Store:
    """Handle of the server: buckets and objects, faults to inject, and recorded requests."""

    client: Any
    """boto3 client of the server."""
    faults: list[Fault] = field(default_factory=list)
    """Faults that have not been used up."""
    requests: list[str] = field(default_factory=list)
    """All requests, failed ones included, as `GET /bucket/key?query`."""
    authorizations: list[str] = field(default_factory=list)
    """Authorization header of each request, or an empty text."""
    payers: list[str] = field(default_factory=list)
    """x-amz-request-payer header of each request, or an empty text."""
    writing: threading.Lock = field(default_factory=threading.Lock)
    """Held by the one write at a time."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that lead clients to the server."""
        return ENVIRONMENT | {'S3_ENDPOINT_URL': self.client.meta.endpoint_url}

    def fail(self, words: str, what: int | str | float, *, times: int = ALWAYS) -> Fault:
        """Make the next requests that contain all of the words fail, and return the fault; see `Fault`."""
        self.faults.append(Fault(words, what, times))
        return self.faults[-1]

    def bucket(self, name: str, **objects: bytes) -> str:
        """Create a bucket with objects, and return its URL."""
        self.client.create_bucket(Bucket=name)
        for key, body in objects.items():
            self.client.put_object(Bucket=name, Key=key, Body=body)
        return f's3://{name}'

    def upload(self, folder: Path, bucket: str = 'data') -> str:
        """Upload a folder into a new bucket, and return its URL."""
        files = sorted(path for path in folder.rglob('*') if path.is_file())
        return self.bucket(bucket, **{f'mds/{path.relative_to(folder)}': path.read_bytes() for path in files}) + '/mds'

    def put(self, url: str, name: str, body: bytes) -> None:
        bucket, _, key = url.removeprefix('s3://').partition('/')
        self.client.put_object(Bucket=bucket, Key=f'{key}/{name}', Body=body)

    def delete(self, url: str, name: str) -> None:
        bucket, _, key = url.removeprefix('s3://').partition('/')
        self.client.delete_object(Bucket=bucket, Key=f'{key}/{name}')

    def objects(self, bucket: str) -> dict[str, bytes]:
        keys = [found['Key'] for found in self.listed(bucket)]
        return {key: self.client.get_object(Bucket=bucket, Key=key)['Body'].read() for key in keys}

    def listed(self, bucket: str) -> list[dict[str, Any]]:
        pages = self.client.get_paginator('list_objects_v2').paginate(Bucket=bucket)
        return [found for page in pages for found in page.get('Contents', ())]

    def paths(self, method: str) -> list[str]:
        """Return the paths of all requests by a method, such as `/bucket/key`."""
        return [request.split()[1].partition('?')[0] for request in self.requests if request.startswith(method)]

    def shard_reads(self) -> Counter[str]:
        """Return the number of GET requests per shard, by path."""
        return Counter(path for path in self.paths('GET') if '.mds' in path)

    def clear(self) -> None:
        self.faults.clear()
        for bucket in self.client.list_buckets()['Buckets']:
            for found in self.listed(bucket['Name']):
                self.client.delete_object(Bucket=bucket['Name'], Key=found['Key'])
            self.client.delete_bucket(Bucket=bucket['Name'])
        self.requests.clear()

    def take(self, request: str) -> Fault | None:
        """Record a request, and return the fault to inject into it, if any."""
        with self._lock:
            self.requests.append(request)
            fault = next((each for each in self.faults if all(word in request for word in each.words.split())), None)
            if fault is not None:
                fault.times -= 1
                if fault.times == 0:
                    self.faults.remove(fault)
            return fault


class FaultyApp:
    """WSGI application that forwards requests to another one, except for those that must fail."""

    def __init__(self, app: Callable[..., Any], store: Store) -> None:
        self.app, self.store = app, store

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        self.store.authorizations.append(environ.get('HTTP_AUTHORIZATION', ''))
        self.store.payers.append(environ.get('HTTP_X_AMZ_REQUEST_PAYER', ''))
        fault = self.store.take(f'{environ["REQUEST_METHOD"]} {environ["PATH_INFO"]}?{environ["QUERY_STRING"]}')
        if fault is None:
            # moto's threads check a condition and write in two steps: two writers of a new object would both succeed.
            with self.store.writing if environ['REQUEST_METHOD'] == 'PUT' else nullcontext():
                return self.app(environ, start_response)
        if isinstance(fault.what, int):
            return refused(fault.what, CODES.get(fault.what, 'Other'), start_response)
        if isinstance(fault.what, float):
            return slowly(self.app(environ, start_response), fault.what)
        if fault.what == 'whole':
            environ.pop('HTTP_RANGE', None)
            return self.app(environ, start_response)
        if fault.what in ('done 500', 'done reset'):
            b''.join(self.app(environ, lambda *_: None))
        if fault.what == 'done 500':
            return refused(500, CODES[500], start_response)
        if fault.what == 'hang':
            time.sleep(60)
        if fault.what in ('reset', 'hang', 'done reset'):
            environ['werkzeug.socket'].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        if fault.what not in ('cut', 'flip'):
            return refused(400, fault.what, start_response)
        # Remove S3's checksum headers, since not every store sends them and clients would detect the damage by them.
        plain = lambda status, headers, *rest: start_response(  # noqa: E731
            status, [header for header in headers if 'checksum' not in header[0].lower()], *rest
        )
        body = bytearray(b''.join(self.app(environ, plain)))
        if fault.what == 'cut':
            return [bytes(body[: len(body) // 2])]
        body[len(body) // 2] ^= 1
        return [bytes(body)]


def refused(status: int, code: str, start_response: Callable[..., Any]) -> list[bytes]:
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>as asked</Message></Error>'.encode()
    start_response(f'{status} Failed', [('Content-Type', 'application/xml'), ('Content-Length', str(len(body)))])
    return [body]


def slowly(parts: Any, seconds: float) -> Iterator[bytes]:
    """Yield a body in eight pieces, spread over a number of seconds; end an empty one after that time."""
    body = b''.join(parts)
    if not body:
        time.sleep(seconds)
    step = max(1, len(body) // 8)
    for start in range(0, len(body), step):
        time.sleep(seconds / 8)
        yield body[start : start + step]


@contextmanager
def serve() -> Iterator[Store]:
    """Run the server in a thread, and yield its handle."""
    import logging

    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    store = Store(None)
    app = FaultyApp(DomainDispatcherApplication(create_backend_app), store)
    server = make_server('127.0.0.1', 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    keys = {name.lower(): value for name, value in ENVIRONMENT.items() if 'KEY' in name}
    url = f'http://127.0.0.1:{server.server_port}'
    store.client = boto3.Session(**keys, region_name='us-east-1').client('s3', endpoint_url=url)
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
