"""An S3 API for the tests of preparation."""

from collections.abc import Iterator

import pytest
from faulty_s3 import CREDENTIALS, Store, serve


@pytest.fixture(scope='session')
def _s3_server() -> Iterator[Store]:
    with serve() as store:
        yield store


@pytest.fixture
def s3(_s3_server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The server, with nothing in it, and the variables by which Streaming finds it."""
    from diffusion.prepare import stores

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name.upper(), value)
    monkeypatch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    monkeypatch.setenv('AWS_MAX_ATTEMPTS', '1')  # boto's own, which wait for seconds
    monkeypatch.setenv('S3_ENDPOINT_URL', _s3_server.client.meta.endpoint_url)
    monkeypatch.setattr(stores, 'BACKOFF_SECONDS', 0.01)
    yield _s3_server
    _s3_server.clear()
