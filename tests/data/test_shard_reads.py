"""How often a shard leaves the object store when several nodes train on it for several epochs."""

import ctypes
import gc
import itertools
import logging
import os
import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from numbered import cached_loader, expected, served, write_samples
from object_store import Store
from processes import Forked
from ranks import free_port

from diffusion.data import shm_lock
from diffusion.errors import DataError

CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000
NODES, EPOCHS, COUNT, SHARD = 4, 3, 1320, 2048


def can_isolate() -> bool:
    """Return True if this process may give its children mounts and a host name of their own."""
    command = ['unshare', '--mount', '--uts', 'true']
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True, check=False).returncode


def isolate(name: str, temporary: Path) -> None:
    """Give this process a host name, a /dev/shm and a temporary folder of its own, as a node has."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(['mount', '--make-rprivate', '/'], check=True)
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', '/dev/shm'], check=True)
    subprocess.run(['hostname', name], check=True)
    temporary.mkdir(exist_ok=True)
    os.environ['TMPDIR'] = tempfile.tempdir = str(temporary)
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'  # the host name has no address
    os.environ['PYTHONWARNINGS'] = 'ignore'  # of shared memory that is not freed by os._exit, but goes with its mount
    shm_lock.LOCK = temporary / shm_lock.LOCK.name  # of a machine: found at the import


def train(url: str, folder: Path, *, mounted: Path | None = None, **settings: Any) -> list[dict[int, int]]:
    """Read epochs on several nodes of one device each, in a process group; return the samples of each epoch.

    Args:
        url: URL of the shards.
        folder: Folder of the nodes' caches.
        mounted: Folder that each node mounts as its cache, as a file system of the cluster; None gives each its own.
        settings: Keywords of the dataset.
    """
    port = free_port()
    folder.mkdir()

    def run(rank: int) -> None:
        isolate(f'node{rank}', folder / f'tmp-{rank}')
        import torch

        os.environ |= {'RANK': str(rank), 'NODE_RANK': str(rank), 'WORLD_SIZE': str(NODES)}
        os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        cache = folder / f'cache-{rank}'
        if mounted is not None:
            cache.mkdir()
            subprocess.run(['mount', '--bind', str(mounted), str(cache)], check=True)
        torch.distributed.init_process_group('gloo')
        loader = cached_loader(url, cache, predownload=24, **settings)
        found = [served(loader) for _ in range(EPOCHS)]
        (folder / f'samples-{rank}').write_bytes(pickle.dumps(found))
        torch.distributed.barrier()
        del loader
        gc.collect()  # ends the threads and frees the shared memory; the process ends without finalizers

    jobs = [Forked(lambda rank=rank: run(rank)) for rank in range(NODES)]
    assert [job.wait() for job in jobs] == [0] * NODES
    parts = [pickle.loads((folder / f'samples-{rank}').read_bytes()) for rank in range(NODES)]
    for one, other in itertools.combinations(range(NODES), 2):
        assert not any(mine.keys() & theirs.keys() for mine, theirs in zip(parts[one], parts[other], strict=True))
    return [{key: value for part in parts for key, value in part[epoch].items()} for epoch in range(EPOCHS)]


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


@pytest.mark.skipif(not can_isolate(), reason='only root can give each node its mounts')
@pytest.mark.usefixtures('many_datasets')
@pytest.mark.parametrize('share', [None, 0.7])
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


@pytest.mark.skipif(not can_isolate(), reason='only root can mount a small disk')
@pytest.mark.usefixtures('many_datasets')
@pytest.mark.parametrize('workers', [0, 2])
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
        with pytest.raises(DataError, match='no space left on the disk.*Way out: free space in'):
            served(cached_loader(url, cache))

    assert Forked(run).wait() == 0
