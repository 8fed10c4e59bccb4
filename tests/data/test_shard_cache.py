"""Cache shared by the jobs of a machine: each shard is downloaded once, is never wrong, and the limit always holds."""

import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import Numbers, cached_loader, expected, loader_over, numbers_of, served, shards_of, write_samples
from processes import Forked
from streaming import Stream
from waiting import wait_until

from diffusion.config.image_shapes import square
from diffusion.data import shard_cache, verified_dataset
from diffusion.data.loader import BucketedLoader
from diffusion.data.shard_cache import CacheBudget, DownloadTurns, home
from diffusion.data.streams import Bucket
from diffusion.storage import locks, object_store
from diffusion.storage.retry import RetryPolicy

pytestmark = pytest.mark.usefixtures('many_datasets')

SHARDS = 6
SHARD = 8192
VERSION = '0123456789abcdef'


@pytest.fixture
def bucket(store, tmp_path):
    return store.upload(write_samples(tmp_path / 'source'))


def shards_in(folder: Path) -> list[Path]:
    """Return the paths of complete shards; files that disappear during the listing are left out."""
    found = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return [path for path in found if path.match('shard.*.mds') and '.unfinished' not in str(path)]


def total(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def assert_correct(*loaders: BucketedLoader) -> None:
    for loader in loaders:
        assert served(loader) == expected()


def test_concurrent_jobs_download_each_shard_once(store, bucket, tmp_path):
    store.fail('GET .mds', 0.3)
    jobs = [Forked(lambda: assert_correct(cached_loader(bucket, tmp_path / 'cache'))) for _ in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert set(shards_of(store.shard_reads()).values()) == {1}


def test_streams_and_evaluation_share_cached_shards(store, bucket, tmp_path):
    cache = tmp_path / 'cache'
    streams = {name: Stream(remote=bucket, local=str(home(cache, bucket))) for name in ('large', 'small')}
    buckets = [Bucket(name, stream, square(32)) for name, stream in streams.items()]
    settings = {'elastic': True, 'batching_method': 'per_stream', 'cache_folder': str(cache), 'shuffle': True}
    dataset = Numbers(buckets, batch_size=6, **settings)
    evaluation = cached_loader(bucket, cache, shuffle=False)
    both = iter(BucketedLoader(dataset, batch_size=6))
    next(both)
    assert_correct(evaluation)
    for _ in both:
        pass
    assert set(shards_of(store.shard_reads()).values()) == {1}
    assert len(shards_in(cache)) == SHARDS


def test_of_a_dataset_that_grew_only_the_new_shards_are_downloaded(store, bucket, tmp_path):
    cache, limit = tmp_path / 'cache', 100 * SHARD
    assert_correct(cached_loader(bucket, cache, cache_limit=limit))
    store.requests.clear()
    for path in write_samples(tmp_path / 'more', count=90).iterdir():
        store.put(bucket, path.name, path.read_bytes())
    # The first shards have the same samples as before; the last of them, which was not full, has more now.
    assert served(cached_loader(bucket, cache, cache_limit=limit)) == expected(count=90)
    assert set(shards_of(store.shard_reads())) == {f'shard.0000{n}.mds' for n in range(SHARDS - 1, SHARDS + 3)}
    assert CacheBudget({cache: None}, limit, lambda: None).used_bytes() <= limit


@pytest.mark.slow
def test_jobs_on_old_and_new_version_do_not_interfere(store, bucket, tmp_path):
    old = iter(cached_loader(bucket, tmp_path / 'cache', predownload=60))
    found = numbers_of(next(old))
    wait_until(lambda: len(shards_in(tmp_path / 'cache')) == SHARDS, 20)
    for path in write_samples(tmp_path / 'again', salt='other').iterdir():
        store.put(bucket, path.name, path.read_bytes())
    assert served(cached_loader(bucket, tmp_path / 'cache')) == expected('other')
    assert found | served(old) == expected()


@pytest.mark.slow
def test_job_continues_when_downloading_job_is_killed(store, bucket, tmp_path):
    """The lock ends with its process, and the incomplete files of that process are removed."""
    cache = tmp_path / 'cache'
    store.fail('GET shard.00000', 30.0, times=1)
    victim = Forked(lambda: served(cached_loader(bucket, cache, shuffle=False)))
    wait_until(lambda: any('shard.00000' in key for key in store.shard_reads()))
    other = Forked(lambda: assert_correct(cached_loader(bucket, cache, shuffle=False)))
    time.sleep(1.5)
    assert other.running(), 'it waits for the job that is downloading'
    victim.kill()
    begin = time.monotonic()
    assert other.wait() == 0
    assert time.monotonic() - begin < 15
    assert_correct(cached_loader(bucket, cache))
    assert not list(cache.rglob('.*'))


def test_download_starts_again_if_its_temporary_folder_is_removed(bucket, tmp_path, monkeypatch, caplog):
    """A cluster's file system ends the locks of a node that it does not hear from, and another job removes folders."""
    download, removed = object_store.download_once, []

    def download_and_remove(url: str, path: Path, retry: RetryPolicy) -> None:
        download(url, path, retry)
        if not removed:
            removed.append(path.parent)
            shutil.rmtree(path.parent)

    monkeypatch.setattr(object_store, 'download_once', download_and_remove)
    assert_correct(cached_loader(bucket, tmp_path / 'cache'))
    assert removed and f'another process removed the temporary folder {removed[0]}' in caplog.text


@pytest.mark.slow
def test_concurrent_jobs_stay_below_limit_and_serve_correct_samples(store, bucket, tmp_path):
    """Space for three of six shards; two jobs, one with workers, shuffle all six."""
    cache, limit = tmp_path / 'cache', 3 * SHARD
    settings = {'cache_limit': limit, 'predownload': 6}

    def job(workers: int) -> None:
        loader = cached_loader(bucket, cache, workers=workers, **settings)
        assert_correct(loader, loader)

    jobs = [Forked(lambda: job(0)), Forked(lambda: job(1))]
    largest = 0
    while jobs[0].running():
        if cache.exists():
            with locks.hold_path_lock(cache / 'room', lambda: None):  # no job evicts or reserves space meanwhile
                largest = max(largest, total(shards_in(cache)))
        time.sleep(0.005)
    assert [job.wait() for job in jobs] == [0, 0]
    assert 0 < largest <= limit
    assert sum(store.shard_reads().values()) > SHARDS, 'some shards must be downloaded more than once'


def test_limit_without_cache_folder_applies_only_to_downloaded_shards(store, bucket, tmp_path):
    local = tmp_path / 'local'
    (local / 'other').mkdir(parents=True)
    (local / 'other' / 'shard.00000.mds').write_bytes(b'x' * 50_000)
    (local / 'notes.mds').write_bytes(b'x' * 50_000)
    loader = loader_over(bucket, local, cache_limit=3 * SHARD)
    assert_correct(loader, loader)
    assert total(list(local.glob('shard.*.mds'))) <= 3 * SHARD
    assert (local / 'other' / 'shard.00000.mds').exists() and (local / 'notes.mds').exists()


def test_limit_never_evicts_local_data(tmp_path):
    local = write_samples(tmp_path / 'local')
    assert_correct(loader_over(None, local, cache_limit=3 * SHARD))
    assert len(shards_in(local)) == SHARDS


names = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


@given(names, st.integers(0, 3000), st.integers(0, 900), st.randoms())
@settings(deadline=None, max_examples=25)
def test_eviction_is_least_recently_used_and_minimal(tmp_path_factory, used, limit, size, randomness):
    folder = tmp_path_factory.mktemp('room')
    paths = {use: folder / 'd-1' / VERSION / f'shard.{randomness.randrange(10**6)}.{use}.mds' for use in used}
    sizes = {use: randomness.randrange(1, 500) for use in used}
    for use, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'x' * sizes[use])
        os.utime(path, ns=(use * 10**9, 0))
    (folder / 'd-1').mkdir(exist_ok=True)
    (folder / 'd-1' / 'index.json').write_bytes(b'x' * 5000)
    (folder / 'd-1' / 'shard.other.mds').write_bytes(b'x' * 5000)
    budget = CacheBudget({folder: None}, limit, lambda: None)
    scratch = budget.make_scratch_folder(folder / 'd-1' / VERSION / 'shard.new.mds', size)
    kept = {use for use, path in paths.items() if path.exists()}
    evicted = set(used) - kept
    assert not evicted or not kept or max(evicted) < min(kept)
    assert sum(sizes[use] for use in kept) + size <= limit or not kept
    if evicted:
        assert sum(sizes[use] for use in kept | {max(evicted)}) + size > (1 - shard_cache.SLACK) * limit
    assert (folder / 'd-1' / 'index.json').exists() and (folder / 'd-1' / 'shard.other.mds').exists()
    assert locks.reserved_bytes(scratch.name) == size


def test_shards_being_downloaded_count_toward_limit(tmp_path):
    budget = CacheBudget({tmp_path: None}, 1000, lambda: None)
    old = tmp_path / 'd' / VERSION / 'shard.0.mds'
    old.parent.mkdir(parents=True)
    old.write_bytes(b'x' * 300)
    budget.make_scratch_folder(tmp_path / 'shard.1.mds', 600)
    assert (budget.used_bytes(), old.exists()) == (900, True)
    budget.make_scratch_folder(tmp_path / 'shard.2.mds', 200)
    assert not old.exists()


changes = st.lists(
    st.tuples(st.sampled_from(['download', 'fail', 'evict', 'damage', 'forget']), st.integers(0, 400)), max_size=40
)


@given(changes)
@settings(deadline=None, max_examples=25)
def test_limit_holds_after_any_changes(tmp_path_factory, changes):
    """Downloads of two jobs, failed ones, evictions for a full disk, and a record that is half written or removed."""
    cache, limit = tmp_path_factory.mktemp('room'), 1000
    jobs = [CacheBudget({cache: None}, limit, lambda: None) for _ in range(2)]
    for number, (change, size) in enumerate(changes):
        job, path = jobs[number % 2], cache / 'd' / VERSION / f'shard.{number}.mds'
        record = cache / shard_cache.RECORD
        if change in ('download', 'fail'):
            scratch = job.make_scratch_folder(path, size)
            assert job.used_bytes() <= limit
            if change == 'download':
                path.write_bytes(b'x' * size)
            shutil.rmtree(scratch)
        elif change == 'evict':
            job.evict(size)
        elif record.exists():
            record.write_bytes(record.read_bytes()[: 10 if change == 'damage' else 0])
        assert job.used_bytes() <= limit


def test_shards_of_a_job_without_limit_are_counted_later(tmp_path, monkeypatch):
    budget = CacheBudget({tmp_path: None}, 1000, lambda: None)
    folder = tmp_path / 'd' / VERSION
    budget.make_scratch_folder(folder / 'shard.0.mds', 100)
    for number in range(1, 10):
        (folder / f'shard.{number}.mds').write_bytes(b'x' * 100)
    monkeypatch.setattr(shard_cache, 'RECOUNT_SECONDS', 0.0)
    budget.make_scratch_folder(folder / 'shard.10.mds', 100)
    assert budget.used_bytes() <= 1000


def test_files_are_not_listed_for_each_download(tmp_path, monkeypatch):
    budget = CacheBudget({tmp_path: None}, 25_000, lambda: None)
    folder = tmp_path / 'd' / VERSION
    scandir, listed = os.scandir, []
    monkeypatch.setattr(os, 'scandir', lambda path: listed.append(path) or scandir(path))
    for number in range(300):
        path = folder / f'shard.{number}.mds'
        scratch = budget.make_scratch_folder(path, 100)
        path.write_bytes(b'x' * 100)
        scratch.rmdir()
    assert len(os.listdir(folder)) <= 250
    assert 2 <= listed.count(str(folder)) <= 30


def test_lock_of_a_stopped_process_delays_a_download_and_does_not_prevent_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 0.3)

    def download() -> None:
        budget = CacheBudget({tmp_path: None}, 1000, lambda: None)
        assert budget.make_scratch_folder(tmp_path / 'd' / VERSION / 'shard.0.mds', 100).exists()
        assert 'limiting its size without the lock' in caplog.text

    with locks.hold_path_lock(tmp_path / 'room', lambda: None):
        assert Forked(download).wait() == 0


