"""Order of evaluations: every sample once, whatever the number of ranks, workers and streams."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_image_shards

from diffusion.config.load import load
from diffusion.data.epoch_order import NO_SAMPLE, evaluation_order
from diffusion.models import batch_keys
from diffusion.training.components import build_loader


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3))
def test_every_sample_is_counted_once_and_batches_have_one_stream(sizes, ranks, batch_size, workers):
    ends = np.cumsum(sizes)
    samples = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    order = evaluation_order(samples, ranks=ranks, batch_size=batch_size)
    counted = []
    for batch, counts in zip(order.batches, order.counts, strict=True):
        assert len(set(np.searchsorted(ends, batch.flatten(), side='right'))) == 1
        assert counts.max() - counts.min() <= 1, 'ranks share an incomplete batch evenly'
        counted += [sample for rank, count in enumerate(counts) for sample in batch[rank, :count]]
    assert sorted(counted) == list(range(ends[-1]))
    assert len(order.batches) == sum(-(-size // (ranks * batch_size)) for size in sizes)

    # As a DataLoader takes them: a batch from each worker in turn.
    per_worker = order.for_workers(workers)
    for rank in range(ranks):
        queues = [list(queue[queue != NO_SAMPLE]) for queue in per_worker[rank]]
        taken = []
        for turn in range(len(order.batches)):
            queue = queues[turn % workers]
            taken.append(queue[:batch_size])
            del queue[:batch_size]
        assert np.array_equal(taken, order.batches[:, rank])
        assert not any(queues)


@pytest.mark.parametrize('workers', [0, 2])
def test_loader_serves_the_rest_of_each_stream_in_a_short_batch(write_recipe, pictures, workers):
    streams = {f'{side}px': {'local': str(folder), 'resolution': side} for side, folder in pictures.items()}
    recipe = load(write_recipe(global_batch=16, eval_streams=streams, loader={'num_workers': workers}))
    loader = build_loader(recipe, 'eval')
    assert len(loader) == 5
    for _ in range(2):
        batches = list(loader)
        ids = torch.cat([batch[batch_keys.SAMPLE_ID] for batch in batches])
        assert ids.tolist() == list(range(64))
        assert [len(batch[batch_keys.IMAGE]) for batch in batches] == [16, 16, 8, 16, 8]
        assert all(batch[batch_keys.IS_COUNTED].all() for batch in batches)


@pytest.mark.slow
def test_losses_of_several_streams_are_those_of_one_rank_on_more_ranks(tmp_path, write_recipe, pictures, ranks):
    """With 40, 24 and 1 images, in batches of 3 or 4 per rank: some ranks have nothing of the last."""
    folders = {**pictures, 'single': write_image_shards(tmp_path / 'single', count=1, side=32)}
    streams = {
        str(name): {'local': str(folder), 'resolution': 64 if name == 64 else 32} for name, folder in folders.items()
    }
    path = write_recipe(eval_streams=streams, global_batch=12, device_train_microbatch_size=4)
    content = yaml.safe_load(path.read_text())
    content['trainer'] |= {'max_duration': '1ba', 'save_interval': '1ba'}
    path.write_text(yaml.safe_dump(content))
    assert ranks.start(1, path).wait() == [0]
    run = Path(content['runs_dir'], 'run')
    losses = []
    for count, size in ((1, 4), (2, 3), (3, 4)):
        job = ranks.start(count, path, 'task=evaluate', f'device_train_microbatch_size={size}')
        assert job.wait() == [0] * count, job.output()
        losses.append(json.loads((run / 'evaluations' / 'ba1.json').read_text())['losses'])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
