"""Attempts of a run in an object store: attempts.jsonl there, and its copy on a node's disk."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from object_store import Store
from waiting import wait_until

from diffusion.runs import attempts
from diffusion.runs.attempts import Attempt, Clock, append_attempt, has_begun, newer_records, read_attempts
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE


@pytest.fixture
def url(store: Store, tmp_path: Path, monkeypatch) -> str:
    use_node(0, tmp_path, monkeypatch)
    return store.bucket('home') + '/runs/run'


def use_node(number: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / f'node{number}'))


def record_attempt(url: str, number: int, last: int, *events: str) -> None:
    for event in events:
        append_attempt(url, event, Attempt(number, 100.0 * number, last=last, cause='crash'))


def test_attempts_are_read_from_the_bucket_with_their_faults(url):
    assert not has_begun(url)
    with pytest.raises(ValueError, match=r's3://home/runs/run/attempts\.jsonl does not exist'):
        read_attempts(url)
    begin = time.time()
    append_attempt(url, 'begin', Attempt(0, begin))
    append_attempt(url, 'end', Attempt(0, begin, begin + 10, cause='preempted'))
    attempts.record_fault(url, 'gpu/7', 'Xid 79')
    assert has_begun(url)
    append_attempt(url, 'begin', Attempt(1, begin + 100))
    first, second = read_attempts(url)
    assert (first.cause, first.machine, second.cause) == ('hardware', 'gpu/7', 'lost')


def test_progress_replaces_the_progress_of_the_same_attempt(url, store):
    record_attempt(url, 0, 7, 'begin', 'progress', 'progress', 'progress')
    lines = store.objects('home')['runs/run/attempts.jsonl'].splitlines()
    assert [json.loads(line)['event'] for line in lines] == ['begin', 'progress']
    record_attempt(url, 0, 8, 'end')
    record_attempt(url, 1, 9, 'begin', 'progress')
    assert [each.last for each in read_attempts(url)] == [8, 9]
    lines = store.objects('home')['runs/run/attempts.jsonl'].splitlines()
    assert [json.loads(line)['event'] for line in lines] == ['begin', 'end', 'begin', 'progress']


def test_another_node_continues_the_record(url, tmp_path, monkeypatch):
    record_attempt(url, 0, 5, 'begin', 'end')
    use_node(1, tmp_path, monkeypatch)
    record_attempt(url, 1, 6, 'begin', 'end')
    use_node(0, tmp_path, monkeypatch)
    record_attempt(url, 2, 7, 'begin')
    assert [each.number for each in read_attempts(url)] == [1, 2, 3]


def test_record_that_was_not_uploaded_is_uploaded_with_the_next_one(url, store):
    record_attempt(url, 0, 5, 'begin', 'progress')
    store.fail('PUT attempts.jsonl', 403)
    with pytest.raises(OSError, match='refuses access'):
        record_attempt(url, 0, 6, 'end')
    store.faults.clear()
    assert [each.last for each in read_attempts(url)] == [5]
    record_attempt(url, 1, 9, 'begin')
    assert [each.last for each in read_attempts(url)] == [6, 9]


def test_record_is_kept_while_an_earlier_one_is_still_being_uploaded(url, store, tmp_path):
    record_attempt(url, 0, 5, 'begin')
    store.fail('PUT attempts.jsonl', 1.5, times=1)
    before = len(store.requests)
    progress = threading.Thread(target=record_attempt, args=(url, 0, 6, 'progress'))
    progress.start()
    wait_until(lambda: store.requests[before:])  # until the slow upload has begun
    end = threading.Thread(target=record_attempt, args=(url, 0, 7, 'end'), daemon=True)
    end.start()
    (local,) = tmp_path.rglob('attempts.jsonl')
    wait_until(lambda: '"event": "end"' in local.read_text(), 1.0)
    assert progress.is_alive(), 'the upload has not ended yet'
    progress.join()
    end.join()
    assert [each.last for each in read_attempts(url)] == [7]


def test_begin_that_could_not_read_the_store_does_not_replace_its_records(url, store, tmp_path, monkeypatch):
    record_attempt(url, 0, 5, 'begin', 'end')
    use_node(1, tmp_path, monkeypatch)
    store.fail('GET attempts.jsonl', 500)
    with pytest.raises(OSError):
        record_attempt(url, 1, 6, 'begin')
    store.faults.clear()
    record_attempt(url, 1, 7, 'progress')
    assert [each.last for each in read_attempts(url)] == [5, 7]


def test_deleted_object_and_deleted_copy(url, store, tmp_path):
    """Deleting attempts.jsonl gives a run that was given up new restarts; a new disk loses nothing."""
    record_attempt(url, 0, 5, 'begin', 'end')
    shutil.rmtree(tmp_path / 'node0')
    record_attempt(url, 1, 6, 'progress')
    assert [each.number for each in read_attempts(url)] == [1, 2]
    store.delete(url, attempts.ATTEMPTS)
    record_attempt(url, 0, 7, 'begin')
    assert [each.last for each in read_attempts(url)] == [7]


def test_clock_continues_from_the_record_in_the_bucket(url, monkeypatch):
    clock = Clock(url)
    append_attempt(url, 'begin', Attempt(0, clock.now()), clock)
    later = time.time() - 5000
    monkeypatch.setattr(attempts.time, 'time', lambda: later)
    assert Clock(url).now() == pytest.approx(clock.now(), abs=1.0), 'although the system clock was set back'


B, P, Q, E = (
    {'event': event, 'at': at} for event, at in (('begin', 0.5), ('progress', 2.0), ('progress', 3.0), ('end', 4.0))
)
N = {'event': 'progress', 'at': 'soon'}


@pytest.mark.parametrize(
    ('stored', 'local', 'expected'),
    [
        *((None, [B, P], []), ([B], [], [B]), ([B], [B, P], [B, P]), ([B, P], [B, Q], [B, Q])),
        *(([B, Q], [B, P], [B, Q]), ([B, P], [B, E], [B, E]), ([B, E], [B, P], [B, E])),
        *(([E, B], [B, E, B], [E, B]), ([B, E, B], [B, P], [B, E, B]), ([B, E, P], [B, B, Q], [B, E, P])),
        *(([], [B], [B]), ([N], [B], [B]), ([B], [B, N], [B])),
    ],
)
def test_local_records_count_only_if_they_continue_those_in_the_store(stored, local, expected):
    def content(records):
        return ''.join(json.dumps(each) + '\n' for each in records).encode()

    assert newer_records(None if stored is None else content(stored), content(local)) == expected
