"""Contrastive flow matching against the paper's formula, and the cycle of negatives."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Event
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from diffusion.algorithms import contrastive_flow_matching
from diffusion.algorithms.contrastive_flow_matching import ContrastiveFlowMatching, contrastive_error, negatives_of
from diffusion.config.device_checks import check_devices
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import Denoised
from diffusion.models.objective import Objective
from diffusion.models.randomness import draws_for

FLOW = Objective(path='flow', prediction_type='velocity')


def test_loss_and_gradient_equal_the_papers_formula():
    generator = torch.Generator().manual_seed(0)
    predicted, latents, noise = (torch.randn(5, 4, 2, 3, generator=generator) for _ in range(3))
    predicted.requires_grad_()
    draws = draws_for([3, 1, 4, 15, 9], seed=5)
    outputs = Denoised(predicted, noise - latents, torch.ones(5))
    negatives, exists = negatives_of(outputs.target, draws)
    assert exists.all()
    own = [next(j for j in range(5) if torch.equal(negatives[i], noise[j] - latents[j])) for i in range(5)]
    assert sorted(own) == list(range(5)) and all(i != j for i, j in enumerate(own))
    loss = (predicted - outputs.target).square().mean() - 0.05 * contrastive_error(outputs, negatives, exists)
    loss.backward()
    total, gradient = 0.0, torch.zeros_like(predicted)
    for i, j in enumerate(own):
        parts = predicted.detach()[i], outputs.target[i], outputs.target[j]
        for c, y, x in itertools.product(range(4), range(2), range(3)):
            v, positive, negative = (float(each[c, y, x]) for each in parts)
            total += ((v - positive) ** 2 - 0.05 * (v - negative) ** 2) / 120
            gradient[i, c, y, x] = (2 * (v - positive) - 0.1 * (v - negative)) / 120
    assert loss.item() == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(predicted.grad, gradient)


@pytest.mark.parametrize('count', [2, 3, 64])
def test_negatives_form_one_random_cycle_whatever_the_order_of_the_batch(count):
    ids = torch.arange(count) * 7
    words = torch.randint(2**32, (count,), generator=torch.Generator().manual_seed(count))
    after = contrastive_flow_matching.successors(ids, words)
    visited, place = set(), 0
    while place not in visited:
        visited.add(place)
        place = int(after[place])
    assert len(visited) == count
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    shuffled = contrastive_flow_matching.successors(ids[order], words[order])
    assert torch.equal(ids[after][order], ids[order][shuffled])


@pytest.mark.parametrize('count', [2, 3, 64])
def test_no_negative_is_a_copy_of_its_sample(count):
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(0, max(2, count // 8), (count,), generator=generator)
    ids[0], ids[1] = 0, 1
    words = torch.randperm(count, generator=generator)
    cycle = [int(ids[i]) for i in words.argsort()]
    for i, j in enumerate(contrastive_flow_matching.successors(ids, words).tolist()):
        place = int((words < words[i]).sum())
        expected = next(each for each in cycle[place:] + cycle[:place] if each != ids[i])
        assert ids[j] == expected != ids[i]


def test_batch_of_copies_of_one_sample_has_no_negatives():
    outputs = Denoised(torch.randn(2, 2, 2, 2), torch.randn(2, 2, 2, 2), torch.ones(2))
    negatives, exists = negatives_of(outputs.target, draws_for([7] * 2, seed=5))
    assert not exists.any()
    assert contrastive_error(outputs, negatives, exists) == 0


def samples(model, count: int = 8):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            batch_keys.IMAGE: torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator),
            batch_keys.INPUT_IDS: model._tokens([f'image {i}'])[0],
            batch_keys.SAMPLE_ID: torch.tensor(i),
        }
        for i in range(count)
    ]


def trained_loss(model, *, algorithms=(), batch_size: int = 4, microbatch: int | None = None) -> float:
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        algorithms=list(algorithms),
        train_dataloader=DataLoader(samples(model, batch_size), batch_size=batch_size),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3),
        max_duration='1ba',
        device='cpu',
        device_train_microbatch_size=microbatch,
        loggers=[logger],
        progress_bar=False,
    )
    with contextlib.closing(trainer):
        trainer.fit()
    return float(logger.data['loss/train/total'][0][1])


def test_trainer_subtracts_the_term_from_the_loss(make_model):
    model = make_model(objective=FLOW)
    batch = torch.utils.data.default_collate(samples(model, 4))
    with torch.no_grad():
        outputs = model(batch)
        plain = float(model.loss(outputs, batch))
        term = contrastive_error(outputs, *negatives_of(outputs.target, model.draws_of(batch)))
    with_term = trained_loss(model, algorithms=[ContrastiveFlowMatching(0.2)])
    assert with_term == pytest.approx(plain - 0.2 * float(term), rel=1e-5)
    assert plain - with_term > 0.1


def test_microbatches_and_single_samples_are_refused(make_model):
    for settings, message in (
        ({'microbatch': 2}, "device_train_microbatch_size: .* a device's 4 samples are divided into microbatches of 2"),
        ({'batch_size': 1}, 'a global_batch of 1 has no other sample'),
    ):
        with pytest.raises(UserError, match=message):
            trained_loss(make_model(objective=FLOW), algorithms=[ContrastiveFlowMatching()], **settings)


def test_only_velocities_of_a_flow_have_the_term(make_model, write_recipe):
    algorithms = {'contrastive_flow_matching': {'weight': 0.1}}
    objectives: list[dict[str, Any]] = [{}, {'path': 'flow', 'prediction_type': 'sample'}]
    for objective in objectives:
        own = Objective(**objective)
        state: Any = SimpleNamespace(model=make_model(objective=own))
        with pytest.raises(UserError, match=f'path: {own.path} and prediction_type: {own.prediction_type}'):
            ContrastiveFlowMatching().apply(Event.INIT, state, None)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r'algorithms\.contrastive_flow_matching: needs a flow'):
            load(write_recipe(model={'name': 'tiny', 'objective': objective}, algorithms=algorithms))
    load(write_recipe(model={'name': 'tiny_prx'}, algorithms=algorithms))
    with pytest.raises(UserError, match='no denoiser'):
        load(write_recipe(model={'name': 'autoencoder'}, algorithms=algorithms))
    with pytest.raises(UserError, match=r'contrastive_flow_matching\.weight: 1.0 is not in \(0, 1\)'):
        ContrastiveFlowMatching(1.0)
    with pytest.raises(UserError, match=r'contrastive_flow_matching\.weight: 0 is not in \(0, 1\)'):
        load(write_recipe(model={'name': 'tiny_prx'}, algorithms={'contrastive_flow_matching': {'weight': 0}}))


def test_microbatches_are_refused_where_the_number_of_devices_is_known(write_recipe):
    path = write_recipe(
        small=True, algorithms={'contrastive_flow_matching': None}, global_batch=8, device_train_microbatch_size=2
    )
    recipe = load(path)
    assert not check_devices(recipe, 4)
    (problem,) = check_devices(recipe, 2)
    assert problem.where == 'device_train_microbatch_size' and 'use 4' in problem.what
