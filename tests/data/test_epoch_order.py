"""Order of an epoch: each sample once in an evaluation, own draws of copies, and its position in checkpoints."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Callback
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import read_losses
from shards import streams_of, write_image_shards

from diffusion.config.load import load
from diffusion.data.epoch_order import NO_SAMPLE, evaluation_order, numbered_ids
from diffusion.errors import DataError
from diffusion.models import batch_keys
from diffusion.training.components import build_loader, build_model
from diffusion.training.train import build_trainer, train

IMAGES, BATCH = 8, 32
CROPS = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.5, 'flip': True}


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

    # A DataLoader takes a batch from each worker in turn.
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


def test_loader_serves_the_rest_of_each_stream_in_a_short_batch(write_recipe, pictures):
    recipe = load(write_recipe(global_batch=16, eval_streams=streams_of(pictures), loader={'num_workers': 0}))
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
    """Read 40, 24 and 1 images, in batches of 3 or 4 per rank: some ranks have nothing of the last."""
    folders = {**pictures, 'single': write_image_shards(tmp_path / 'single', count=1, side=32)}
    streams = {str(name): {'local': str(folder), 'resolution': 32} for name, folder in folders.items()}
    streams['64']['resolution'] = 64
    path = write_recipe(eval_streams=streams, global_batch=12, device_train_microbatch_size=4)
    train(load(path, ['trainer.max_duration=1ba', 'trainer.save_interval=1ba'])).close()
    losses = []
    for count, size in ((1, 4), (2, 3), (3, 4)):
        ranks.run(count, path, 'task=evaluate', f'device_train_microbatch_size={size}')
        losses.append(json.loads((tmp_path / 'runs/run/evaluations/ba1.json').read_text())['losses'])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)


@pytest.fixture(scope='module')
def few(tmp_path_factory, many_datasets):
    return write_image_shards(tmp_path_factory.mktemp('few') / '64px', count=IMAGES, side=64)


@pytest.fixture
def recipe(write_recipe, few):
    """Path of a recipe whose batches of 32 repeat eight images, and whose epochs have two of them."""
    stream = {'local': str(few), 'resolution': 32, 'choose': 2 * BATCH}
    return write_recipe(global_batch=BATCH, streams={'few': stream}, dataset=CROPS)


@given(st.lists(st.integers(0, 9), max_size=40))
def test_numbered_ids_count_earlier_copies(ids):
    counts: Counter[int] = Counter()
    expected = []
    for each in ids:
        expected.append(each + 10 * counts[each])
        counts[each] += 1
    assert numbered_ids(np.array(ids, np.int64), 10).tolist() == expected


def test_copies_of_a_sample_are_numbered_and_have_crops_and_captions_of_their_own(recipe):
    batches = list(build_loader(load(recipe)))
    ids, occurrences, images, tokens = (
        torch.cat([batch[key] for batch in batches])
        for key in (batch_keys.SAMPLE_ID, batch_keys.OCCURRENCE, batch_keys.IMAGE, batch_keys.INPUT_IDS)
    )
    for sample in range(IMAGES):
        copies = ids == sample
        assert sorted(occurrences[copies].tolist()) == list(range(8))
        assert len({image.numpy().tobytes() for image in images[copies]}) > 5, 'crops; a few may round to one'
        assert len({text.numpy().tobytes() for text in tokens[copies]}) == 2, 'captions'


def test_two_copies_in_a_batch_never_share_noise_or_timestep(recipe):
    model: Any = build_model(load(recipe))
    for batch in build_loader(load(recipe)):
        outputs = model(batch)
        noise = {row.numpy().tobytes() for row in outputs.target}
        assert len(noise) == BATCH
        draws = model.draws_of(batch)
        words = {(int(a), int(b)) for a, b in zip(draws.sample_id, draws.epoch, strict=True)}
        assert len(words) == BATCH


@pytest.mark.slow
def test_run_with_copies_is_the_same_after_a_resume(recipe, tmp_path):
    words = ['trainer.max_duration=2ep', 'trainer.save_interval=2ba', 'global_batch=12', 'streams.few.choose=24']
    train(load(recipe, [*words, 'name=one'])).close()
    train(load(recipe, [*words, 'name=parts', 'trainer.max_duration=1ba'])).close()
    train(load(recipe, [*words, 'name=parts'])).close()
    assert read_losses(tmp_path / 'runs' / 'parts') == read_losses(tmp_path / 'runs' / 'one')


SHORT = ['global_batch=4', 'streams.small.choose=12']


def test_run_extended_by_an_epoch_trains_on_the_next_one(write_recipe, tmp_path):
    path = write_recipe()
    for name, duration in (('whole', '2ep'), ('run', '1ep'), ('run', '2ep')):
        words = [f'name={name}', f'trainer.max_duration={duration}', 'trainer.save_interval=1ep']
        train(load(path, [*SHORT, *words])).close()
    assert read_losses(tmp_path / 'runs' / 'run') == read_losses(tmp_path / 'runs' / 'whole')


@pytest.mark.slow
def test_second_fit_continues_within_the_epoch_and_with_a_new_loader(write_recipe, tmp_path):
    path, words = write_recipe(), [*SHORT, 'trainer.max_duration=2ep', 'trainer.save_interval=2ep']
    train(load(path, [*words, 'name=whole'])).close()
    trainer = build_trainer(load(path, words))
    trainer.fit(duration='1ba')
    trainer.fit(duration='1ba')
    trainer.fit(train_dataloader=build_loader(load(path, [*SHORT, 'name=other'])), duration='4ba')
    trainer.close()
    assert read_losses(tmp_path / 'runs' / 'run') == read_losses(tmp_path / 'runs' / 'whole')


def test_no_checkpoint_is_written_while_data_and_run_disagree(write_recipe, tmp_path):
    trainer = build_trainer(load(write_recipe(), ['trainer.save_interval=1ba']))

    class Iterate(Callback):
        def batch_end(self, state: Any, logger):
            if state.timestamp.batch.value == 2:
                state.train_dataloader.dataset.next_epoch += 1

    trainer.state.callbacks.insert(0, Iterate())
    with pytest.raises(DataError, match='the run is in epoch 0, but its training data is in epoch 1'):
        trainer.fit()
    trainer.close()
    assert not (tmp_path / 'runs' / 'run' / 'ba2').exists()
    assert (tmp_path / 'runs' / 'run' / 'ba1').exists()
