"""How often a shard leaves the object store when several nodes train on it for several epochs."""

import itertools
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from nodes import EPOCHS, NODES, can_isolate, isolate, samples_of, start_nodes
from numbered import cached_loader, expected, served, write_samples
from object_store import Store
from processes import Forked

from diffusion.data import shard_cache
from diffusion.errors import DataError
from diffusion.storage import locks, object_store

COUNT, SHARD = 1320, 2048


def train(url: str, folder: Path, **settings: Any) -> list[dict[int, int]]:
    """Read epochs on several nodes, as `start_nodes` does; return the samples of each epoch."""
    assert [node.wait() for node in start_nodes(url, folder, **settings)] == [0] * NODES
    parts = [samples_of(folder, rank) for rank in range(NODES)]
    for one, other in itertools.combinations(range(NODES), 2):
        assert not any(mine.keys() & theirs.keys() for mine, theirs in zip(parts[one], parts[other], strict=True))
    return [{key: value for part in parts for key, value in part[epoch].items()} for epoch in range(EPOCHS)]


@pytest.mark.cpu_seconds(20)
@pytest.mark.skipif(not can_isolate(), reason='only root can give each node its mounts')
@pytest.mark.usefixtures('many_datasets')
def test_a_shard_leaves_the_store_once_for_four_nodes_and_three_epochs(store: Store, tmp_path: Path) -> None:
    """Each node reads the same shards in every epoch, so that caches of a part of the dataset keep all of it.

    Shards are cut between canonical nodes: the one at a cut is read by the nodes on both sides.
    """
    source = write_samples(tmp_path / 'source', count=COUNT, size_limit=SHARD)
    url, shards = store.upload(source), sorted(source.glob('*.mds'))
    total = sum(path.stat().st_size for path in shards)
    store.requests.clear()
    # A node's limit is less than half of the dataset; the four nodes together hold it 1.8 times.
    epochs = train(
        url, tmp_path / 'nodes', num_canonical_nodes=None, shuffle_block_size=200, cache_limit=total * 9 // 20
    )
    whole = expected(count=COUNT)
    assert all(epoch.items() <= whole.items() and len(epoch) > 0.98 * COUNT for epoch in epochs)
    reads = store.shard_reads()
    assert len(reads) == len(shards)
    assert sum(reads.values()) <= 1.05 * len(shards), f'{sum(reads.values())} reads of {len(shards)} shards'


