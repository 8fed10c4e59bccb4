"""A real S3 API on localhost, moto's, behind a layer that fails for chosen objects, and counts what is read."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {
    'AWS_ACCESS_KEY_ID': 'test',
    'AWS_SECRET_ACCESS_KEY': 'test',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_MAX_ATTEMPTS': '1',  # boto's own, which wait for seconds
}
CODES = {403: 'AccessDenied', 404: 'NoSuchKey', 500: 'InternalError'}
ALWAYS = 10**9


@dataclass
class Fault:
    """What happens to the next reads of an object whose key holds the text: a status, `cut`, `flip` or seconds."""

    key: str
    what: int | str | float
    times: int


@dataclass
class FlakyStore:
    """The server, for tests."""

    client: Any
    faults: list[Fault] = field(default_factory=list)
    reads: Counter[str] = field(default_factory=Counter)
    """GETs that reached an object, failed ones included, by key."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """What makes Streaming find the server."""
        return ENVIRONMENT | {'S3_ENDPOINT_URL': self.client.meta.endpoint_url}

    def fail(self, key: str, what: int | str | float, times: int = ALWAYS) -> None:
        self.faults.append(Fault(key, what, times))

    def upload(self, folder: Path, bucket: str) -> str:
        """Put a folder into a new bucket; returns its URL."""
        self.client.create_bucket(Bucket=bucket)
        for path in sorted(path for path in folder.rglob('*') if path.is_file()):
            self.client.put_object(Bucket=bucket, Key=f'mds/{path.relative_to(folder)}', Body=path.read_bytes())
        return f's3://{bucket}/mds'

    def put(self, url: str, name: str, body: bytes) -> None:
        bucket, _, key = url.removeprefix('s3://').partition('/')
        self.client.put_object(Bucket=bucket, Key=f'{key}/{name}', Body=body)

    def delete(self, url: str, name: str) -> None:
        bucket, _, key = url.removeprefix('s3://').partition('/')
        self.client.delete_object(Bucket=bucket, Key=f'{key}/{name}')

    def shard_reads(self) -> Counter[str]:
        return Counter({key: count for key, count in self.reads.items() if '.mds' in key})

    def take(self, key: str) -> Fault | None:
        with self.lock:
            self.reads[key] += 1
            fault = next((fault for fault in self.faults if fault.key in key and fault.times > 0), None)
            if fault is not None:
                fault.times -= 1
            return fault


class FlakyApp:
    """Passes requests on, but for those that are to fail."""

    def __init__(self, app: Callable[..., Any], store: FlakyStore) -> None:
        self.app, self.store = app, store

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        fault = None if environ['REQUEST_METHOD'] != 'GET' else self.store.take(environ['PATH_INFO'].lstrip('/'))
        if fault is None:
            return self.app(environ, start_response)
        if isinstance(fault.what, int):
            return refused(fault.what, start_response)
        if isinstance(fault.what, float):
            return slowly(self.app(environ, start_response), fault.what)
        # Without the checksums that S3 sends, as not every store sends them.
        plain = lambda status, headers, *rest: start_response(  # noqa: E731
            status, [header for header in headers if 'checksum' not in header[0].lower()], *rest
        )
        body = bytearray(b''.join(self.app(environ, plain)))
        if fault.what == 'cut':
            return [bytes(body[: len(body) // 2])]
        body[len(body) // 2] ^= 1
        return [bytes(body)]


def refused(status: int, start_response: Callable[..., Any]) -> list[bytes]:
    body = f'<?xml version="1.0"?><Error><Code>{CODES[status]}</Code><Message>as asked</Message></Error>'.encode()
    start_response(f'{status} Failed', [('Content-Type', 'application/xml'), ('Content-Length', str(len(body)))])
    return [body]


def slowly(parts: Any, seconds: float) -> Iterator[bytes]:
    """The body in eight pieces, over so many seconds."""
    body = b''.join(parts)
    step = max(1, len(body) // 8)
    for start in range(0, len(body), step):
        time.sleep(seconds / 8)
        yield body[start : start + step]


@contextmanager
def serve() -> Iterator[FlakyStore]:
    """Run the server in a thread."""
    import logging

    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    store = FlakyStore(None)
    server = make_server(
        '127.0.0.1', 0, FlakyApp(DomainDispatcherApplication(create_backend_app), store), threaded=True
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f'http://127.0.0.1:{server.server_port}'
    keys = {name.lower(): value for name, value in ENVIRONMENT.items() if 'KEY' in name}
    store.client = boto3.client('s3', endpoint_url=url, region_name='us-east-1', **keys)
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope='session')
def _store_server() -> Iterator[FlakyStore]:
    with serve() as store:
        yield store


@pytest.fixture
def store(_store_server: FlakyStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlakyStore]:
    """The server, and the variables by which Streaming finds it; tries follow each other at once."""
    from diffusion.data import fetch

    for name, value in _store_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fetch, 'LONGEST_PAUSE_SECONDS', 0.01)
    _store_server.faults.clear()
    _store_server.reads.clear()
    yield _store_server
    _store_server.faults.clear()
