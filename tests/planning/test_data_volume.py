"""Bytes of stored samples, and reads from the object store, compared with the order of Streaming shard by shard."""

from collections.abc import Iterator

import numpy as np
import pytest

from diffusion.config.load import load
from diffusion.planning.data_volume import CAPTION_BYTES, nodes_per_shard, reads_per_epoch, sample_bytes
from tests.planning.recipes import PHASES, phase, write_recipe

SHARDS, PER_SHARD = 192, 512
MEANS = ['precompute.posterior=mean']


def recipe_with(*overrides: str):
    return load(PHASES[0], ['global_batch=2048', *overrides], allow_missing=True)


def shards_of_nodes(recipe, nodes: int, canonical_nodes: int) -> Iterator[list[set[int]]]:
    """Yield the shards that each node reads, in each of three epochs."""
    from streaming.base.partition import get_partitions
    from streaming.base.shuffle import get_shuffle

    samples = SHARDS * PER_SHARD
    batch = recipe.global_batch // (nodes * 8)
    parts = get_partitions('relaxed', samples, canonical_nodes, nodes, 8, 1, batch, 0, nodes)
    for epoch in range(3):
        sizes = np.full(SHARDS, PER_SHARD)
        order = get_shuffle(recipe.loader.shuffle_algo, sizes, canonical_nodes, 17, epoch, 8 * PER_SHARD)
        yield [set(np.unique(order[part[part >= 0]] // PER_SHARD).tolist()) for part in parts]


@pytest.mark.parametrize('algo', ['py1e', 'py1br', 'py1s', 'py2s', 'naive'])
@pytest.mark.parametrize(
    ('nodes', 'canonical_nodes'),
    [(4, 64), (8, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 64), (4, 4), (4, 1)))],
)
def test_nodes_per_shard_are_those_of_streamings_order(algo, nodes, canonical_nodes):
    recipe = recipe_with(f'loader.shuffle_algo={algo}', f'loader.num_canonical_nodes={canonical_nodes}')
    epochs = list(shards_of_nodes(recipe, nodes, canonical_nodes))
    predicted = nodes_per_shard(recipe, nodes)
    for epoch in epochs:
        found = sum(len(shards) for shards in epoch) / SHARDS
        # A shard at the boundary between two nodes is read by both.
        assert predicted - 0.01 <= found <= predicted + max(nodes, canonical_nodes) / SHARDS * predicted
    # In every epoch a node reads the same shards, so that a cache that holds them reads nothing again.
    assert epochs[0] == epochs[1] == epochs[2]


def test_a_shard_is_read_by_one_node_and_with_a_small_cache_in_every_epoch():
    assert [nodes_per_shard(recipe_with(), nodes) for nodes in (1, 16, 64, 128)] == [1, 1, 1, 2]
    small, large = recipe_with('loader.cache_limit=10tb'), recipe_with('loader.cache_limit=25tb')
    assert [reads_per_epoch(each, 64e12, nodes=4).later.bytes for each in (small, large)] == [64e12, 0]
    # With one canonical node, each of four nodes reads everything.
    striped = reads_per_epoch(recipe_with('loader.cache_limit=25tb', 'loader.num_canonical_nodes=1'), 64e12, nodes=4)
    assert (striped.first.bytes, striped.later.bytes) == (256e12, 256e12)


@pytest.mark.parametrize(('path', 'latents'), [(PHASES[0], 8_192), (PHASES[1], 32_768)])
def test_bytes_per_sample_of_latents_and_text(path, latents):
    work = phase(path, MEANS)
    assert sample_bytes(work, 'latents') == latents + CAPTION_BYTES
    assert sample_bytes(work, 'latents+text') == latents + 157_696 + CAPTION_BYTES
    assert sample_bytes(phase(path), 'latents') == 2 * latents + CAPTION_BYTES  # with variances
    assert sample_bytes(phase(path, [*MEANS, 'precompute.dtype=float32']), 'latents') == 2 * latents + CAPTION_BYTES


def test_local_shards_give_samples_and_bytes(tmp_path):
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / 'mds'), columns={'image': 'bytes', 'caption': 'str'}) as writer:
        for index in range(24):
            writer.write({'image': bytes(1000), 'caption': str(index)})
    work = phase(write_recipe(tmp_path, streams={'a': {'local': str(tmp_path / 'mds'), 'resolution': 64}}))
    assert work.samples == 24
    assert 1000 < sample_bytes(work, 'pictures') < 1100
    assert sample_bytes(work, 'latents') == 2 * 2 * 16 * 8 * 8 + CAPTION_BYTES
