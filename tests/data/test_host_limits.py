"""Checks of the machine's resources before the first batch, and their messages."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from numbered import SAMPLES, loader_over, served, write_samples
from processes import Forked
from streaming.base.shared import SharedMemory

from diffusion.config.byte_sizes import bytes_text
from diffusion.config.load import load
from diffusion.data import host_limits
from diffusion.training.components import build_loader

pytestmark = pytest.mark.usefixtures('many_datasets')


@pytest.fixture
def source(tmp_path):
    return write_samples(tmp_path / 'source')


def summary(problems) -> list[tuple[str, bool]]:
    return [(problem.message, problem.fatal) for problem in problems]


def test_sufficient_resources_log_no_warning(source, tmp_path, caplog):
    host_limits.check_machine(loader_over(source, tmp_path / 'local', workers=1, cache_limit='1gb'))
    assert not [record for record in caplog.records if record.levelname == 'WARNING']


def test_shared_memory_shortage(source, tmp_path, monkeypatch):
    """Docker's default of 64 MB is enough for the order of 60 samples, but not of 10 million."""
    usage: Any = SimpleNamespace(free=64 * 10**6)
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: usage)
    loader = loader_over(None, source, workers=1)
    assert not summary(host_limits.shared_memory_problems(loader))
    loader.dataset.epoch_size = 10_000_000
    ((message, fatal),) = summary(host_limits.shared_memory_problems(loader))
    assert fatal
    assert message.startswith('/dev/shm: about 80.0 MB needed (80.0 MB for the order of 10000000 samples')
    assert '64.0 MB free. To fix: enlarge it with docker run --shm-size' in message
    loader.dataset.epoch_size, loader.prefetch_factor = 60, 5000  # batches of 6 images of 32 x 32 pixels
    ((message, fatal),) = summary(host_limits.shared_memory_problems(loader))
    assert message.startswith('/dev/shm: about 92.2 MB needed (582 B for the order of 60 samples, ') and not fatal
    usage.free = 8 * 60 + 17 * loader.dataset.num_shards
    assert [fatal for _, fatal in summary(host_limits.shared_memory_problems(loader))] == [False]
    usage.free += 5000 * 6 * 3 * 32 * 32
    assert not summary(host_limits.shared_memory_problems(loader))


def test_shared_memory_of_samples_and_shards(source, monkeypatch):
    """Compare the constants with the shared memory that Streaming really allocates."""
    sizes = {}

    def record(name: str, create: bool | None = None, size: int = 0, **rest) -> SharedMemory:
        sizes[name.partition('_')[2]] = size
        return SharedMemory(name, create, size, **rest)

    for module in ('dataset', 'shared.array'):
        monkeypatch.setattr(f'streaming.base.{module}.SharedMemory', record)
    loader = loader_over(None, source)
    served(loader)
    assert sizes['epoch_data'] == host_limits.ORDER_BYTES * SAMPLES
    per_shard = [size for name, size in sizes.items() if name.startswith(('shard_', 'signatures'))]
    assert sum(per_shard) == host_limits.SHARD_SHM_BYTES * loader.dataset.num_shards


@pytest.mark.parametrize(('available', 'fatal'), [(1e9, True), (1.44e9, False), (None, None), (2.88e9, None)])
def test_memory_shortage_for_shuffling(source, monkeypatch, available, fatal):
    monkeypatch.setattr(host_limits, 'available_memory', lambda: available)
    loader = loader_over(None, source)
    loader.dataset.epoch_size = 20_000_000
    found = summary(host_limits.memory_problems(loader))
    assert [each[1] for each in found] == ([] if fatal is None else [fatal])
    assert all('1.4 GB at the start of an epoch' in each[0] for each in found)


@pytest.mark.parametrize(('limit', 'expected'), [('5000', 1000), ('max', 2048 * 1024), ('9000000', 2048 * 1024)])
def test_available_memory_is_minimum_of_kernel_and_container(tmp_path, limit, expected):
    meminfo = tmp_path / 'meminfo'
    meminfo.write_text('MemTotal:  4096 kB\nMemAvailable:  2048 kB\n')
    (tmp_path / 'memory.max').write_text(f'{limit}\n')
    (tmp_path / 'memory.current').write_text('4000\n')
    assert host_limits.available_memory(meminfo=meminfo, cgroup=tmp_path) == expected
    assert host_limits.available_memory(meminfo=tmp_path / 'none', cgroup=tmp_path / 'none') is None
    (tmp_path / 'memory.stat').write_text('anon 1000\ninactive_file 300\nactive_file 7\n')
    with_cache = expected + (300 if limit == '5000' else 0)
    assert host_limits.available_memory(meminfo=meminfo, cgroup=tmp_path) == with_cache


def test_soft_limit_of_open_files_is_raised_up_to_hard_limit(source):
    loader = loader_over(None, source, workers=2)

    def raised() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (210, hard))
        assert not summary(host_limits.open_file_problems(loader))
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (244, hard)

    def refused() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (210, 244))
        assert (
            not summary(host_limits.open_file_problems(loader)) and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 244
        )
        resource.setrlimit(resource.RLIMIT_NOFILE, (244, 244))
        assert not summary(host_limits.open_file_problems(loader))
        resource.setrlimit(resource.RLIMIT_NOFILE, (243, 243))
        ((message, fatal),) = summary(host_limits.open_file_problems(loader))
        assert message.startswith('ulimit -n: 2 workers need 244 open files, the limit is 243') and not fatal

    assert Forked(raised).wait() == 0
    assert Forked(refused).wait() == 0


