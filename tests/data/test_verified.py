"""No wrong sample is ever served, whatever an object store, a disk or another process does to the shards."""

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from numbered import Numbers, expected, loader_over, numbers_of, served, shards_of, write_samples
from processes import Forked
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from waiting import wait_until

from diffusion.data.loader import describe_exit
from diffusion.errors import DataError, GaveUp, UserError
from diffusion.storage import bucket_interface, transfers
from diffusion.storage.object_store import RemoteFolder
from diffusion.storage.retry import RetryPolicy

pytestmark = pytest.mark.usefixtures('many_datasets')

LAST = 'shard.00005.mds'


@pytest.fixture
def bucket(store, tmp_path):
    return store.upload(write_samples(tmp_path / 'source'))


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


@pytest.mark.parametrize('fault', ['cut', 'flip'])
def test_transient_download_error_is_retried(store, bucket, tmp_path, fault):
    store.fail('GET shard.00002', fault, times=2)
    assert served(loader_over(bucket, tmp_path / 'local')) == expected()
    assert shards_of(store.shard_reads())['shard.00002.mds'] == 3


@pytest.mark.parametrize(
    ('workers', 'fault', 'message'),
    [
        (0, 404, r'there is no such bucket or object \(404\)'),
        (2, 403, r'the store refuses access \(403\): AccessDenied.* check the permissions.* AWS_ACCESS_KEY_ID'),
        (0, 'cut', r'tried 2 times \(IncompleteReadError'),
        (0, 'flip', r'tried 2 times \(xxh64 [0-9a-f]{16}, expected [0-9a-f]{16}\)'),
    ],
)
def test_persistently_failing_shard_stops_epoch_with_its_name(store, bucket, tmp_path, workers, fault, message):
    store.fail('GET shard.00003', fault)
    loader = loader_over(bucket, tmp_path / 'local', workers=workers, download_retry=1)
    with within(20), pytest.raises(DataError, match=message) as caught:
        served(loader)
    assert str(caught.value).startswith(f'streams.a: {bucket}/shard.00003.mds: ')
    assert 'To fix: ' in str(caught.value)
    assert shards_of(store.shard_reads())['shard.00003.mds'] == (1 if fault in (403, 404) else 2)
    assert not (tmp_path / 'local' / 'shard.00003.mds').exists()


def test_stalled_download_times_out(store, bucket, tmp_path):
    store.fail('GET shard.00001', 60.0)
    loader = loader_over(bucket, tmp_path / 'local', download_timeout=0.5, download_retry=1)
    with within(20), pytest.raises(DataError, match=r'shard.00001.mds: .*2 times \(stalled after \d+ bytes'):
        served(loader)


@pytest.mark.slow
def test_slow_download_continues_while_it_makes_progress(store, bucket, tmp_path, monkeypatch):
    """A shard of 8 kB arrives in eight pieces."""
    monkeypatch.setattr(transfers, 'PROGRESS_BYTES', 1000)
    monkeypatch.setattr(bucket_interface, 'CHUNK_BYTES', 100)
    store.fail('GET shard.00001', 2.0)
    assert served(loader_over(bucket, tmp_path / 'local', download_timeout=0.7, download_retry=0)) == expected()


@pytest.mark.parametrize('change', ['deleted', 'overwritten'])
def test_shard_that_changes_in_store_during_training_raises(store, bucket, tmp_path, change):
    iterator = iter(loader_over(bucket, tmp_path / 'local', predownload=6, shuffle=False))
    next(iterator)
    if change == 'deleted':
        store.delete(bucket, LAST)
    else:
        store.put(bucket, LAST, b'something else')
    with within(20), pytest.raises(DataError, match=f'streams.a: {bucket}/{LAST}: '):
        for _ in iterator:
            pass


