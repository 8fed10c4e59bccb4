"""Fixture of the tests of captioning."""

from collections.abc import Iterator

import pytest
from captioning.vlm_server import VlmServer


@pytest.fixture
def server() -> Iterator[VlmServer]:
    server = VlmServer()
    yield server
    server.close()
