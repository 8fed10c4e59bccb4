"""What a run needs of its machine is said before the first batch, with what to do about it."""

import resource
from pathlib import Path

import pytest
from numbered import SAMPLES, loader_over, served, write_samples
from processes import Forked
from streaming.base.shared import SharedMemory

from diffusion.config.byte_sizes import bytes_text, parse_bytes
from diffusion.config.load import RecipeError, load
from diffusion.data import host_limits

pytestmark = pytest.mark.usefixtures('many_datasets')


@pytest.fixture
def source(tmp_path):
    return write_samples(tmp_path / 'source')


def told(problems) -> list[tuple[str, bool]]:
    return [(problem.what, problem.fatal) for problem in problems]


def test_a_machine_with_enough_of_everything_is_told_nothing(source, tmp_path, caplog):
    loader = loader_over(source, tmp_path / 'local', workers=1, cache_limit='1gb')
    host_limits.check_machine(loader)
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


def test_shared_memory(source, tmp_path, monkeypatch):
    """64 MB, as docker gives: enough for the order of 60 samples, not for that of 10 million."""
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: type('Usage', (), {'free': 64 * 10**6}))
    loader = loader_over(None, source, workers=1)
    assert not told(host_limits.shared_memory_problems(loader))
    loader.dataset.epoch_size = 10_000_000
    ((what, fatal),) = told(host_limits.shared_memory_problems(loader))
    assert fatal
    assert what.startswith('/dev/shm: about 80.0 MB will be needed, 80.0 MB for the order of 10000000 samples')
    assert '64.0 MB are free. Way out: docker run --shm-size' in what
    loader.dataset.epoch_size, loader.prefetch_factor = 60, 5000
    ((what, fatal),) = told(host_limits.shared_memory_problems(loader))
    assert not fatal


def test_the_order_of_an_epoch_takes_eight_bytes_a_sample(source, monkeypatch):
    """Of Streaming's shared memory, not only of our arithmetic."""
    sizes = {}

    def seen(name: str, create: bool, size: int = 0, **rest) -> SharedMemory:
        sizes[name.partition('_')[2]] = size
        return SharedMemory(name, create, size, **rest)

    monkeypatch.setattr('streaming.base.dataset.SharedMemory', seen)
    served(loader_over(None, source))
    assert sizes['epoch_data'] == host_limits.ORDER_BYTES * SAMPLES


@pytest.mark.parametrize(('available', 'fatal'), [(10**9, True), (2 * 10**9, False), (None, None), (10**10, None)])
def test_memory_for_shuffling(source, monkeypatch, available, fatal):
    monkeypatch.setattr(host_limits, 'available_memory', lambda: available)
    loader = loader_over(None, source)
    loader.dataset.epoch_size = 20_000_000
    found = told(host_limits.memory_problems(loader))
    assert [each[1] for each in found] == ([] if fatal is None else [fatal])
    assert all('1.4 GB at the start of an epoch' in each[0] for each in found)


def test_available_memory_is_a_figure():
    available = host_limits.available_memory()
    assert available is not None and available > 10**8


@pytest.mark.parametrize(('limit', 'expected'), [('5000', 1000), ('max', 2048 * 1024), ('9000000', 2048 * 1024)])
def test_available_memory_is_the_smaller_of_the_kernels_and_the_containers(tmp_path, limit, expected):
    meminfo = tmp_path / 'meminfo'
    meminfo.write_text('MemTotal:  4096 kB\nMemAvailable:  2048 kB\n')
    (tmp_path / 'memory.max').write_text(f'{limit}\n')
    (tmp_path / 'memory.current').write_text('4000\n')
    assert host_limits.available_memory(meminfo=meminfo, cgroup=tmp_path) == expected
    assert host_limits.available_memory(meminfo=tmp_path / 'none', cgroup=tmp_path / 'none') is None


def test_a_limit_of_open_files_is_raised_where_it_may_be(source):
    loader = loader_over(None, source, workers=2)

    def raised() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (210, hard))
        assert not told(host_limits.open_file_problems(loader))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 210

    def refused() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (210, 210))
        ((what, fatal),) = told(host_limits.open_file_problems(loader))
        assert what.startswith('ulimit -n: 2 workers need 244 open files, and 210 are allowed') and not fatal

    assert Forked(raised).wait() == 0
    assert Forked(refused).wait() == 0