@pytest.mark.parametrize('is_connection_lost', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dead_worker_is_named_whatever_pytorch_raises_first(store, bucket, tmp_path, monkeypatch, is_connection_lost):
    """PyTorch may raise for the broken connection before it detects that the worker died."""
    loader = loader_over(bucket, tmp_path / 'local', workers=2, predownload=6, shuffle=False)
    store.fail(f'GET {LAST}', 30.0)
    iterator = iter(loader)
    next(iterator)
    worker = max(multiprocessing.active_children(), key=lambda child: child.pid or 0)  # not one of an earlier test

    def lose_connection(*_: object) -> None:
        worker.kill()
        raise ConnectionResetError(104, 'Connection reset by peer')

    if is_connection_lost:
        monkeypatch.setattr(_MultiProcessingDataLoaderIter, '_try_get_data', lose_connection)
    else:
        worker.kill()
    message = rf'^streams\.a: DataLoader worker 1 \(pid {worker.pid}\) was killed by SIGKILL; .* out of memory'
    with within(20), pytest.raises(DataError, match=message):
        for _ in iterator:
            pass


@pytest.mark.slow
def test_worker_killed_with_the_lock_of_the_others_does_not_hang_the_run(store, bucket, tmp_path, monkeypatch):
    """Workers look at an event between samples, whose lock is never released if one is killed meanwhile."""
    loader = loader_over(bucket, tmp_path / 'local', workers=2, predownload=6, shuffle=False)
    start, iterators = loader._start_workers, []
    monkeypatch.setattr(loader, '_start_workers', lambda: iterators.append(start()) or iterators[0])
    store.fail(f'GET {LAST}', 30.0)
    iterator = iter(loader)
    next(iterator)
    event = iterators[0]._workers_done_event._event

    def die_with_lock() -> None:
        event._cond.acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    assert Forked(die_with_lock).wait() == -signal.SIGKILL
    iterators[0]._workers[1].kill()
    with within(20), pytest.raises(DataError, match='DataLoader worker 1 .* was killed by SIGKILL'):
        for _ in iterator:
            pass
    assert not any(worker.is_alive() for worker in iterators[0]._workers)


def test_status_or_signal_of_a_dead_worker_is_described():
    assert describe_exit(1) == 'exited with status 1'
    assert describe_exit(-7).startswith('was killed by SIGBUS; is /dev/shm full? To fix: ')


def test_worker_timeout_names_shards_in_progress(store, bucket, tmp_path):
    store.fail('GET shard.0000', 30.0)
    loader = loader_over(bucket, tmp_path / 'local', workers=2, loader={'timeout': 2})
    message = 'timeout_seconds: no batch within 2 s; shards in progress: streams.a'
    with within(25), pytest.raises(DataError, match=message):
        served(loader)


def test_worker_that_ends_early_raises(tmp_path, monkeypatch):
    plain = Numbers.__iter__
    monkeypatch.setattr(Numbers, '__iter__', lambda self: itertools.islice(plain(self), 30))
    with pytest.raises(DataError, match='^streams.a: the epoch ended after 5 of 10 batches$'):
        served(loader_over(None, write_samples(tmp_path / 'local')))


@pytest.mark.parametrize('elastic', [True, False])
def test_threads_that_end_early_raise(tmp_path, elastic):
    """Streaming's threads end without an exception."""
    loader = loader_over(None, write_samples(tmp_path / 'local'), elastic=elastic)
    iterator = iter(loader)
    next(iterator)
    loader.dataset._event.set()
    with pytest.raises(DataError, match=r'^streams.a: the epoch ended after \d+ of 60 samples$'):
        for _ in iterator:
            pass


@pytest.mark.parametrize('harm', ['flipped', 'grown'])
def test_only_a_shard_damaged_after_earlier_run_is_downloaded_again(store, bucket, tmp_path, caplog, harm):
    local = tmp_path / 'local'
    served(loader_over(bucket, local))
    assert set(store.shard_reads().values()) == {1}
    store.requests.clear()
    assert served(loader_over(bucket, local)) == expected() and not store.shard_reads()
    damage_file(local / 'shard.00004.mds', harm)
    assert served(loader_over(bucket, local)) == expected()
    assert shards_of(store.shard_reads()) == {'shard.00004.mds': 1}
    assert re.search(r'streams.a: .*shard.00004.mds: .*expected .*; downloading it again', caplog.text)


def damage_file(path: Path, harm: str) -> None:
    content = bytearray(path.read_bytes())
    if harm == 'flipped':
        content[len(content) // 2] ^= 16
    path.write_bytes({'truncated': content[:-100], 'flipped': content, 'grown': content + b'x'}[harm])


def test_damaged_local_shard_raises_with_details(tmp_path):
    local = write_samples(tmp_path / 'local')
    damage_file(local / 'shard.00002.mds', 'truncated')
    size = (local / 'shard.00002.mds').stat().st_size
    loader = loader_over(None, local)
    message = f'{local}/shard.00002.mds: {size} bytes, expected {size + 100}'
    with within(20), pytest.raises(DataError, match=f'^streams.a: {re.escape(message)}. To fix: restore it'):
        served(loader)
    assert (local / 'shard.00002.mds').stat().st_size == size, 'local data must not be modified'


def test_cached_shard_overwritten_during_training_is_downloaded_again(store, bucket, tmp_path):
    local = tmp_path / 'local'
    loader = loader_over(bucket, local, predownload=60)
    found = {}
    for batch in loader:
        for shard in local.glob('*.mds'):
            damage_file(shard, 'flipped')
        found |= numbers_of(batch)
    assert found == expected()


def test_touched_shard_is_still_served(tmp_path):
    local = write_samples(tmp_path / 'local')
    for batch in loader_over(None, local):
        for shard in local.glob('*.mds'):
            os.utime(shard)
        assert len(batch['number']) == 6


def test_any_supported_hash_is_checked(store, tmp_path):
    url = store.upload(write_samples(tmp_path / 'source', hashes=['md5', 'sha256']))
    store.fail('GET shard.00001', 'flip')
    with pytest.raises(DataError, match=r'shard.00001.mds: .*\((md5|sha256) [0-9a-f]+, expected'):
        served(loader_over(url, tmp_path / 'local', download_retry=0))


def test_without_hashes_sizes_are_checked_with_warning(store, tmp_path, caplog):
    url = store.upload(write_samples(tmp_path / 'source', hashes=[]))
    store.put(url, 'shard.00001.mds', b'short')
    with pytest.raises(DataError, match=r'shard.00001.mds: .*\(5 bytes, expected \d+\)'):
        served(loader_over(url, tmp_path / 'local', download_retry=0))
    assert 'streams.a: its shards have no hashes, so only sizes are checked' in caplog.text


def test_full_disk_evicts_shards_and_warns_once(bucket, tmp_path, caplog):
    (stream,) = loader_over(bucket, tmp_path / 'local').dataset.streams
    stream.on_disk, path = Mock(evict=Mock(side_effect=[0, 1, 7])), tmp_path / 'local/shard.00001.mds'
    assert [stream._evict_some(path, 100) for _ in range(3)] == [False, True, True]
    assert stream.on_disk.evict.mock_calls == [call(400)] * 3, 'room for several shards'
    assert re.findall(r'full; .* were removed', caplog.text) == [
        'full; 1 B of the least recently used shards were removed'
    ]
    stream.on_disk = None
    assert not stream._evict_some(path, 100)


def test_missing_required_hash_is_rejected_at_start(tmp_path):
    with pytest.raises(ValueError, match=r'validate_hash: the shards have no xxh3_64 hash, only sha1, xxh64; '):
        loader_over(None, write_samples(tmp_path / 'local'), validate_hash='xxh3_64')


def test_compressed_shards_are_checked_before_and_after_unpacking(store, tmp_path):
    url = store.upload(write_samples(tmp_path / 'source', compression='zstd'))
    store.fail('GET shard.00001', 'flip', times=1)
    local = tmp_path / 'local'
    assert served(loader_over(url, local, keep_zip=True)) == expected()
    assert list(local.glob('*.zstd'))
    store.requests.clear()
    damage_file(local / 'shard.00002.mds', 'flipped')
    assert served(loader_over(url, local, keep_zip=True)) == expected()
    assert shards_of(store.shard_reads()) == {'shard.00002.mds.zstd': 1}


def test_damaged_local_shard_is_unpacked_again(tmp_path):
    local = write_samples(tmp_path / 'local', compression='zstd')
    assert served(loader_over(None, local)) == expected()
    damage_file(local / 'shard.00002.mds', 'flipped')
    assert served(loader_over(None, local)) == expected()
    damage_file(local / 'shard.00002.mds', 'flipped')
    damage_file(local / 'shard.00002.mds.zstd', 'flipped')
    with pytest.raises(DataError, match=r'shard.00002.mds.zstd: xxh64 .*expected'):
        served(loader_over(None, local))


@pytest.mark.parametrize('hashes', [['xxh64'], []])
def test_rewritten_dataset_is_never_mixed_with_old_shards(store, tmp_path, caplog, hashes):
    url = store.upload(write_samples(tmp_path / 'source', hashes=hashes))
    local = tmp_path / 'local'
    assert served(loader_over(url, local)) == expected()
    for path in write_samples(tmp_path / 'again', salt='other', count=54, hashes=hashes).iterdir():
        store.put(url, path.name, path.read_bytes())
    assert served(loader_over(url, local)) == expected('other', 54)
    assert 'streams.a: the dataset was rewritten since it was cached' in caplog.text


def test_truncated_index_is_downloaded_again_and_a_cached_one_replaces_a_missing_one(store, bucket, tmp_path, caplog):
    store.fail('GET index.json', 'cut', times=1)
    assert served(loader_over(bucket, tmp_path / 'local')) == expected()
    store.fail('GET index.json', 404)
    assert served(loader_over(bucket, tmp_path / 'local')) == expected()
    assert 'using the local copy' in caplog.text


@pytest.mark.parametrize(
    ('content', 'message'),
    [(b'[]', 'is not an index of MDS shards .TypeError'), (b'{"version": 1, "shards": []}', 'version 1, not 2')],
)
def test_invalid_index_is_rejected(store, bucket, tmp_path, content, message):
    store.put(bucket, 'index.json', content)
    with pytest.raises(ValueError, match=f'streams.a.remote: {bucket}/index.json: .*{message}'):
        loader_over(bucket, tmp_path / 'local')
    assert not (tmp_path / 'local').exists()


@pytest.mark.parametrize('name', ['../outside.mds', '/outside.mds'])
def test_index_with_path_outside_its_folder_is_rejected(tmp_path, name):
    local = write_samples(tmp_path / 'local')
    index = json.loads((local / 'index.json').read_text())
    index['shards'][1]['raw_data']['basename'] = name
    (local / 'index.json').write_text(json.dumps(index))
    with pytest.raises(ValueError, match='lists a file outside of its folder'):
        loader_over(None, local)


def test_refresh_downloads_newest_file_and_falls_back_to_local_copy(store, bucket, tmp_path, caplog):
    source = RemoteFolder(bucket, RetryPolicy(tries=2, timeout_seconds=5.0))
    path = tmp_path / 'local' / 'manifest.json'
    fault = store.fail(f'GET {path.name}', 500)
    with pytest.raises(GaveUp, match='tried 2 times'):
        source.refresh(path.name, path)
    store.faults.remove(fault)
    with pytest.raises(UserError, match='there is no such bucket or object'):
        source.refresh(path.name, path)
    assert not path.exists()
    for content in (b'one', b'other'):
        store.put(bucket, path.name, content)
        source.refresh(path.name, path)
        assert path.read_bytes() == content
    assert 'using the existing copy' not in caplog.text
    store.fail(f'GET {path.name}', 500)
    source.refresh(path.name, path)
    assert path.read_bytes() == content and f'{bucket}/manifest.json: ' in caplog.text
    assert f'using the existing copy {path}' in caplog.text
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_full_disk_is_reported(store, bucket, tmp_path):
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
        message = r'shard.0000\d.mds: no space left on the disk: .*To fix: free space in .*local'
        with pytest.raises(DataError, match=message):
            served(loader_over(bucket, local))
        # Downloads under way in other threads end because of the error; Python waits for these threads at exit, which
        # a forked process skips.
        wait_until(lambda: not list(local.rglob('*.mds')), 5)

    local = tmp_path / 'local'
    store.fail('GET shard', 0.5, times=1)
    store.fail('GET shard', 30.0)  # under way when the first one fails
    assert Forked(small_disk).wait() == 0
    assert not list(local.rglob('*.mds'))


@pytest.fixture(autouse=True)
def _log_everything(caplog):
    caplog.set_level(logging.INFO)