@pytest.mark.cpu_seconds(20)
@pytest.mark.skipif(not can_isolate(), reason='only root can give each node its mounts')
@pytest.mark.usefixtures('many_datasets')
@pytest.mark.parametrize('share', [None, pytest.param(0.7, marks=pytest.mark.slow)])
def test_nodes_share_a_cache_on_a_file_system_of_the_cluster(store: Store, tmp_path: Path, share: float | None) -> None:
    """In an order in which every node reads every shard, a shard leaves the store once, if the common cache holds all.

    With a limit of less, nodes evict each other's shards, and each sample is still served correctly.
    """
    source = write_samples(tmp_path / 'source', count=COUNT // 2, size_limit=4 * SHARD)
    url, shards = store.upload(source), sorted(source.glob('*.mds'))
    limit = None if share is None else int(share * sum(path.stat().st_size for path in shards))
    mounted = tmp_path / 'mounted'
    mounted.mkdir()
    store.requests.clear()
    epochs = train(url, tmp_path / 'nodes', mounted=mounted, shuffle_algo='naive', cache_limit=limit)
    whole = expected(count=COUNT // 2)
    assert all(epoch.items() <= whole.items() and len(epoch) > 0.98 * COUNT // 2 for epoch in epochs)
    reads = store.shard_reads()
    assert len(reads) == len(shards)
    if limit is None:
        assert set(reads.values()) == {1}
        return
    assert sum(path.stat().st_size for path in mounted.rglob('*.mds') if not path.is_symlink()) <= limit


@pytest.mark.skipif(not can_isolate(), reason='only root can give each node its mounts')
@pytest.mark.usefixtures('many_datasets')
@pytest.mark.slow
@pytest.mark.parametrize('share', [None, 0.9])
def test_stopped_slow_killed_and_lying_nodes_of_a_common_cache_do_not_stop_others(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None
) -> None:
    """The only node without a fault reads all samples while two others hold locks that they do not release.

    Each runs a job of its own, since the nodes of one job wait for each other in every batch, with any cache. Node 0
    is stopped while it holds the lock of a shard, or that of the cache's size; node 1 does not get the bytes that it
    asked for; node 2 is killed in a download; and bytes of shards in the cache change.
    """
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 0.5)
    source = write_samples(tmp_path / 'source', count=COUNT // 2, size_limit=4 * SHARD)
    url, shards = store.upload(source), sorted(source.glob('*.mds'))
    limit = None if share is None else int(share * sum(path.stat().st_size for path in shards))
    mounted, folder, go_on = tmp_path / 'mounted', tmp_path / 'nodes', tmp_path / 'go on'
    mounted.mkdir()
    store.requests.clear()

    begun = [tmp_path / f'fault of {number}' for number in range(3)]

    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.02)

    def fault(number: int) -> None:
        """Start one node after another, each when the fault of the one before it has begun."""
        if number:
            wait_for(begun[number - 1])
        if number < 3:
            module, name, act = (
                (locks, 'make_scratch_folder', lambda: os.kill(os.getpid(), signal.SIGSTOP)),
                (object_store, 'download_once', lambda: wait_for(go_on)),
                (object_store, 'download_once', lambda: os.kill(os.getpid(), signal.SIGKILL)),
            )[number]
            function, calls = getattr(module, name), itertools.count()

            def wrapper(*arguments: Any, **keywords: Any) -> Any:
                if next(calls) == 3:
                    begun[number].touch()
                    act()
                return function(*arguments, **keywords)

            setattr(module, name, wrapper)

    nodes = start_nodes(url, folder, mounted=mounted, fault=fault, shuffle_algo='naive', cache_limit=limit)
    assert nodes[2].wait() == -signal.SIGKILL
    for path in [path for path in mounted.rglob('shard.*.mds') if '.unfinished' not in str(path)][:3]:
        with path.open('r+b') as file:
            file.seek(500)
            file.write(b'wrong')
    assert nodes[3].wait() == 0
    assert nodes[0].running() and nodes[1].running()
    assert not (folder / 'samples-0').exists() and not (folder / 'samples-1').exists()
    go_on.touch()
    os.kill(nodes[0].pid, signal.SIGCONT)
    assert [nodes[number].wait() for number in (0, 1)] == [0, 0]
    whole = expected(count=COUNT // 2)
    assert all(samples_of(folder, number) == [whole] * EPOCHS for number in (0, 1, 3))
    if limit is None:
        # Each fault costs one more read of a shard, but for the killed node and the damaged shards, which may cost two.
        assert sum(store.shard_reads().values()) <= len(shards) + 10
    else:
        left = sum(path.stat().st_size for path in mounted.rglob('*.mds') if not path.is_symlink())
        assert left <= limit + 8 * SHARD, 'the lock of the size was ignored while its owner was stopped'


@pytest.mark.cpu_seconds(20)
@pytest.mark.skipif(not can_isolate(), reason='only root can mount a small disk')
@pytest.mark.usefixtures('many_datasets')
@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.slow)])
def test_full_disk_evicts_shards_instead_of_ending_the_run(store: Store, tmp_path: Path, workers: int) -> None:
    """Without cache_limit, on a disk that holds less than half of the dataset and is filled by others meanwhile."""
    url = store.upload(write_samples(tmp_path / 'source', count=COUNT, size_limit=4 * SHARD))
    cache, log = tmp_path / 'cache', tmp_path / 'log'
    cache.mkdir()

    def run() -> None:
        isolate('node', tmp_path / 'tmp')
        disk = ['mount', '-t', 'tmpfs', '-o', 'size=500k', 'tmpfs', str(cache)]
        subprocess.run(disk, check=True)
        logging.getLogger('diffusion').addHandler(logging.FileHandler(log))
        loader = cached_loader(url, cache, workers=workers, shuffle_block_size=200, predownload=24)
        first = served(loader)
        (cache / 'of-another-program').write_bytes(bytes(shutil.disk_usage(cache).free))
        second = served(loader)
        assert first == second == expected(count=COUNT)
        assert (cache / 'of-another-program').exists()

    assert Forked(run).wait() == 0
    assert 'is full' in log.read_text()
    assert 'Set loader.cache_limit' in log.read_text()


@pytest.mark.skipif(not can_isolate(), reason='only root can mount a small disk')
@pytest.mark.usefixtures('many_datasets')
def test_disk_that_others_have_filled_ends_the_run_with_the_way_out(store: Store, tmp_path: Path) -> None:
    url = store.upload(write_samples(tmp_path / 'source', size_limit=4 * SHARD))
    cache = tmp_path / 'cache'
    cache.mkdir()

    def run() -> None:
        isolate('node', tmp_path / 'tmp')
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=100k', 'tmpfs', str(cache)], check=True)
        (cache / 'of-another-program').write_bytes(bytes(88_000))
        with pytest.raises(DataError, match='no space left on the disk.*To fix: free space in'):
            served(cached_loader(url, cache))

    assert Forked(run).wait() == 0
