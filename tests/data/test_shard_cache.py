"""The cache that the jobs of a machine share: read once, never wrong, never above its limit, whoever is killed."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered import Numbers, cached_loader, expected, loader_over, served, shards_of, write_samples
from processes import Forked
from streaming import Stream

from diffusion.config.image_shapes import square
from diffusion.data import shard_cache
from diffusion.data.loader import BucketedLoader
from diffusion.data.shard_cache import CacheBudget, home
from diffusion.data.streams import Bucket
from diffusion.models import batch_keys
from diffusion.storage import locks

pytestmark = pytest.mark.usefixtures('many_datasets')

SHARDS = 6
SHARD = 8192
VERSION = '0123456789abcdef'


@pytest.fixture
def bucket(store, tmp_path):
    """The URL of a dataset."""
    return store.upload(write_samples(tmp_path / 'source'))


def shards_in(folder: Path) -> list[Path]:
    """Whole shards; what goes while they are listed is left out."""
    found = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return [path for path in found if path.match('shard.*.mds') and '.unfinished' not in str(path)]


def total(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def is_served_right(*loaders: BucketedLoader) -> None:
    for loader in loaders:
        assert served(loader) == expected()


def test_a_second_job_reads_nothing_from_the_store(store, bucket, tmp_path):
    assert Forked(lambda: is_served_right(cached_loader(bucket, tmp_path / 'cache'))).wait() == 0
    assert len(store.shard_reads()) == SHARDS
    store.requests.clear()
    assert Forked(lambda: is_served_right(cached_loader(bucket, tmp_path / 'cache', workers=1))).wait() == 0
    assert not store.shard_reads()


def test_jobs_that_miss_the_same_shards_at_once_read_each_of_them_once(store, bucket, tmp_path):
    store.fail('GET .mds', 0.3)
    jobs = [Forked(lambda: is_served_right(cached_loader(bucket, tmp_path / 'cache'))) for _ in range(3)]
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert set(shards_of(store.shard_reads()).values()) == {1}


def test_two_streams_and_an_evaluation_over_one_folder_share_its_shards(store, bucket, tmp_path):
    cache = tmp_path / 'cache'
    streams = {name: Stream(remote=bucket, local=str(home(cache, bucket))) for name in ('large', 'small')}
    buckets = [Bucket(name, stream, square(32)) for name, stream in streams.items()]
    dataset = Numbers(
        buckets, batch_size=6, elastic=True, batching_method='per_stream', cache_folder=str(cache), shuffle=True
    )
    evaluation = cached_loader(bucket, cache, shuffle=False)
    both = iter(BucketedLoader(dataset, batch_size=6))
    next(both)
    is_served_right(evaluation)
    for _ in both:
        pass
    assert set(shards_of(store.shard_reads()).values()) == {1}
    assert len(shards_in(cache)) == SHARDS


def test_a_damaged_shard_in_the_cache_is_fetched_again(store, bucket, tmp_path):
    is_served_right(cached_loader(bucket, tmp_path / 'cache'))
    store.requests.clear()
    victim = shards_in(tmp_path / 'cache')[0]
    content = bytearray(victim.read_bytes())
    content[500] ^= 1
    victim.write_bytes(content)
    is_served_right(cached_loader(bucket, tmp_path / 'cache'))
    assert shards_of(store.shard_reads()) == {victim.name: 1}


def test_jobs_on_an_old_and_a_new_version_do_not_disturb_each_other(store, bucket, tmp_path):
    old = iter(cached_loader(bucket, tmp_path / 'cache', predownload=60))
    found = [next(old)]
    deadline = time.monotonic() + 20
    while len(shards_in(tmp_path / 'cache')) < SHARDS:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for path in write_samples(tmp_path / 'again', salt='other').iterdir():
        store.put(bucket, path.name, path.read_bytes())
    assert served(cached_loader(bucket, tmp_path / 'cache')) == expected('other')
    found += list(old)
    pairs = [pair for b in found for pair in zip(b[batch_keys.SAMPLE_ID].tolist(), b['number'].tolist(), strict=True)]
    assert dict(pairs) == expected()


def test_killed_while_fetching_others_go_on_at_once(store, bucket, tmp_path):
    """The lock dies with its process, and what that has left is swept away."""
    cache = tmp_path / 'cache'
    store.fail('GET shard.00000', 30.0, times=1)
    victim = Forked(lambda: served(cached_loader(bucket, cache, shuffle=False)))
    while not any('shard.00000' in key for key in store.shard_reads()):
        assert victim.running()
        time.sleep(0.02)
    other = Forked(lambda: is_served_right(cached_loader(bucket, cache, shuffle=False)))
    time.sleep(3)
    assert other.running(), 'it waits for the one that fetches'
    victim.kill()
    begin = time.monotonic()
    assert other.wait() == 0
    assert time.monotonic() - begin < 15
    is_served_right(cached_loader(bucket, cache))
    assert not list(cache.rglob('.*'))


def test_jobs_under_a_limit_evict_from_each_other_and_serve_right(store, bucket, tmp_path):
    """CacheBudget for three of six shards, two jobs that shuffle all of them, one with workers."""
    cache, limit = tmp_path / 'cache', 3 * SHARD
    settings = {'cache_limit': limit, 'predownload': 6}

    def job(workers: int) -> None:
        loader = cached_loader(bucket, cache, workers=workers, **settings)
        is_served_right(loader, loader)

    jobs = [Forked(lambda: job(0)), Forked(lambda: job(1))]
    most = 0
    while jobs[0].running():
        if cache.exists():
            with locks.locked(cache / 'room', lambda: None):  # nothing is evicted meanwhile
                most = max(most, total(shards_in(cache)))
        time.sleep(0.005)
    assert [job.wait() for job in jobs] == [0, 0]
    assert 0 < most <= limit
    assert sum(store.shard_reads().values()) > SHARDS, 'they had to be fetched more than once'


def test_a_limit_without_a_cache_folder_is_for_what_is_fetched_alone(store, bucket, tmp_path):
    local = tmp_path / 'local'
    (local / 'mine').mkdir(parents=True)
    (local / 'mine' / 'shard.00000.mds').write_bytes(b'x' * 50_000)
    (local / 'notes.mds').write_bytes(b'x' * 50_000)
    loader = loader_over(bucket, local, cache_limit=3 * SHARD)
    is_served_right(loader, loader)
    assert total(list(local.glob('shard.*.mds'))) <= 3 * SHARD
    assert (local / 'mine' / 'shard.00000.mds').exists() and (local / 'notes.mds').exists()


def test_a_limit_never_touches_local_data(tmp_path):
    local = write_samples(tmp_path / 'local')
    loader = loader_over(None, local, cache_limit=3 * SHARD)
    is_served_right(loader)
    assert len(shards_in(local)) == SHARDS


names = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True)


@given(names, st.integers(0, 3000), st.integers(0, 900), st.randoms())
def test_the_least_recently_used_go_first_and_no_more_than_needed(tmp_path_factory, used, limit, size, randomness):
    folder = tmp_path_factory.mktemp('room')
    paths = {use: folder / 'd-1' / VERSION / f'shard.{randomness.randrange(10**6)}.{use}.mds' for use in used}
    sizes = {use: randomness.randrange(1, 500) for use in used}
    for use, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b'x' * sizes[use])
        os.utime(path, ns=(use * 10**9, 0))
    (folder / 'd-1').mkdir(exist_ok=True)
    (folder / 'd-1' / 'index.json').write_bytes(b'x' * 5000)
    (folder / 'd-1' / 'shard.mine.mds').write_bytes(b'x' * 5000)
    scratch = CacheBudget({folder: None}, limit, lambda: None).scratch_for(folder / 'd-1' / VERSION / 'shard.new.mds', size)
    kept = {use for use, path in paths.items() if path.exists()}
    gone = set(used) - kept
    assert not gone or not kept or max(gone) < min(kept)
    assert sum(sizes[use] for use in kept) + size <= limit or not kept
    if gone:
        assert sum(sizes[use] for use in kept | {max(gone)}) + size > limit
    assert (folder / 'd-1' / 'index.json').exists() and (folder / 'd-1' / 'shard.mine.mds').exists()
    assert locks.reserved_bytes(scratch.name) == size


def test_what_is_being_fetched_counts(tmp_path):
    room = CacheBudget({tmp_path: None}, 1000, lambda: None)
    old = tmp_path / 'd' / VERSION / 'shard.0.mds'
    old.parent.mkdir(parents=True)
    old.write_bytes(b'x' * 300)
    room.scratch_for(tmp_path / 'shard.1.mds', 600)
    assert (room.used_bytes(), old.exists()) == (900, True)
    room.scratch_for(tmp_path / 'shard.2.mds', 200)
    assert not old.exists()


def test_reading_keeps_a_shard_from_being_evicted(store, bucket, tmp_path, monkeypatch):
    """Of two datasets in a cache, the one that is read from stays."""
    from diffusion.data import verified_dataset

    monkeypatch.setattr(verified_dataset, 'TOUCH_INTERVAL_SECONDS', 0.0)
    cache = tmp_path / 'cache'
    is_served_right(cached_loader(bucket, cache))
    for path in shards_in(cache):
        os.utime(path, ns=(0, path.stat().st_mtime_ns))
    loader = cached_loader(bucket, cache, shuffle=False)
    for _, _batch in zip(range(4), loader, strict=False):
        pass
    recent = {path.name for path in shards_in(cache) if path.stat().st_atime_ns}
    assert {'shard.00000.mds', 'shard.00001.mds'} <= recent


def test_a_sweep_leaves_what_a_living_process_is_at(tmp_path):
    read, write = os.pipe()

    def hold() -> None:
        with locks.locked(tmp_path / 'shard.1.mds', lambda: None):
            locks.scratch_for(tmp_path / 'shard.1.mds', 10)
            os.write(write, b'x')
            time.sleep(60)

    holder = Forked(hold)
    os.read(read, 1)
    locks.scratch_for(tmp_path / 'sub' / 'shard.2.mds', 10)
    locks.remove_stale_scratch(tmp_path)
    assert [locks.reserved_bytes(path.name) for path in tmp_path.rglob('*.unfinished')] == [10]
    holder.kill()
    locks.remove_stale_scratch(tmp_path)
    assert not list(tmp_path.rglob('*.unfinished'))


def test_one_at_a_time_holds_a_lock(tmp_path):
    """Four processes count to 100 in one file, each reading and writing it."""
    counter = tmp_path / 'counter'
    counter.write_text('0')

    def count() -> None:
        for _ in range(25):
            with locks.locked(counter, lambda: None):
                value = int(counter.read_text())
                time.sleep(0.0005)
                counter.write_text(str(value + 1))

    assert [process.wait() for process in [Forked(count) for _ in range(4)]] == [0] * 4
    assert counter.read_text() == '100'
    assert not list(tmp_path.glob('.*'))


def test_the_wait_for_a_lock_can_be_ended(tmp_path):
    class Enough(Exception):
        pass

    def enough() -> None:
        raise Enough

    def try_it() -> None:
        with pytest.raises(Enough), locks.locked(tmp_path / 'x', enough):
            pass

    with locks.locked(tmp_path / 'x', lambda: None):
        assert Forked(try_it).wait() == 0


def test_homes_are_told_apart_and_readable():
    first, second = (home(Path('c'), f's3://bucket/laion/{size}') for size in (256, 512))
    assert first != second and first.name.startswith('bucket-laion-256-')
    assert home(Path('c'), 's3://bucket/laion/256/') == first
    assert shard_cache.version(first, '0' * 64, 'photos/640x384').name == 'photos_640x384'