def test_reading_updates_access_time(store, bucket, tmp_path, monkeypatch):
    """Shards that are read have a recent access time, so they are evicted last."""
    monkeypatch.setattr(verified_dataset, 'TOUCH_INTERVAL_SECONDS', 0.0)
    cache = tmp_path / 'cache'
    assert_correct(cached_loader(bucket, cache))
    for path in shards_in(cache):
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
    loader = cached_loader(bucket, cache, shuffle=False)
    for _, _batch in zip(range(4), loader, strict=False):
        pass
    recent = {path.name for path in shards_in(cache) if path.stat().st_atime_ns}
    assert {'shard.00000.mds', 'shard.00001.mds'} <= recent


def test_cleanup_keeps_scratch_of_live_process(tmp_path):
    read, write = os.pipe()

    def hold() -> None:
        with locks.hold_path_lock(tmp_path / 'shard.1.mds', lambda: None):
            locks.make_scratch_folder(tmp_path / 'shard.1.mds', 10)
            os.write(write, b'x')
            time.sleep(60)

    holder = Forked(hold)
    os.read(read, 1)
    locks.make_scratch_folder(tmp_path / 'sub' / 'shard.2.mds', 10)
    locks.remove_stale_scratch(tmp_path)
    assert [locks.reserved_bytes(path.name) for path in tmp_path.rglob('*.unfinished')] == [10]
    holder.kill()
    locks.remove_stale_scratch(tmp_path)
    assert not list(tmp_path.rglob('*.unfinished'))


