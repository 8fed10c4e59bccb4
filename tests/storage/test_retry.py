"""Errors of a store are retried or fail immediately, with a message that has the way out."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from golden import check_transcripts
from object_store import Store

from diffusion.errors import DataError, GaveUp, UserError
from diffusion.storage import object_store, retry
from diffusion.storage.retry import DamagedDownload, RetryPolicy

POLICY = RetryPolicy(tries=3)


def requests(store: Store, method: str) -> int:
    return sum(request.startswith(f'{method} /data/a') for request in store.requests)


@pytest.mark.parametrize('fault', [408, 429, 500, 503, 'ExpiredToken', 'RequestTimeout', 'reset', 'cut'])
def test_read_is_retried_after_a_transient_error(store: Store, fault: int | str, caplog) -> None:
    url = store.bucket('data', a=b'x' * 100) + '/a'
    store.fail('GET /data/a', fault)
    with pytest.raises(GaveUp, match=rf'^{url}: cannot be read, tried 3 times \(.+\)$'):
        object_store.read(url, retry=POLICY)
    assert requests(store, 'GET') == 3 and caplog.text.count('; trying again') == 2
    store.faults.clear()
    store.fail('GET /data/a', fault, times=2)
    assert object_store.read(url, retry=POLICY) == b'x' * 100


@pytest.mark.slow
def test_read_that_stalls_is_retried(store: Store) -> None:
    url = store.bucket('data', a=b'x' * 100) + '/a'
    store.fail('GET /data/a', 20.0, times=1)
    assert object_store.read(url, retry=RetryPolicy(timeout_seconds=1.0)) == b'x' * 100


@pytest.mark.parametrize('fault', [409, 429, 500, 'ExpiredToken', 'reset'])
def test_write_is_retried_after_a_transient_error(store: Store, fault: int | str) -> None:
    url = store.bucket('data') + '/a'
    failing = store.fail('PUT /data/a', fault)
    with pytest.raises(GaveUp, match=rf'^{url}: cannot be written, tried 3 times \(.+\)$'):
        object_store.write(url, b'x', retry=POLICY)
    assert requests(store, 'PUT') == 3
    failing.times = 2
    assert object_store.write(url, b'xy', retry=POLICY).size == 2


@pytest.mark.parametrize('fault', [400, 401, 403, 404, 501])
def test_refused_request_is_not_retried(store: Store, fault: int) -> None:
    url = store.bucket('data', a=b'x') + '/a'
    store.fail('/data/a', fault)
    store.requests.clear()
    tasks: dict[str, Callable[[], object]] = {
        'GET': lambda: object_store.read(url),
        'PUT': lambda: object_store.write(url, b'y'),
        'DELETE': lambda: object_store.delete(url),
    }
    for method, task in tasks.items():
        with pytest.raises(UserError, match=f'^{url}: .*check the '):
            task()
        assert requests(store, method) == 1
    with pytest.raises(UserError, match=r'^s3://d!/a: invalid location or settings \(.*; set AWS_'):
        object_store.read('s3://d!/a')


def named(module: str, name: str, **attributes: object) -> Exception:
    """Return an error of a class with this name, as a package raises it."""
    error = type(name, (Exception,), {'__module__': module})('text')
    error.__dict__.update(attributes)
    return error


def answer(status: int, code: str = 'Code') -> Exception:
    response = {'Error': {'Code': code}, 'ResponseMetadata': {'HTTPStatusCode': status}}
    return named('botocore.exceptions', 'ClientError', response=response)


def test_errors_are_final_or_not_and_final_ones_have_a_way_out() -> None:
    """The lines of the files are a URL and an expression, the value of which is an error."""

    def outcome(line: str) -> list[object]:
        url, _, expression = line.partition(': ')
        error = eval(expression)
        missing = ['a missing object'] if retry.is_missing_object(error) else []
        try:
            return ['retried' if retry.is_transient(error, url) else 'raised', retry.error_text(error), *missing]
        except Exception as raised:
            return [f'{type(raised).__name__}: {raised}', *missing]

    check_transcripts(Path(__file__).parent / 'golden' / 'retry', outcome)


def test_store_that_answers_with_another_region_is_refused(store: Store) -> None:
    store.fail('GET /data', 301)
    with pytest.raises(UserError, match=r'^s3://data/a: the store refuses \(.*GetObject.*\); check the location'):
        object_store.read('s3://data/a')


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT])
def test_error_of_the_local_disk_is_not_retried(number: int) -> None:
    local, wrapped = OSError(number, 'no', *(() if number == errno.ENOSPC else ('/local/file',))), ConnectionError()
    wrapped.__cause__ = local
    attempt = Mock(side_effect=wrapped)
    with pytest.raises(OSError, match='no') as raised:
        RetryPolicy().run(attempt, 's3://data/a')
    assert raised.value is local and attempt.call_count == 1


def test_earlier_refusal_does_not_affect_a_later_transient_error(store: Store) -> None:
    """The earlier error is the `__context__` of the later one, but not its cause."""
    url = store.bucket('data')
    store.fail('GET /data/a', 'reset')
    try:
        object_store.read(f'{url}/missing')
    except UserError:
        with pytest.raises(GaveUp):
            object_store.read(f'{url}/a', retry=POLICY)


def test_pauses_grow_up_to_a_limit_and_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(RetryPolicy, '_pause', lambda self, seconds: pauses.append(seconds))
    with pytest.raises(GaveUp, match='tried 5 times'):
        RetryPolicy(tries=5).run(Mock(side_effect=DamagedDownload('cut')), 's3://data/a')
    assert pauses == [2, 8, 30, 30]
    monkeypatch.setattr(retry, 'DEADLINE_SECONDS', -1.0)
    with pytest.raises(GaveUp, match=r'tried 1 time \(cut\)'):
        RetryPolicy(tries=5).run(Mock(side_effect=DamagedDownload('cut')), 's3://data/a')


def test_pause_takes_half_to_all_of_its_time_and_calls_wait_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []
    monkeypatch.setattr(retry.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(retry.time, 'sleep', lambda seconds: now.append(now.pop() + seconds))
    for shortest in (True, False):
        monkeypatch.setattr(retry.random, 'uniform', lambda low, high, shortest=shortest: low if shortest else high)
        RetryPolicy(wait=lambda: waits.append(now[0]))._pause(4.0)
    assert now == [pytest.approx(6.0, abs=0.05)] and len(waits) == pytest.approx(300, abs=2)


def test_error_raised_by_wait_ends_a_pause_and_a_stalled_download(store: Store) -> None:
    url, start = store.bucket('data', a=b'x') + '/a', time.monotonic()

    def wait() -> None:
        if time.monotonic() > start + 0.3:
            raise DataError('another rank failed')

    with pytest.raises(DataError, match='another rank'):
        RetryPolicy(tries=10**6, wait=wait).run(Mock(side_effect=DamagedDownload('cut')), url)
    store.fail('GET', 20.0)
    with pytest.raises(DataError, match='another rank'):
        object_store.read(url, retry=RetryPolicy(wait=wait))
    assert time.monotonic() - start < 10
