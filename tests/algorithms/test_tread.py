"""TREAD against the blocks of diffusers: which tokens skip which blocks, and the loss and gradients that follow."""

import itertools
from types import SimpleNamespace
from typing import Any

import model_batches
import pytest
import torch
from composer.core import Event
from torch.utils.data import DataLoader

from diffusion.algorithms.tread import TREAD
from diffusion.config import registry
from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.cost_counting import build_empty
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import Draws, Purpose
from diffusion.models.sampler import inference_scheduler
from diffusion.models.token_routing import Route, Sprint, TokenFusion
from diffusion.tasks.export import write_folder

START, END, DEPTH = 1, 3, 4
CAPTIONS = ['a cat', 'a dog in the rain']


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


def reference_prediction(model: LatentDiffusion, noisy: Any, time: Any, ids: Any, kept: list[int]) -> torch.Tensor:
    """Return the prediction for one sample [C, H, W] by a PRX of one-cell patches, by the blocks of diffusers.

    Blocks of the route only see the `kept` tokens. If the PRX has a fusion layer, it is applied as by SPRINT.
    """
    prx, count = model.denoiser, noisy[0].numel()
    mask = model.text.padding_mask(ids)
    text = prx.txt_in(model.text(ids).embeds)
    dense = image = prx.img_in(noisy.flatten(1).T[None])
    frequencies = 1000 * time * torch.exp(-torch.arange(128) / 128 * torch.log(torch.tensor(10000.0)))
    embedded = prx.time_in(torch.cat([frequencies.cos(), frequencies.sin()])[None])
    grid = torch.cartesian_prod(torch.arange(noisy.shape[1]), torch.arange(noisy.shape[2]))
    rope = prx.pe_embedder(grid[None])
    for number, block in enumerate(prx.blocks):
        if number == START:
            dense = image
        used = kept if START <= number < END else list(range(count))
        result = block(image[:, used], text, embedded, rope[:, :, used], mask)
        rows = dict(zip(used, result[0], strict=True))
        image = torch.stack([rows.get(token, image[0, token]) for token in range(count)])[None]
        if number == END - 1 and hasattr(prx, 'token_fusion'):
            weight, bias = prx.token_fusion.linear.weight, prx.token_fusion.linear.bias
            sparse = [image[0, token] if token in kept else prx.token_fusion.mask_token for token in range(count)]
            image = (dense[0] @ weight[:, :32].T + torch.stack(sparse) @ weight[:, 32:].T + bias)[None]
    return prx.final_layer(image, embedded)[0].T.view_as(noisy)


def smallest(words: torch.Tensor, fraction: float) -> list[int]:
    """Return the tokens that are kept: those with the smallest random words."""
    order = sorted(range(len(words)), key=lambda token: int(words[token]))
    return sorted(order[: len(words) - round(fraction * len(words))])


def reference_loss(model: LatentDiffusion, batch: dict[str, torch.Tensor], fraction: float) -> torch.Tensor:
    """Return the loss of a flow with a PRX of one-cell patches, one sample at a time, by the blocks of diffusers."""
    draws = model.draws_of(batch)
    latents = model.latents_of(batch, draws)
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    times = model.objective.time_of(draws.uniform(Purpose.TIMESTEP)).float()
    words = draws.words(Purpose.ROUTING, latents.shape[2] * latents.shape[3])
    losses = []
    for i in range(len(latents)):
        noisy = (1 - times[i]) * latents[i] + times[i] * noise[i]
        ids, kept = batch[batch_keys.INPUT_IDS][i : i + 1], smallest(words[i], fraction)
        predicted = reference_prediction(model, noisy, times[i], ids, kept)
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


