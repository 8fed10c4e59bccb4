"""Downloads in parallel ranges of one version of an object, and the threads that send the requests."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from object_store import Store

from diffusion.errors import DataError, GaveUp, UserError
from diffusion.storage import object_store, transfers
from diffusion.storage.retry import DamagedDownload, RetryPolicy
from diffusion.storage.transfers import THREADS, Stopped, run_all
from tests.data.processes import Forked

SIZE, RANGES = 7 * 2**10 + 5, 8
POLICY = RetryPolicy(tries=3)
CLIENTS: dict[Any, Any] = {}
"""Pool of clients that the tests share: eight new ones per test would take most of its time."""


@pytest.fixture
def large(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[str, bytes]:
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


def test_small_object_with_a_known_size_costs_one_request(store: Store, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(object_store, 'RANGED_BYTES', 100)
    url = store.bucket('data', small=b'x' * 100) + '/small'
    store.requests.clear()
    object_store.download(url, tmp_path / 'copy', size=100)
    assert [request.split()[0] for request in store.requests] == ['GET']


@pytest.mark.parametrize('fault', [500, 'cut', 'whole'])
def test_failed_range_is_retried(store: Store, large: tuple[str, bytes], tmp_path: Path, fault: int | str) -> None:
    url, content = large
    object_store.download(url, tmp_path / 'warm')  # creates the clients, so that two ranges fail and not one twice
    store.requests.clear()
    store.fail('GET /data/large', fault, times=2)
    object_store.download(url, tmp_path / 'copy', size=SIZE, retry=POLICY)
    assert (tmp_path / 'copy').read_bytes() == content
    assert gets(store) == RANGES + 2


@pytest.mark.parametrize(
    ('fault', 'error', 'message', 'tries'),
    [(500, GaveUp, 'cannot be read, tried 3 times', 3), (403, UserError, 'the store refuses access', 1)],
)
def test_download_ends_when_a_range_fails_every_time(store, large, tmp_path, fault, error, message, tries) -> None:
    store.fail('GET /data/large', fault)
    with pytest.raises(error, match=f'^{large[0]}: {message}'):
        object_store.download(large[0], tmp_path / 'copy', retry=POLICY)
    assert gets(store) <= RANGES * tries


def test_object_of_another_size_or_that_is_always_overwritten_is_an_error(store, large, tmp_path, monkeypatch):
    with pytest.raises(GaveUp, match=f'the object has {SIZE} instead of {SIZE + 1} bytes'):
        object_store.download(large[0], tmp_path / 'copy', size=SIZE + 1, retry=POLICY)
    assert gets(store) == 0
    current_version = object_store.current_version

    def overwritten(url: str, retry: RetryPolicy) -> tuple[int, str]:
        found = current_version(url, retry)
        store.client.put_object(Bucket='data', Key='large', Body=os.urandom(SIZE))
        return found

    monkeypatch.setattr(object_store, 'current_version', overwritten)
    with pytest.raises(GaveUp, match='the object was overwritten while it was downloaded'):
        object_store.download(large[0], tmp_path / 'copy', retry=POLICY)


def test_all_calls_share_a_bounded_number_of_threads() -> None:
    lock, running, most, finished = threading.Lock(), 0, 0, 0

    def task(_: RetryPolicy) -> None:
        nonlocal running, most, finished
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running, finished = running - 1, finished + 1

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: run_all([task] * 20, object_store.DEFAULT), range(3)))
    assert (most, finished) == (THREADS, 60)


def test_first_error_ends_the_other_tasks() -> None:
    ended, others = [], threading.Event()

    def pausing(policy: RetryPolicy) -> None:
        try:
            policy.run(fail_download, 's3://bucket/a')
        except Stopped:
            ended.append(1)
            raise

    def fail_download() -> None:
        others.set()
        raise DamagedDownload('cut')

    def failing(_: RetryPolicy) -> None:
        others.wait()
        raise ValueError('bug')

    start = time.monotonic()
    with pytest.raises(ValueError, match='bug'):
        run_all([pausing, failing, *[pausing] * 50], object_store.DEFAULT)
    assert time.monotonic() - start < 1  # the pause of a retry is 1 s or longer
    assert 0 < len(ended) <= THREADS  # the thread of the failed task may have begun another one
    count = len(ended)
    time.sleep(0.05)
    assert len(ended) == count  # the rest was cancelled


def test_caller_is_told_to_stop() -> None:
    policy = RetryPolicy(tries=10**6, wait=Mock(side_effect=DataError('another rank failed')))
    attempt = Mock(side_effect=DamagedDownload('cut'))
    with pytest.raises(DataError, match='another rank'):
        run_all([lambda policy: policy.run(attempt, 's3://bucket/a')], policy)


def test_forked_process_starts_its_own_threads() -> None:
    run_all([lambda policy: None], object_store.DEFAULT)

    def call() -> None:
        called: list[int] = []
        run_all([lambda policy: called.append(os.getpid())] * 3, object_store.DEFAULT)
        assert called == [os.getpid()] * 3

    assert Forked(call).wait() == 0