def test_disk_shortage(source, tmp_path, monkeypatch):
    loader = loader_over(source, tmp_path / 'local')
    total = sum(path.stat().st_size for path in source.glob('*.mds'))
    usage = SimpleNamespace(free=total - 1)
    monkeypatch.setattr(host_limits.shutil, 'disk_usage', lambda _: usage)
    ((message, fatal),) = summary(host_limits.disk_problems(loader))
    assert message.startswith(f'{tmp_path}/local: {bytes_text(total)} of shards are still to be downloaded')
    assert not fatal
    usage.free = total
    assert not summary(host_limits.disk_problems(loader))
    served(loader)
    usage.free = 0
    assert not summary(host_limits.disk_problems(loader)), 'downloaded shards need no more space'
    loader = loader_over(source, tmp_path / 'limited', cache_limit=total - 2000)
    served(loader)
    budget: Any = loader.dataset.cache_budget
    usage.free = total - 2000 - budget.used_bytes()
    assert not summary(host_limits.disk_problems(loader)), 'the cache evicts the other shards'


def test_cache_limit_below_working_set_is_rejected_with_minimum(source, tmp_path, caplog, monkeypatch):
    sizes = [path.stat().st_size for path in source.glob('*.mds')]
    largest, total = max(sizes), sum(sizes)
    loader = loader_over(source, tmp_path / 'a', workers=2, cache_limit=4 * largest - 1)
    ((message, fatal),) = summary(host_limits.cache_problems(loader))
    assert fatal and message.startswith('loader.cache_limit: ') and f'at least {bytes_text(4 * largest)}' in message
    with pytest.raises(ValueError, match='cannot hold two shards for each of 2 processes'):
        host_limits.check_machine(loader)
    larger = loader_over(source, tmp_path / 'b', workers=2, cache_limit=4 * largest)
    ((message, fatal),) = summary(host_limits.cache_problems(larger))
    host_limits.check_machine(larger)
    assert message in caplog.messages
    assert not fatal and f'less than the {bytes_text(total)} that are shuffled together, so shards will be' in message
    whole = loader_over(source, tmp_path / 'c', workers=2, cache_limit=total)
    assert not summary(host_limits.cache_problems(whole))
    part = bytes_text(50 / SAMPLES * total)
    monkeypatch.setattr(host_limits.dist, 'get_world_size', lambda: 16)
    monkeypatch.setattr(host_limits.dist, 'get_local_world_size', lambda: 8)
    dataset = Mock(shuffle=True, shuffle_block_size=1000, num_canonical_nodes=64)
    assert host_limits._shuffled_together(Mock(dataset=dataset)) == 32 * 1000, 'on each of two nodes'
    monkeypatch.undo()
    ahead: dict[str, Any] = {'shuffle': False, 'predownload': 25}  # in each of two workers
    blocks: dict[str, Any] = {'shuffle_block_size': 25, 'num_canonical_nodes': 2}
    for number, settings in enumerate((ahead, blocks)):
        loader = loader_over(source, tmp_path / str(number), workers=2, cache_limit=4 * largest, **settings)
        ((message, fatal),) = summary(host_limits.cache_problems(loader))
        assert not fatal and f'less than the {part} that are shuffled together' in message


def test_too_small_cache_limit_is_rejected_before_first_batch(write_recipe, pictures, tmp_path):
    streams = {'a': {'remote': str(pictures[32]), 'local': str(tmp_path / 'local'), 'resolution': 32}}
    with pytest.raises(ValueError, match=r'loader.cache_limit: 9.0 kB cannot hold .* set it to at least 1\d\.\d kB'):
        build_loader(load(write_recipe(streams=streams, loader={'num_workers': 0, 'cache_limit': '9kb'})))


def test_remote_without_local_folder_uses_cache(write_recipe, pictures, tmp_path):
    streams = {'a': {'remote': str(pictures[32]), 'resolution': 32}}
    loader = {'num_workers': 0, 'cache_folder': str(tmp_path / 'cache')}
    assert len(list(build_loader(load(write_recipe(streams=streams, loader=loader))))) == 5
    assert len(list((tmp_path / 'cache').glob('*-32px-*/*/shard.*.mds'))) == len(list(pictures[32].glob('*.mds')))


def test_leftover_shared_memory_is_distinguished_from_live(tmp_path, source, caplog):
    """A live dataset has its shared memory files mapped; a leftover file has a name in Streaming's format."""
    dead = Path('/dev/shm/999990_locals')
    dead.write_bytes(b'x' * 65 * 2**20)
    try:
        loader = loader_over(None, source)
        found = host_limits.unmapped_files(host_limits.SHM)
        assert dead in found
        live = f'{loader.dataset._shm_prefix_int:06}_'
        assert not [path for path in found if path.name.startswith(live)]
        host_limits.warn_about_leftovers()
        assert 'left behind by runs that have ended' in caplog.text and '/dev/shm/999990_*' in caplog.text
    finally:
        dead.unlink()