def test_cache_folder_names_are_unique_and_readable():
    first, second = (home(Path('c'), f's3://bucket/laion/{size}') for size in (256, 512))
    assert first != second and first.name.startswith('bucket-laion-256-')
    assert home(Path('c'), 's3://bucket/laion/256/') == first
    assert shard_cache.version(first, '0' * 64, 'photos/640x384').name == 'photos_640x384'


def test_wait_is_limited_by_the_time_of_own_downloads():
    mine = DownloadTurns('streams.a', lambda: None)
    assert mine.patience_seconds(1000) == 10
    assert mine.patience_seconds(10**9) == 150
    mine.record(10**7, 1.0)
    assert mine.patience_seconds(10**9) == 300
    mine.record(10**9, 10.0)
    mine.record(10**7, 60.0)  # an outage
    assert mine.patience_seconds(10**9) == 30


def test_one_process_downloads_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three processes wait for one that never finishes its download: then one of the three downloads."""
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 0.5)
    path, holds = tmp_path / 'shard.0.mds', tmp_path / 'holds'

    def download(number: int, seconds: float) -> None:
        with DownloadTurns('streams.a', lambda: None).take(path, 10, path.exists) as locked:
            holds.touch()
            if locked is None:
                return
            time.sleep(seconds)
            (tmp_path / f'downloaded-by-{number}').touch()
            path.with_suffix(f'.{number}').touch()
            os.replace(path.with_suffix(f'.{number}'), path)

    first = Forked(lambda: download(0, 3600.0))
    wait_until(holds.exists)
    others = [Forked(lambda number=number: download(number, 0.1)) for number in (1, 2, 3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    first.kill()
    assert len(list(tmp_path.glob('downloaded-by-[123]'))) == len(list(tmp_path.glob('downloaded-by-*'))) == 1


def test_lock_that_was_not_released_is_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that was evicted is needed again, while the node that holds its lock is still stopped."""
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 0.5)
    path, waits = tmp_path / 'shard', []
    mine = DownloadTurns('streams.a', lambda: waits.append(None))

    def take() -> None:
        for most in (1000, 1):
            waits.clear()
            with mine.take(path, 10, path.exists) as locked:
                assert locked == tmp_path / 'shard.1'
            assert len(waits) <= most
        assert waits, 'the lock is tried again'

    with locks.hold_path_lock(path, lambda: None):
        assert Forked(take).wait() == 0
    with mine.take(path, 10, path.exists) as locked:
        assert locked == path


def test_file_of_a_process_with_another_lock_ends_the_wait(tmp_path: Path) -> None:
    path, deadline = tmp_path / 'shard', time.monotonic() + 20

    def write() -> None:
        assert time.monotonic() < deadline, 'it was not noticed'
        path.touch()

    def take() -> None:
        with DownloadTurns('streams.a', write).take(path, 10**12, path.exists) as locked:
            assert locked is None

    with locks.hold_path_lock(path, lambda: None):
        assert Forked(take).wait() == 0


def test_failure_of_another_rank_ends_the_wait(tmp_path: Path) -> None:
    def take() -> None:
        turn = DownloadTurns('streams.a', Mock(side_effect=KeyError)).take(tmp_path / 'shard', 1, lambda: False)
        with pytest.raises(KeyError), turn:
            pass

    with locks.hold_path_lock(tmp_path / 'shard', lambda: None):
        assert Forked(take).wait() == 0
