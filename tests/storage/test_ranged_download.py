"""Large objects are downloaded in parallel ranges of one version; every range is retried by itself."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from object_store import Store

from diffusion.errors import UserError
from diffusion.storage import object_store, transfers
from diffusion.storage.retry import GaveUp, RetryPolicy

SIZE, RANGES = 7 * 2**10 + 5, 8
POLICY = RetryPolicy(tries=3)
CLIENTS: dict[Any, Any] = {}
"""Pool of clients that the tests share: eight new ones per test would take most of its time."""


@pytest.fixture
def large(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bytes]:
    """URL and content of an object that is downloaded in eight ranges."""
    monkeypatch.setattr(object_store, 'RANGED_BYTES', 2**12)
    monkeypatch.setattr(transfers, 'RANGE_BYTES', 2**10)
    monkeypatch.setattr(transfers, 'idle', CLIENTS)
    content = os.urandom(SIZE)
    return store.bucket('data', large=content) + '/large', content


def gets(store: Store) -> int:
    return sum(request.startswith('GET /data/large') for request in store.requests)


def test_ranges_are_downloaded_in_parallel(store: Store, large: tuple[str, bytes], tmp_path: Path) -> None:
    url, content = large
    object_store.download(url, tmp_path / 'warm')  # creates the clients
    store.fail('GET /data/large', 0.8, times=RANGES)
    start = time.monotonic()
    object_store.download(url, tmp_path / 'copy', size=SIZE)
    assert time.monotonic() - start < 0.8 * RANGES / 2
    assert (tmp_path / 'copy').read_bytes() == (tmp_path / 'warm').read_bytes() == content


def test_small_object_with_a_known_size_costs_one_request(store: Store, tmp_path: Path) -> None:
    url = store.bucket('data', small=b'x' * 100) + '/small'
    store.requests.clear()
    object_store.download(url, tmp_path / 'copy', size=100)
    assert [request.split()[0] for request in store.requests] == ['GET']


@pytest.mark.parametrize('fault', [429, 500, 'reset', 'cut', 'whole'])
def test_range_that_failed_is_retried_by_itself(
    store: Store, large: tuple[str, bytes], tmp_path: Path, fault: int | str
) -> None:
    url, content = large
    object_store.download(url, tmp_path / 'warm')  # creates the clients, so that two ranges fail and not one twice
    store.requests.clear()
    store.fail('GET /data/large', fault, times=2)
    object_store.download(url, tmp_path / 'copy', size=SIZE, retry=POLICY)
    assert (tmp_path / 'copy').read_bytes() == content
    assert gets(store) == RANGES + 2


def test_range_that_stalls_is_retried(store: Store, large: tuple[str, bytes], tmp_path: Path) -> None:
    url, content = large
    store.fail('GET /data/large', 20.0, times=1)
    object_store.download(url, tmp_path / 'copy', retry=RetryPolicy(timeout_seconds=1.0))
    assert (tmp_path / 'copy').read_bytes() == content


@pytest.mark.parametrize('fault', [500, 'cut'])
def test_download_gives_up_when_a_range_fails_every_time(
    store: Store, large: tuple[str, bytes], tmp_path: Path, fault: int | str
) -> None:
    store.fail('GET /data/large', fault)
    with pytest.raises(GaveUp, match=f'^{large[0]}: cannot be read, tried 3 times'):
        object_store.download(large[0], tmp_path / 'copy', retry=POLICY)
    assert gets(store) <= RANGES * POLICY.tries


def test_refused_range_is_not_retried(store: Store, large: tuple[str, bytes], tmp_path: Path) -> None:
    store.fail('GET /data/large', 403)
    with pytest.raises(UserError, match=f'^{large[0]}: the store refuses access'):
        object_store.download(large[0], tmp_path / 'copy')
    assert gets(store) <= RANGES


def test_object_of_another_size_is_an_error(store: Store, large: tuple[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(GaveUp, match=f'the object has {SIZE} instead of {SIZE + 1} bytes'):
        object_store.download(large[0], tmp_path / 'copy', size=SIZE + 1, retry=POLICY)
    assert gets(store) == 0


def test_object_that_is_always_overwritten_is_an_error(
    store: Store, large: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current_version = object_store.current_version

    def overwritten(url: str, retry: RetryPolicy) -> tuple[int, str]:
        found = current_version(url, retry)
        store.client.put_object(Bucket='data', Key='large', Body=os.urandom(SIZE))
        return found

    monkeypatch.setattr(object_store, 'current_version', overwritten)
    with pytest.raises(GaveUp, match='the object was overwritten while it was downloaded'):
        object_store.download(large[0], tmp_path / 'copy', retry=POLICY)
