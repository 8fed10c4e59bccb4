"""TREAD against the blocks of diffusers: which tokens skip which blocks, and the loss and gradients that follow."""

import itertools
from types import SimpleNamespace
from typing import Any

import model_batches
import pytest
import torch
from composer import Trainer
from composer.core import Event
from torch.utils.data import DataLoader

from diffusion.algorithms.tread import TREAD
from diffusion.config import registry
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.cost_counting import build_empty
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import Purpose
from diffusion.models.token_routing import Route

START, END, DEPTH = 1, 3, 4


@pytest.fixture(scope='module')
def make_prx(small_vae):
    """Function that builds a PRX of 4 blocks, with gates that are not zero, so that every block has an effect."""

    def make(**settings: Any) -> LatentDiffusion:
        torch.manual_seed(0)
        sizes = {'hidden_size': 32, 'num_heads': 2, 'depth': DEPTH, 'text_width': 32, 'text_layers': 1}
        model = tiny_prx(vae=str(small_vae), **{**sizes, 'patch_size': 1, **settings})  # type: ignore[arg-type]
        for parameter in model.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return model

    return make


@pytest.fixture(scope='module')
def shared_prx(make_prx) -> LatentDiffusion:
    """PRX without a route, which no test changes."""
    return make_prx()


def batch_of(model: LatentDiffusion, *, ids: range = range(10, 14)) -> dict[str, torch.Tensor]:
    captions = [f'image number {i}' for i in range(64)]
    return {name: rows[list(ids)] for name, rows in model_batches.batch_of(model, captions, first_id=0).items()}


def reference_loss(model: LatentDiffusion, batch: dict[str, torch.Tensor], fraction: float) -> torch.Tensor:
    """Return the loss of a flow with a PRX of one-cell patches, one sample at a time, by the blocks of diffusers."""
    draws, prx = model.draws_of(batch), model.denoiser
    latents = model.latents_of(batch, draws)
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    times = model.objective.time_of(draws.uniform(Purpose.TIMESTEP)).float()
    count = latents.shape[2] * latents.shape[3]
    words = draws.words(Purpose.ROUTING, count)
    losses = []
    for i in range(len(latents)):
        noisy = (1 - times[i]) * latents[i] + times[i] * noise[i]
        ids = batch[batch_keys.INPUT_IDS][i : i + 1]
        mask = model.text.padding_mask(ids)
        text = prx.txt_in(model.text(ids).embeds)
        image = prx.img_in(noisy.flatten(1).T[None])
        frequencies = 1000 * times[i] * torch.exp(-torch.arange(128) / 128 * torch.log(torch.tensor(10000.0)))
        time = prx.time_in(torch.cat([frequencies.cos(), frequencies.sin()])[None])
        grid = torch.cartesian_prod(torch.arange(latents.shape[2]), torch.arange(latents.shape[3]))
        rope = prx.pe_embedder(grid[None])
        smallest = words[i].tolist()
        kept = sorted(sorted(range(count), key=lambda token: smallest[token])[: count - round(fraction * count)])
        for number, block in enumerate(prx.blocks):
            used = kept if START <= number < END else list(range(count))
            result = block(image[:, used], text, time, rope[:, :, used], mask)
            rows = dict(zip(used, result[0], strict=True))
            image = torch.stack([rows.get(token, image[0, token]) for token in range(count)])[None]
        predicted = prx.final_layer(image, time)[0].T.view_as(noisy)
        losses.append((predicted - (noise[i] - latents[i])).square().mean())
    return torch.stack(losses)