def test_sprint_samples_with_all_tokens_and_the_fusion_layer(make_prx, write_recipe, tmp_path):
    assert Sprint(1).route(DEPTH) == Route(1, DEPTH - 2, 0.75), 'the last two blocks see all tokens'
    model, full = (make_prx(sprint=Sprint(START, END, fraction)) for fraction in (0.75, 0.0))
    full.load_state_dict(model.state_dict())
    batch = batch_of(model)
    model(batch)  # training has routed tokens before
    assert torch.equal(model.eval_forward(batch), full.eval_forward(batch))
    images = [each.generate(['a cat'], num_inference_steps=2, size=(64, 64)) for each in (model, full)]
    assert torch.equal(*images)
    with torch.no_grad():
        model.denoiser.token_fusion.linear.bias.add_(1)
    assert not torch.equal(model.eval_forward(batch), full.eval_forward(batch))
    with pytest.raises(UserError, match='export: trained with model.sprint, whose fusion layer .* draw with task=gen'):
        write_folder(model, load(write_recipe()), tmp_path, torch.float32, lora=False)


def test_sprint_refuses_what_does_not_fit(make_prx, write_recipe):
    with pytest.raises(UserError, match='sprint.end: no tokens can skip the blocks 2 to 8 of 4'):
        make_prx(sprint=Sprint(2, 9))
    with pytest.raises(UserError, match='algorithms.tread: model.sprint routes tokens too; remove one of the two'):
        make_prx(sprint=Sprint(START, END)).route_tokens(Route(START, END, 0.5))
    grid = {'image_grid': {'prompts': ['a cat'], 'sparse_guidance': True}}
    sections = {'callbacks': grid, 'generate': {'sparse_guidance': True, 'guidance_scale': 2.0}}
    recipe = load(write_recipe(model={'name': 'tiny_prx', 'sprint': {}}, **sections))
    assert recipe.generate.guidance == recipe.callbacks['image_grid'].kwargs['guidance'] == {'name': 'sparse'}


@pytest.mark.parametrize(
    ('fraction', 'checkpointing'), [(0.75, False), (0.75, True), pytest.param(0.0, True, marks=pytest.mark.slow)]
)
def test_sprint_equals_blocks_with_the_kept_tokens_and_a_fusion_layer(make_prx, fraction, checkpointing):
    model = make_prx(caption_dropout=0.0, sprint=Sprint(START, END, fraction))
    batch = batch_of(model)
    plain = make_prx(caption_dropout=0.0)  # its blocks have no hooks
    plain.denoiser.token_fusion = TokenFusion(32)
    plain.load_state_dict(model.state_dict())
    expected = reference_loss(plain, batch, fraction)
    expected.mean().backward()
    expected_gradients = gradients(plain)
    if checkpointing:
        model.denoiser.enable_gradient_checkpointing()
    model(batch_of(model, ids=range(20, 24)))  # the next batch gets tokens of its own
    loss = model.loss(model(batch), batch)
    loss.backward()
    torch.testing.assert_close(model.sample_losses, expected.detach(), rtol=1e-5, atol=1e-6)
    found = gradients(model)
    expected_gradients.setdefault('token_fusion.mask_token', torch.zeros(32))  # no token is dropped
    assert found.keys() == expected_gradients.keys()
    for name, gradient in found.items():
        difference = (gradient - expected_gradients[name]).norm()
        assert difference <= 1e-4 * expected_gradients[name].norm(), name


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


