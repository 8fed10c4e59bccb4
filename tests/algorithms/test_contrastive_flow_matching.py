"""Contrastive flow matching against the paper's formula, and the cycle of negatives."""

import itertools
from types import SimpleNamespace
from typing import Any

import model_batches
import pytest
import torch
from composer.core import Event

from diffusion.algorithms import contrastive_flow_matching
from diffusion.algorithms.contrastive_flow_matching import ContrastiveFlowMatching, contrastive_error, negatives_of
from diffusion.errors import UserError
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


def batch_of(model, count: int = 4) -> dict[str, torch.Tensor]:
    return model_batches.batch_of(model, [f'image {i}' for i in range(count)], width=32, height=32)


def test_trainer_subtracts_the_term_from_the_loss(make_model):
    model = make_model(objective=FLOW)
    batch = batch_of(model)
    with torch.no_grad():
        outputs = model(batch)
        plain = float(model.loss(outputs, batch))
        term = contrastive_error(outputs, *negatives_of(outputs.target, model.draws_of(batch)))
    logged = model_batches.fit(model, batch, algorithms=[ContrastiveFlowMatching(0.2)])
    with_term = float(logged.data['loss/train/total'][0][1])
    assert with_term == pytest.approx(plain - 0.2 * float(term), rel=1e-5)
    assert plain - with_term > 0.1


def test_microbatches_and_single_samples_are_refused(make_model):
    model = make_model(objective=FLOW)
    for count, microbatch, message in (
        (4, 2, "device_train_microbatch_size: .* a device's 4 samples are divided into microbatches of 2"),
        (1, 1, 'a global_batch of 1 has no other sample'),
    ):
        settings = {'algorithms': [ContrastiveFlowMatching()], 'device_train_microbatch_size': microbatch}
        with pytest.raises(UserError, match=message):
            model_batches.fit(model, batch_of(model, count), **settings)


def test_only_velocities_of_a_flow_have_the_term(make_model):
    for own in (Objective(), Objective(path='flow', prediction_type='sample')):
        state: Any = SimpleNamespace(model=make_model(objective=own))
        with pytest.raises(UserError, match=f'path: {own.path} and prediction_type: {own.prediction_type}'):
            ContrastiveFlowMatching().apply(Event.INIT, state, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match='a SimpleNamespace has no denoiser; remove the algorithm'):
        ContrastiveFlowMatching().apply(Event.INIT, SimpleNamespace(model=state), None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r'contrastive_flow_matching\.weight: 1.0 is not in \(0, 1\)'):
        ContrastiveFlowMatching(1.0)