def gradients(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    found = {name: each.grad for name, each in model.denoiser.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize('checkpointing', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loss_and_gradients_equal_those_of_blocks_with_the_kept_tokens(make_prx, checkpointing):
    model = make_prx(caption_dropout=0.0)
    batch = batch_of(model)
    expected = reference_loss(model, batch, 0.5)
    expected.mean().backward()
    expected_gradients = gradients(model)
    router = model.route_tokens(Route(START, END, 0.5))
    if checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    with router.routing(model.draws_of(batch)):
        loss = model.loss(model(batch), batch)
        loss.backward()
    torch.testing.assert_close(model.sample_losses, expected.detach(), rtol=1e-5, atol=1e-6)
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-6, msg=name)


def test_a_samples_tokens_do_not_depend_on_its_batch(shared_prx):
    model = shared_prx
    route = Route(START, END, 0.3)
    together = route.kept(model.draws_of(batch_of(model, ids=range(8))), 64)
    apart = [route.kept(model.draws_of(batch_of(model, ids=range(i, i + 2))), 64) for i in range(0, 8, 2)]
    assert torch.equal(together, torch.cat(apart))
    assert together.shape == (8, 64 - 19)
    assert all((row[1:] > row[:-1]).all() for row in together)
    counts = torch.bincount(route.kept(model.draws_of(batch_of(model, ids=range(60))), 64).flatten(), minlength=64)
    assert 20 < counts.min() <= counts.max() < 60, 'every token is removed from some samples'
    other = {**batch_of(model, ids=range(8)), batch_keys.BATCH_INDEX: torch.full((8,), 8)}
    assert not torch.equal(together, route.kept(model.draws_of(other), 64)), 'another batch, other tokens'
    least = [Route(START, END, 0.999).tokens(count) for count in (64, 1000, 1001, 10_000)]
    assert least == [1, 1, 1, 10], 'at least one is kept'


def test_evaluation_and_sampling_use_all_tokens(make_prx):
    model = make_prx()
    batch = batch_of(model)
    plain = model.eval_forward(batch), model.generate(['a cat'], num_inference_steps=2, size=(64, 64))
    router = model.route_tokens(Route(START, END, 0.5))
    with router.routing(model.draws_of(batch)):
        routed = model.eval_forward(batch), model.generate(['a cat'], num_inference_steps=2, size=(64, 64))
    assert all(torch.equal(one, other) for one, other in zip(plain, routed, strict=True))
    with torch.no_grad(), router.routing(model.draws_of(batch)):
        model(batch)
    assert router.kept is None


def test_flops_count_the_tokens_that_blocks_see(make_prx):
    model = make_prx()
    batch = batch_of(model)
    before = model.flops_per_batch(batch)
    model.route_tokens(Route(START, END, 0.5))
    block: Any = model.denoiser.blocks[0]
    linears = block.attention.img_qkv_proj, block.attention.to_out[0], block.gate_proj, block.up_proj, block.down_proj
    blocks = 3 * 4 * sum(each.weight.numel() * 2 * 64 for each in linears)
    saved = before - model.flops_per_batch(batch)
    attention_flops = 3 * 4 * 2 * 2 * 32 * (64 * (64 + 16) - 32 * (32 + 16))
    assert saved == (END - START) * (blocks / 2 + attention_flops)


def test_algorithm_routes_training_batches_only(make_prx):
    """A real Trainer with microbatches and evaluation: tokens of the batch, and none left after the backward pass."""
    model = make_prx()
    batch = batch_of(model, ids=range(8))
    samples = [{key: values[i] for key, values in batch.items()} for i in range(8)]
    seen: list[int] = []
    note = lambda module, args, kwargs: seen.append(kwargs['hidden_states'].shape[1])  # noqa: E731
    model.denoiser.blocks[START].attention.register_forward_pre_hook(note, with_kwargs=True)
    trainer = Trainer(
        model=model,
        algorithms=TREAD(start=START, end=END),
        train_dataloader=DataLoader(samples, batch_size=4),  # type: ignore[arg-type]
        eval_dataloader=DataLoader(samples[:4], batch_size=4),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3),
        max_duration='2ba',
        eval_interval='1ba',
        device='cpu',
        device_train_microbatch_size=2,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    runs = [(tokens, len(list(group))) for tokens, group in itertools.groupby(seen)]
    assert runs == [(32, 2), (64, 8), (32, 2), (64, 8)]
    assert model.router is not None and model.router.kept is None


def test_a_unet_has_no_tokens(make_model, write_recipe):
    with pytest.raises(UserError, match='tread: a UNet2DConditionModel has no image tokens'):
        TREAD().apply(Event.INIT, SimpleNamespace(model=make_model()), None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r'algorithms\.tread: the model tiny has no image tokens'):
        load(write_recipe(algorithms={'tread': None}))


@pytest.mark.parametrize(
    ('settings', 'problem'),
    [
        ({'end': 5}, r'tread.end: no tokens can skip the blocks 2 to 4 of 4; use start < end <= 4'),
        ({'start': 3, 'end': 3}, r'tread.end: no tokens'),
        ({}, r'tread.end: no tokens can skip the blocks 2 to 0 of 4; .* such as start: 2, end: 3'),
        ({'start': -1}, r'tread.start: -1 is negative'),
        ({'fraction': 1.0}, r'tread.fraction: 1.0 is not a fraction in \(0, 1\)'),
    ],
)
def test_impossible_routes_are_refused(shared_prx, write_recipe, settings, problem):
    with pytest.raises(UserError, match=problem):
        TREAD(**settings).apply(Event.INIT, SimpleNamespace(model=shared_prx), None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=problem):
        load(write_recipe(model={'name': 'tiny_prx', 'depth': 4}, algorithms={'tread': settings or None}))


QUICK = ['tiny', 'tiny_prx']
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in registry.names('model') if name not in QUICK]


@pytest.mark.parametrize('name', [*QUICK, *OTHERS])
def test_check_without_torch_agrees_with_the_models(name, write_recipe):
    """A model that is added without tokens must declare the trait `u_net`."""
    parameters = registry.signature('model', name).names()
    without_weights = {'pretrained': None} if 'pretrained' in parameters else {}
    model = build_empty(name, without_weights)
    has_tokens = isinstance(model, LatentDiffusion) and model.adapter.token_blocks is not None
    keywords = {'tread': {'start': 2, 'end': 3}}
    recipe = write_recipe(model={'name': name, **without_weights}, algorithms=keywords)
    if has_tokens:
        assert load(recipe).algorithms['tread'].name == 'tread'
        return
    with pytest.raises(UserError, match=f'the model {name} has no image tokens'):
        load(recipe)
