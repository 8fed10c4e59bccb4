"""Samples that an epoch serves more than once: each copy has its own draws, on any ranks and after a resume."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import read_losses
from shards import write_image_shards

from diffusion.config.load import load
from diffusion.data.epoch_order import numbered_ids
from diffusion.models import batch_keys
from diffusion.training.components import build_loader, build_model
from diffusion.training.train import train

IMAGES, BATCH = 8, 32
CROPS = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.5, 'flip': True}


@pytest.fixture(scope='module')
def few(tmp_path_factory, many_datasets):
    """Folder of eight images."""
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


def gradient(model, batch) -> torch.Tensor:
    """Return the gradient of a batch's loss in all trained weights, as one vector."""
    model.zero_grad()
    model.loss(model(batch), batch).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).double()


def variance(gradients: list[torch.Tensor]) -> float:
    return float(torch.stack(gradients).var(dim=0).sum())


@pytest.mark.cpu_seconds(10)
def test_variance_of_the_batch_gradient_equals_that_of_fresh_noise(recipe):
    """Compared with draws that have nothing in common, and with copies that share their draws."""
    settings = load(recipe, ['model.caption_dropout=0.0'])
    model, loader = build_model(settings), build_loader(settings)
    numbers = itertools.count(1000)
    ours, fresh, shared = [], [], []
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 24):
        # The images and captions of the batch stay, so that only noise and timesteps differ.
        ours.append(gradient(model, batch))
        ids = torch.tensor([next(numbers) for _ in range(BATCH)])
        fresh.append(gradient(model, batch | {batch_keys.SAMPLE_ID: ids}))
        shared.append(gradient(model, batch | {batch_keys.OCCURRENCE: torch.zeros_like(ids)}))
    assert variance(ours) / variance(fresh) == pytest.approx(1, abs=0.25)
    assert variance(shared) / variance(fresh) > 2


@pytest.mark.cpu_seconds(25)
def test_run_with_copies_is_the_same_on_two_ranks_and_after_a_resume(recipe, ranks, tmp_path):
    words = ['trainer.max_duration=2ep', 'trainer.save_interval=1ba']
    train(load(recipe, [*words, 'name=one'])).close()
    train(load(recipe, [*words, 'name=parts', 'trainer.max_duration=1ba'])).close()
    train(load(recipe, [*words, 'name=parts'])).close()
    ranks.run(2, recipe, *words, 'name=two')
    one, parts, two = (read_losses(tmp_path / 'runs' / name) for name in ('one', 'parts', 'two'))
    assert parts == one
    assert [*two.values()] == pytest.approx([*one.values()], rel=1e-4)
