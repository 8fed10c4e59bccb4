"""Global batches contain the same samples on any number of devices and nodes, and after any resume."""

import logging
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import streams_of
from streaming import Stream
from streaming.base.batching import generate_work
from streaming.base.spanner import Spanner
from streaming.base.world import World

from diffusion.config.device_checks import nodes_problem
from diffusion.config.image_shapes import square
from diffusion.config.load import load
from diffusion.data.epoch_order import OccurrenceSpanner
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.models import batch_keys
from diffusion.training.components import build_loader

ALGORITHMS = ['py1e', 'py1br', 'py1s', 'py2s', 'naive']


@dataclass(frozen=True)
class Layout:
    nodes: int
    ranks_per_node: int
    workers: int = 1

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def world(self) -> World:
        return World(self.nodes, self.ranks_per_node, self.workers, 0)


LAYOUTS = [
    Layout(nodes, ranks // nodes, workers)
    for ranks in (1, 2, 4, 8, 16, 32, 64)
    for nodes in {1, max(1, ranks // 8), ranks}
    for workers in (1, 2)
]
"""Up to 64 devices on one node, eight per node, and one per node. Streaming counts no worker process as one worker."""


def dataset_without_shards(
    streams: list[tuple[Stream, list[int]]], global_batch: int, *, layout: Layout = LAYOUTS[0], **streaming
) -> BucketedDataset:
    """Return a BucketedDataset with given sizes of each stream's shards, which Streaming reads from indexes."""
    dataset = BucketedDataset.__new__(BucketedDataset)
    values = {'sampling_method': 'balanced', 'sampling_granularity': 1, 'partition_algo': 'relaxed', 'elastic': True}
    values |= {'shuffle': True, 'shuffle_algo': 'py1e', 'shuffle_seed': 17, 'batching_method': 'per_stream'}
    values |= dict.fromkeys(('num_canonical_nodes', 'shuffle_block_size', 'initial_physical_nodes'))
    for name, value in (values | streaming).items():
        setattr(dataset, name, value)
    dataset.epoch_seed_change = dataset.shuffle
    dataset.batch_size = global_batch // layout.ranks
    dataset._unique_rank_world = dataset._parallel_rank_world = layout.world
    dataset.streams = [stream for stream, _ in streams]  # type: ignore[reportAttributeAccessIssue]  # nothing is read of them
    dataset.buckets = [Bucket(f's{i}', stream, square(64)) for i, stream in enumerate(dataset.streams)]
    sizes = [np.array(shards, np.int64) for _, shards in streams]
    dataset.num_streams = len(streams)
    dataset.shards_per_stream = np.array([len(shards) for shards in sizes])
    dataset.shard_offset_per_stream = dataset.shards_per_stream.cumsum() - dataset.shards_per_stream
    dataset.samples_per_stream = np.array([shards.sum() for shards in sizes])
    dataset.samples_per_shard = np.concatenate(sizes)
    dataset.sample_offset_per_shard = dataset.samples_per_shard.cumsum() - dataset.samples_per_shard
    dataset.stream_per_shard = np.repeat(np.arange(len(streams)), dataset.shards_per_stream)
    dataset.spanner = OccurrenceSpanner(Spanner(dataset.samples_per_shard))
    dataset.num_samples = int(dataset.samples_per_shard.sum())
    dataset.epoch_size = Stream.apply_weights(dataset.streams, dataset.samples_per_stream, None, dataset.shuffle_seed)
    dataset.is_proportional = any(stream._proportion is not None for stream in dataset.streams)
    dataset._round_to_whole_batches()
    return dataset


def batches(dataset: BucketedDataset, layout: Layout, *, epoch: int = 0, skipped: int = 0) -> list[list[int]]:
    """Return the sorted numbered ids of every global batch that the loaders of all ranks together would serve."""
    global_batch = dataset.global_batch
    dataset.batch_size = global_batch // layout.ranks
    dataset._parallel_rank_world = layout.world
    work = generate_work(dataset.batching_method, dataset, layout.world, epoch, skipped * global_batch)
    assert work.shape[:3] == (layout.nodes, layout.ranks_per_node, layout.workers)
    # A rank's loader takes batches from its workers in turn; -1 is padding that no worker serves.
    rows = work.transpose(3, 2, 0, 1, 4).reshape(-1, global_batch)
    served = rows[~(rows == -1).all(axis=1)]
    assert (rows[: len(served)] == served).all(), 'padding must come last'
    assert (served >= 0).all(), 'every batch must be full'
    return [sorted(row) for row in served.tolist()]


def mixes_streams(dataset: BucketedDataset, batch: list[int]) -> bool:
    return len({dataset.bucket_of(index).name for index in batch}) > 1


def stream(**amount: float) -> Stream:
    return Stream(local='nowhere', **amount)  # type: ignore[arg-type]


shard_sizes = st.lists(st.integers(2, 400), min_size=1, max_size=6)
shuffling = st.fixed_dictionaries(
    {'shuffle': st.booleans(), 'shuffle_algo': st.sampled_from(ALGORITHMS), 'shuffle_seed': st.integers(0, 2**31)}
)


@st.composite
def weighted_streams(draw) -> list[tuple[Stream, list[int]]]:
    sizes = draw(st.lists(shard_sizes, min_size=1, max_size=3))
    if draw(st.booleans()):
        return [(stream(proportion=draw(st.floats(0.1, 10))), shards) for shards in sizes]
    return [(stream(**draw(st.sampled_from([{}, {'repeat': 0.6}, {'repeat': 2.3}]))), shards) for shards in sizes]


@pytest.mark.cpu_seconds(12)
@settings(max_examples=15, deadline=None)
@given(
    streams=weighted_streams(),
    global_batch=st.sampled_from([64, 128, 192, 320]),
    shuffle=shuffling,
    method=st.sampled_from(['per_stream', 'random']),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_batches_are_equal_on_1_to_64_devices_and_after_resume(streams, global_batch, shuffle, method, epoch, data):
    dataset = dataset_without_shards(streams, global_batch, batching_method=method, **shuffle)
    expected = batches(dataset, LAYOUTS[0], epoch=epoch)
    assert len(expected) * global_batch == dataset.epoch_size
    if method == 'per_stream':
        assert not any(mixes_streams(dataset, batch) for batch in expected)
    for layout in LAYOUTS[1:]:
        assert batches(dataset, layout, epoch=epoch) == expected
    for layout in data.draw(st.lists(st.sampled_from(LAYOUTS), max_size=3)):
        done = data.draw(st.integers(0, len(expected)))
        dataset.initial_physical_nodes = data.draw(st.sampled_from(LAYOUTS)).nodes
        assert batches(dataset, layout, epoch=epoch, skipped=done) == expected[done:]


@settings(max_examples=30, deadline=None)
@given(
    streams=weighted_streams(), batch=st.integers(1, 200), shuffle=shuffling, workers=st.integers(1, 3), data=st.data()
)
def test_batches_are_equal_on_any_device_count_that_divides_batch(streams, batch, shuffle, workers, data):
    ranks = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    rows = data.draw(st.sampled_from([None, *(n for n in range(1, batch + 1) if batch % n == 0)]))
    dataset = dataset_without_shards(streams, batch, num_canonical_nodes=rows, **shuffle)
    canonical = dataset.num_canonical_nodes or 0
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and not nodes_problem(canonical, n)]
    nodes = data.draw(st.sampled_from(fitting))
    assert batches(dataset, Layout(nodes, ranks // nodes, workers)) == batches(dataset, Layout(1, 1))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(shard_sizes, min_size=1, max_size=3), global_batch=st.sampled_from([8, 48, 64]), shuffle=shuffling
)
def test_epoch_has_no_repeats_and_omits_less_than_one_batch_per_stream(sizes, global_batch, shuffle):
    dataset = dataset_without_shards([(stream(), shards) for shards in sizes], global_batch, **shuffle)
    served = Counter(index % dataset.num_samples for batch in batches(dataset, LAYOUTS[0]) for index in batch)
    by_stream = Counter(dataset.bucket_of(index).name for index in served)
    for bucket, shards in zip(dataset.buckets, sizes, strict=True):
        if sum(shards) >= global_batch:
            assert by_stream[bucket.name] == sum(shards) // global_batch * global_batch
        else:
            assert by_stream[bucket.name] == sum(shards), 'all samples, some more than once'


@pytest.mark.parametrize('shuffle', [True, False])
def test_samples_omitted_from_one_epoch_appear_in_another(shuffle):
    dataset = dataset_without_shards([(stream(), [100, 60, 31])], 64, shuffle=shuffle)
    epochs = [{i for batch in batches(dataset, LAYOUTS[0], epoch=e) for i in batch} for e in range(30)]
    assert {len(epoch) for epoch in epochs} == {128}
    assert len(set.union(*epochs)) == 191


def test_single_stream_has_same_order_with_both_batching_methods():
    one, other = (
        dataset_without_shards([(stream(), [100, 60, 31])], 32, batching_method=method)
        for method in ('per_stream', 'random')
    )
    assert batches(one, LAYOUTS[5]) == batches(other, LAYOUTS[5])


def test_epochs_and_batches_are_shuffled():
    dataset = dataset_without_shards([(stream(), [250, 250])], 50)
    first, second = batches(dataset, LAYOUTS[0]), batches(dataset, LAYOUTS[0], epoch=1)
    assert first != second
    # About one in ten pairs of samples in the same batch shares a batch in the next epoch too.
    pairs_kept = sum(math.comb(len(set(a) & set(b)), 2) for a in first for b in second) / (10 * math.comb(50, 2))
    assert pairs_kept == pytest.approx(0.1, abs=0.03)


def test_samples_per_epoch_are_rounded_to_whole_batches_and_logged(caplog):
    with caplog.at_level(logging.INFO):
        streams = [(stream(repeat=1.5), [100]), (stream(), [70]), (stream(), [5])]
        dataset = dataset_without_shards(streams, 32)
    assert [stream.choose for stream in dataset.streams] == [128, 64, 32]
    assert (dataset.epoch_size, dataset.length) == (224, 224)
    assert sum(stream.proportion for stream in dataset.streams) == pytest.approx(1)
    copies = 'each with its own crop, caption, timestep and noise'
    assert caplog.messages[:5] == [
        'streams.s0: 128 samples (4 batches) per epoch; drops 0 of 100 samples per epoch',
        f'streams.s0: 1.28 copies of each sample per epoch, {copies}',
        'streams.s1: 64 samples (2 batches) per epoch; drops 6 of 70 samples per epoch',
        'streams.s2: 32 samples (1 batches) per epoch; drops 0 of 5 samples per epoch',
        f'streams.s2: its 5 samples do not fill a global batch of 32; a batch will hold copies of a sample, {copies}',
    ]


def test_warns_if_whole_batches_change_proportion(caplog):
    dataset = dataset_without_shards([(stream(proportion=0.95), [1000]), (stream(proportion=0.05), [1000])], 100)
    assert [stream.choose for stream in dataset.streams] == [1900, 100]
    assert 'in whole batches' not in caplog.text
    dataset_without_shards([(stream(proportion=0.95), [1000]), (stream(proportion=0.07), [1000])], 100)
    assert 'streams.s1: 0.0686 of an epoch requested, 0.0500 in whole batches; raise loader' in caplog.text


def test_large_epochs_use_coarser_sampling_granularity():
    """One by one, Streaming's loop takes 11 s for ten million samples, on every node and in every epoch."""
    assert dataset_without_shards([(stream(), [2**20])], 96).sampling_granularity == 1
    assert dataset_without_shards([(stream(), [2**20] * 3)], 96).sampling_granularity == 3


def test_unsuitable_node_count_error_suggests_canonical_nodes():
    message = r'num_canonical_nodes: 64 cannot be split evenly over 3 nodes; use 192 from the start'
    with pytest.raises(ValueError, match=message):
        dataset_without_shards([(stream(), [4000])], 1536, layout=Layout(3, 8), num_canonical_nodes=64)
    dataset = dataset_without_shards([(stream(), [4000])], 1536, layout=Layout(3, 8))
    assert dataset.num_canonical_nodes == 192, 'the default'
    assert batches(dataset, Layout(3, 8)) == batches(dataset, Layout(1, 8)) == batches(dataset, Layout(2, 32))


@pytest.mark.parametrize(
    ('amount', 'settings', 'message'),
    [
        ({'choose': 100}, {}, 'streams.s0.choose: 100 is not a multiple of the global batch of 64; use 64 or 128'),
        ({'choose': 5}, {}, 'streams.s0.choose: 5 is not a multiple of the global batch of 64; use 64'),
        ({}, {'num_canonical_nodes': 24}, 'num_canonical_nodes: 24 does not divide the .* of 64, .*; use 16 or 32, or'),
        ({}, {'batching_method': 'stratified'}, 'batching_method: stratified makes batches that depend on the number'),
    ],
)
def test_device_dependent_settings_are_rejected(amount, settings, message):
    with pytest.raises(ValueError, match=message):
        dataset_without_shards([(stream(**amount), [300])], 64, **settings)


def test_real_loader_serves_simulated_batches(write_recipe, pictures):
    """40 and 24 images in batches of 16: an epoch drops 8 of each."""
    loader = build_loader(load(write_recipe(streams=streams_of(pictures), global_batch=16)))
    served = [sorted(batch[batch_keys.SAMPLE_ID].tolist()) for batch in loader]
    assert len(loader) == len(served) == 3
    for layout in (Layout(1, 1), Layout(2, 8), Layout(4, 4, workers=2)):
        assert batches(loader.dataset, layout) == served


def test_resume_keeps_order_of_recipe_not_checkpoint_and_past_the_end_starts_next_epoch(write_recipe, pictures):
    """If the data may change, a resumed run continues at its batch, in the order of the recipe."""
    state = {'epoch': 0, 'num_canonical_nodes': 64, 'shuffle_seed': 3, 'initial_physical_nodes': 1}
    recipe = load(write_recipe(global_batch=16, streams={'a': {'local': str(pictures[32]), 'resolution': 32}}))
    loader = build_loader(recipe)
    uninterrupted = [batches(loader.dataset, Layout(1, 1), epoch=epoch) for epoch in (0, 1)]
    loader.load_state_dict(state | {'sample_in_epoch': 24})
    for expected, first in ((uninterrupted[0][1:], 1), (uninterrupted[1], 0)):
        served = list(loader)
        assert [sorted(batch[batch_keys.SAMPLE_ID].tolist()) for batch in served] == expected
        numbers = [batch[batch_keys.BATCH_INDEX].unique().tolist() for batch in served]
        assert numbers == [[first + i] for i in range(len(expected))]
    loader = build_loader(recipe)
    loader.load_state_dict(state | {'sample_in_epoch': 480})
    assert [len(list(loader)) for _ in range(2)] == [0, 2]