@torch.no_grad()
def test_sparse_guidance_equals_eulers_method_with_routed_predictions(make_prx):
    plain = make_prx()
    model = make_prx()
    sparse = {'name': 'sparse'}
    with pytest.raises(UserError, match='guidance: sparse needs a model with algorithms.tread or model.sprint'):
        model.generate(['a'], guidance=sparse)
    model.route_tokens(Route(START, END, 0.5))
    with pytest.raises(UserError, match='negative_prompt: this guidance has no unconditional prediction'):
        model.generate(['a'], guidance=sparse, negative_prompt='b')
    start = torch.randn(2, *model.latent_grid.shape((64, 64)), generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {'num_inference_steps': 3, 'guidance_scale': 2.5, 'noise_scheduler': 'euler'}
    found = model.generate(CAPTIONS, latents=start, seeds=[7, 8], guidance=sparse, **settings)
    scheduler = inference_scheduler('euler', plain.objective)
    scheduler.set_timesteps(3)
    latents, count, zero = start.clone(), start[0, 0].numel(), torch.zeros(2, dtype=torch.int64)
    for step, (now, after) in enumerate(itertools.pairwise(scheduler.sigmas.tolist())):
        words = Draws(0, torch.tensor([7, 8]), zero, zero + step).words(Purpose.ROUTING, count)
        for i in range(2):
            ids = plain._tokens(CAPTIONS[i : i + 1])
            keeps = list(range(count)), smallest(words[i], 0.5)
            strong, weak = (reference_prediction(plain, latents[i], now, ids, kept) for kept in keeps)
            latents[i] += (after - now) * (weak + 2.5 * (strong - weak))
    torch.testing.assert_close(found, plain.decode(latents), rtol=1e-4, atol=1e-4)
    assert found.std() > 0.05, 'the images are not saturated'
    unrouted = model.generate(CAPTIONS, latents=start, **settings | {'guidance_scale': 1.0}, guidance=sparse)
    assert torch.equal(unrouted, plain.generate(CAPTIONS, latents=start, **settings | {'guidance_scale': 1.0}))


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
    fused = make_prx(sprint=Sprint(START, END, 0.5)).flops_per_batch(batch)
    assert fused == before - saved + 3 * 4 * (2 * 64 * 64 * 32)


def test_algorithm_routes_training_batches_only(make_prx, caplog):
    """A real Trainer with microbatches and evaluation: tokens of the batch, and none left after the backward pass."""
    caplog.set_level('INFO')
    model = make_prx()
    batch = batch_of(model, ids=range(8))
    seen: list[int] = []
    note = lambda module, args, kwargs: seen.append(kwargs['hidden_states'].shape[1])  # noqa: E731
    model.denoiser.blocks[START].attention.register_forward_pre_hook(note, with_kwargs=True)
    samples: Any = [{key: values[i] for key, values in batch.items()} for i in range(4)]
    evaluation = {'eval_dataloader': DataLoader(samples, batch_size=4), 'eval_interval': '1ba'}
    settings = {'algorithms': TREAD(start=START, end=END), 'max_duration': '2ba', 'device_train_microbatch_size': 2}
    model_batches.fit(model, batch, **settings, **evaluation)
    runs = [(tokens, len(list(group))) for tokens, group in itertools.groupby(seen)]
    assert runs == [(32, 2), (64, 8), (32, 2), (64, 8)]
    assert 'tread: 50% of the image tokens skip blocks 1 to 2' in caplog.text
    assert model.router is not None and model.router.kept is None


def test_models_that_the_route_does_not_fit_are_refused(shared_prx, make_model):
    for model, problem in (
        (shared_prx, r'tread.end: no tokens can skip the blocks 2 to 0 of 4; .* such as start: 2, end: 3'),
        (make_model(), 'tread: a UNet2DConditionModel has no image tokens'),
    ):
        with pytest.raises(UserError, match=problem):
            TREAD().apply(Event.INIT, SimpleNamespace(model=model), None)  # type: ignore[arg-type]


QUICK = ['tiny', 'tiny_prx']
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in registry.names('model') if name not in QUICK]


@pytest.mark.parametrize('name', [*QUICK, *OTHERS])
def test_check_without_torch_agrees_with_the_models(name, write_recipe):
    """A model that is added without tokens must declare the trait `u_net`; one with long skips, `mirrored_depth`."""
    parameters = registry.signature('model', name).names()
    without_weights = {'pretrained': None} if 'pretrained' in parameters else {}
    model = build_empty(name, without_weights)
    blocks = model.adapter.token_blocks if isinstance(model, LatentDiffusion) else None

    def recipe_with(end: int) -> Recipe:
        keywords = {'tread': {'start': 1, 'end': end}}
        return load(write_recipe(model={'name': name, **without_weights}, algorithms=keywords))

    if blocks is None:
        with pytest.raises(UserError, match=f'the model {name} has no image tokens'):
            recipe_with(3)
        return
    assert isinstance(model, LatentDiffusion)
    depth = len(blocks.of(model.denoiser))
    assert recipe_with(depth - 1).algorithms['tread'].name == 'tread'
    if blocks.mirrored:
        problem = rf'algorithms\.tread\.end: .* use start \+ end = {depth}, such as start: 1'
        with pytest.raises(UserError, match=problem):
            recipe_with(depth)