def test_disk(source, tmp_path, monkeypatch):
    loader = loader_over(source, tmp_path / 'local')
    whole = sum(path.stat().st_size for path in source.glob('*.mds'))
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: type('Usage', (), {'free': whole - 1}))
    ((what, fatal),) = told(host_limits.disk_problems(loader))
    assert what.startswith(f'{tmp_path}/local: {bytes_text(whole)} of shards are yet to be fetched') and not fatal
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: type('Usage', (), {'free': whole}))
    assert not told(host_limits.disk_problems(loader))
    served(loader)
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: type('Usage', (), {'free': 0}))
    assert not told(host_limits.disk_problems(loader)), 'what is there already needs no more room'


def test_a_cache_limit_below_what_is_read_at_once_is_refused_with_the_least(source, tmp_path):
    largest = max(path.stat().st_size for path in source.glob('*.mds'))
    loader = loader_over(source, tmp_path / 'a', workers=2, cache_limit=4 * largest - 1)
    ((what, fatal),) = told(host_limits.cache_problems(loader))
    assert fatal and what.startswith('loader.cache_limit: ') and f'at least {bytes_text(4 * largest)}' in what
    with pytest.raises(ValueError, match='what 2 processes read and fetch at once, two shards each'):
        host_limits.check_machine(loader)
    ((what, fatal),) = told(
        host_limits.cache_problems(loader_over(source, tmp_path / 'b', workers=2, cache_limit=4 * largest))
    )
    assert not fatal and 'shards are fetched more than once' in what


def test_a_recipe_with_too_small_a_limit_is_refused_before_the_first_batch(write_recipe, pictures, tmp_path):
    from diffusion.training.components import build_loader

    streams = {'a': {'remote': str(pictures[32]), 'local': str(tmp_path / 'local'), 'resolution': 32}}
    with pytest.raises(ValueError, match=r'loader.cache_limit: 9.0 kB cannot hold .*Way out: at least 1\d\.\d kB'):
        build_loader(load(write_recipe(streams=streams, loader={'num_workers': 0, 'cache_limit': '9kb'})))


def test_a_remote_without_a_local_folder_goes_to_the_cache(write_recipe, pictures, tmp_path):
    from diffusion.training.components import build_loader

    streams = {'a': {'remote': str(pictures[32]), 'resolution': 32}}
    loader = {'num_workers': 0, 'cache_folder': str(tmp_path / 'cache')}
    batches = list(build_loader(load(write_recipe(streams=streams, loader=loader))))
    assert len(batches) == 5
    assert len(list((tmp_path / 'cache').glob('*-32px-*/*/shard.*.mds'))) == len(list(pictures[32].glob('*.mds')))


def test_shared_memory_of_the_dead_is_told_from_that_of_the_living(tmp_path, source, caplog):
    """Streaming's names; a dataset that lives has them mapped."""
    dead = Path('/dev/shm/999990_locals')
    dead.write_bytes(b'x' * 65 * 2**20)
    try:
        loader = loader_over(None, source)
        found = host_limits.unmapped(host_limits.SHM)
        assert dead in found
        mine = f'{loader.dataset._shm_prefix_int:06}_'
        assert not [path for path in found if path.name.startswith(mine)]
        host_limits.note_leftovers()
        assert 'are of runs that have ended' in caplog.text and '/dev/shm/999990_*' in caplog.text
    finally:
        dead.unlink()


@pytest.mark.parametrize(
    ('text', 'size'), [('500gb', 500 * 10**9), ('1.5 GiB', 3 * 2**29), (17, 17), ('64kib', 65536), ('9b', 9)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize('text', ['', 'much', '5 apples', '-1gb', '0'])
def test_what_is_no_size_is_refused_by_check(write_recipe, text):
    with pytest.raises(RecipeError, match=r'loader.cache_limit: .* is not a size; write a number and a unit'):
        load(write_recipe(loader={'cache_limit': text}))


@pytest.mark.parametrize('share', [-0.1, 1.0, 3.0])
def test_a_share_of_bad_samples_that_is_none_is_refused_by_check(write_recipe, share):
    with pytest.raises(RecipeError, match='loader.max_bad_samples: .* is not a fraction of the samples'):
        load(write_recipe(loader={'max_bad_samples': share}))
