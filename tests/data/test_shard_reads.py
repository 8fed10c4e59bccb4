"""Number of times that a shard leaves the object store when several nodes train on it for several epochs."""

import itertools
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nodes import EPOCHS, NODES, can_isolate, isolate, samples_of, start_nodes
from numbered import cached_loader, expected, served, shards_of, write_samples
from object_store import Store
from processes import Forked

isolated = pytest.mark.skipif(not can_isolate(), reason='only root can give a process its mounts')
pytestmark = [pytest.mark.slow, isolated, pytest.mark.usefixtures('many_datasets')]
COUNT, SHARD = 1320, 2048


def train(url: str, folder: Path, **settings: Any) -> list[dict[int, int]]:
    """Read epochs on several nodes, as `start_nodes` does; return the samples of each epoch."""
    assert [node.wait() for node in start_nodes(url, folder, **settings)] == [0] * NODES
    parts = [samples_of(folder, rank) for rank in range(NODES)]
    for one, other in itertools.combinations(range(NODES), 2):
        assert not any(mine.keys() & theirs.keys() for mine, theirs in zip(parts[one], parts[other], strict=True))
    return [{key: value for part in parts for key, value in part[epoch].items()} for epoch in range(EPOCHS)]


def test_a_shard_leaves_the_store_once_for_four_nodes_and_two_epochs(store: Store, tmp_path: Path) -> None:
    """Each node reads the same shards in every epoch, so that caches of a part of the dataset keep all of it.

    Shards are cut between canonical nodes: the one at a cut is read by the nodes on both sides.
    """
    source = write_samples(tmp_path / 'source', count=COUNT, size_limit=SHARD)
    url, shards = store.upload(source), sorted(source.glob('*.mds'))
    total = sum(path.stat().st_size for path in shards)
    store.requests.clear()
    # A node's limit is less than half of the dataset; the four nodes together hold it 1.8 times.
    settings = {'num_canonical_nodes': None, 'shuffle_block_size': 200, 'cache_limit': total * 9 // 20}
    epochs = train(url, tmp_path / 'nodes', **settings)
    whole = expected(count=COUNT)
    assert all(epoch.items() <= whole.items() and len(epoch) > 0.98 * COUNT for epoch in epochs)
    reads = store.shard_reads()
    assert len(reads) == len(shards)
    assert sum(reads.values()) <= 1.05 * len(shards), f'{sum(reads.values())} reads of {len(shards)} shards'


def test_nodes_share_a_cache_on_a_file_system_of_the_cluster(store: Store, tmp_path: Path) -> None:
    """Every node reads every shard, and a shard leaves the store once."""
    count = 7 * 6 * NODES
    source = write_samples(tmp_path / 'source', count=count, size_limit=4 * SHARD)
    url, shards = store.upload(source), sorted(source.glob('*.mds'))
    mounted = tmp_path / 'mounted'
    mounted.mkdir()
    store.requests.clear()
    assert train(url, tmp_path / 'nodes', mounted=mounted, shuffle_algo='naive') == [expected(count=count)] * EPOCHS
    assert sorted(shards_of(store.shard_reads()).items()) == [(path.name, 1) for path in shards]


def test_full_disk_evicts_shards_instead_of_ending_the_run(store: Store, tmp_path: Path) -> None:
    """Set no cache_limit on a disk that holds less than half of the dataset and is filled by others meanwhile."""
    count = COUNT // 4
    url = store.upload(write_samples(tmp_path / 'source', count=count, size_limit=4 * SHARD))
    cache, log = tmp_path / 'cache', tmp_path / 'log'
    cache.mkdir()

    def run() -> None:
        isolate('node', tmp_path / 'tmp')
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=124k', 'tmpfs', str(cache)], check=True)
        logging.getLogger('diffusion').addHandler(logging.FileHandler(log))
        loader = cached_loader(url, cache, shuffle_block_size=50, predownload=12)
        first = served(loader)
        (cache / 'of-another-program').write_bytes(bytes(shutil.disk_usage(cache).free))
        second = served(loader)
        assert first == second == expected(count=count)
        assert (cache / 'of-another-program').exists()

    assert Forked(run).wait() == 0
    assert 'is full' in log.read_text() and 'Set loader.cache_limit' in log.read_text()
