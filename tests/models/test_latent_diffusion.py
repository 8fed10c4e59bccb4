"""LatentDiffusion, part by part, against plain PyTorch and diffusers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from model_batches import assert_same_loss_and_gradients, batch_of

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.sdxl.builder import tiny_sdxl
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective, training_timesteps
from diffusion.models.randomness import Draws, Purpose
from diffusion.models.sampler import inference_scheduler, sample_latents
from diffusion.models.text_conditioner import tokenize

FLOW = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', uniform_fraction=0.1)


@pytest.fixture(scope='module')
def shared_model(make_model) -> Any:
    """Model of the tests that do not change its weights or settings."""
    return make_model()


def draws_of(model: LatentDiffusion, batch: dict[str, torch.Tensor]) -> Draws:
    return Draws(model.seed, batch[batch_keys.SAMPLE_ID], batch[batch_keys.EPOCH], batch[batch_keys.BATCH_INDEX])


def reference_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    draws, vae, unet = draws_of(model, batch), model.vae, model.denoiser
    with torch.no_grad():
        posterior = vae.encode(batch[batch_keys.IMAGE] / 127.5 - 1, return_dict=False)[0]
    latents = posterior.mean + posterior.std * draws.normal(Purpose.POSTERIOR, posterior.mean.shape[1:])
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1) for name in ('latents_mean', 'latents_std'))
    latents = (latents - mean) / std * vae.config['scaling_factor']
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    timesteps: Any = draws.integers(Purpose.TIMESTEP, 1000)
    scheduler = DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule='scaled_linear',
        prediction_type=model.objective.prediction_type,
    )
    noisy = scheduler.add_noise(latents, noise, timesteps)
    embeds = model.text.encoders[0](batch[batch_keys.INPUT_IDS][:, 0]).last_hidden_state
    predicted = unet(noisy, timesteps, encoder_hidden_states=embeds).sample
    targets = {'epsilon': noise, 'sample': latents, 'v_prediction': scheduler.get_velocity(latents, noise, timesteps)}
    return functional.mse_loss(predicted, targets[model.objective.prediction_type])


@pytest.mark.parametrize('prediction_type', ['v_prediction', pytest.param('sample', marks=pytest.mark.slow)])
def test_loss_on_stored_latents_equals_plain_pytorch(make_model, prediction_type):
    model = make_model(objective=Objective(prediction_type=prediction_type), caption_dropout=0.0)
    batch = batch_of(model)
    expected = reference_loss(model, batch)
    batch[batch_keys.LATENT_MOMENTS] = model.encode(batch.pop(batch_keys.IMAGE))
    torch.testing.assert_close(model.loss(model(batch), batch), expected, rtol=1e-5, atol=1e-6)


def test_flow_at_a_validation_timestep_is_that_fraction_of_noise(make_model):
    model = make_model(objective=Objective(path='flow', prediction_type='velocity'))
    batch = batch_of(model)
    seen = {}
    model.denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update({int(kwargs['timestep'][0]): args[0]}), with_kwargs=True
    )
    assert model.eval_forward(batch).shape == (8, 4)
    latents = model.latents_of(batch)
    draws = Draws(model.seed, batch[batch_keys.SAMPLE_ID], torch.zeros(4).long(), torch.full((4,), 4))
    noise = draws.normal(Purpose.VALIDATION_NOISE, latents.shape[1:])
    torch.testing.assert_close(seen[562], 0.438 * latents + 0.562 * noise)


@pytest.mark.parametrize(
    ('prediction_type', 'name'),
    [
        ('velocity', 'dpm++'),
        ('sample', 'euler'),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (('velocity', 'heun'), ('sample', 'unipc'), ('sample', 'DPMSolverSinglestepScheduler'))
        ),
    ],
)
def test_every_scheduler_of_a_flow_follows_a_known_flow(make_model, monkeypatch, name, prediction_type):
    """Every solver arrives at the point if the data are a single point: the flow is a straight line."""
    model = make_model(objective=Objective(path='flow', prediction_type=prediction_type))
    point, noise = torch.randn(2, 1, 4, 8, 8)
    exact = {'velocity': noise - point, 'sample': point}[prediction_type]
    monkeypatch.setattr(model, '_predict', lambda noisy, *_: exact)
    monkeypatch.setattr(model, 'decode', lambda latents: latents)
    sampling = {'num_inference_steps': 10, 'guidance_scale': 1.0, 'noise_scheduler': name}
    torch.testing.assert_close(model.generate(['a'], latents=noise, **sampling), point, rtol=0.02, atol=0.02)


def velocity(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    return torch.sin(3 * x) + timestep / 1000 * x


@pytest.mark.parametrize('name', ['euler', 'heun', 'dpm++'])
def test_solvers_of_a_flow_equal_their_equations(name):
    """Euler and Heun (Karras et al. 2022, algorithm 1), and DPM-Solver++(2M) (Lu et al. 2022, algorithm 2)."""
    scheduler = inference_scheduler(name, Objective(path='flow', prediction_type='velocity', snr_shift=2.0))
    x = start = torch.randn(1, 4, 8, 8)

    settings: dict[str, Any] = {'num_inference_steps': 6, 'seeds': [0], 'even_times': name != 'euler'}
    found = sample_latents(velocity, scheduler, start, **settings)  # even times are those of Euler's method alone
    times, sigmas = [*map(torch.unique_consecutive, (scheduler.timesteps, scheduler.sigmas))]
    clean, last_h = [], math.nan
    for step, time in enumerate(times):
        sigma, after = sigmas[step].item(), sigmas[step + 1].item()
        slope = velocity(x, time)
        if name == 'dpm++':
            clean.append(x - sigma * slope)
            h = math.inf if after == 0 else math.log((1 - after) * sigma / after / (1 - sigma))
            is_first_order = step == 0 or after == 0
            target = clean[-1] if is_first_order else clean[-1] + (clean[-1] - clean[-2]) * h / (2 * last_h)
            x, last_h = after / sigma * x - (1 - after) * math.expm1(-h) * target, h
        else:
            if name == 'heun' and after > 0:
                slope = (slope + velocity(x + (after - sigma) * slope, times[step + 1])) / 2
            x = x + (after - sigma) * slope
    torch.testing.assert_close(found, x, rtol=1e-5, atol=1e-5)


def test_unipc_of_a_flow_equals_its_equations():
    """UniPC-2 with B(h) = exp(-h) - 1 on predictions of clean latents (Zhao et al. 2023, algorithms 5 and 7)."""
    scheduler = inference_scheduler('unipc', Objective(path='flow', prediction_type='velocity', snr_shift=2.0))
    start = torch.randn(1, 4, 8, 8)

    found = sample_latents(velocity, scheduler, start, num_inference_steps=6, seeds=[0])
    times, sigmas = scheduler.timesteps, scheduler.sigmas.double().clamp(max=1 - 1e-12)
    log_snr = (1 - sigmas).log() - sigmas.log()
    assert len(times) == 6
    x, corrected, clean = start, start, []
    for step, time in enumerate(times):
        clean.append(x - sigmas[step] * velocity(x, time))
        if step > 0:  # correct the latents of this step, whose clean prediction is kept as it is
            h = log_snr[step] - log_snr[step - 1]
            phi = torch.expm1(-h)
            moved = sigmas[step] / sigmas[step - 1] * corrected - (1 - sigmas[step]) * phi * clean[-2]
            weights, changes = torch.tensor([0.5]), [clean[-1] - clean[-2]]
            if step > 1:
                ratio = (log_snr[step - 2] - log_snr[step - 1]) / h
                second = -phi / h - 1
                right = torch.stack([second, 2 * (-second / h - 0.5)]) / phi
                weights = torch.linalg.solve(torch.tensor([[1.0, 1.0], [ratio, 1.0]]).double(), right)
                changes = [(clean[-3] - clean[-2]) / ratio, *changes]
            update = sum(weight * change for weight, change in zip(weights, changes, strict=True))
            corrected = moved - (1 - sigmas[step]) * phi * update
        h = log_snr[step + 1] - log_snr[step]
        phi = torch.expm1(-h)
        x = sigmas[step + 1] / sigmas[step] * corrected - (1 - sigmas[step + 1]) * phi * clean[-1]
        if 0 < step < len(times) - 1:
            ratio = (log_snr[step - 1] - log_snr[step]) / h
            x = x - (1 - sigmas[step + 1]) * phi * (clean[-2] - clean[-1]) / (2 * ratio)
    torch.testing.assert_close(found, x.to(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('shift', 'rescale'), [(3.0, 0.7), (None, 0.0)])
def test_sampled_latents_of_a_flow_follow_the_equations(make_model, monkeypatch, shift, rescale):
    """Euler's method at times that diffusers shifts twice, and guidance by equations 15 and 16 of Lin et al. 2024."""
    model = make_model(objective=Objective(path='flow', prediction_type='velocity', snr_shift=2.0)).eval()
    monkeypatch.setattr(model, 'decode', lambda latents: latents)
    start, prompts, steps, scale = torch.randn(2, 4, 8, 8), ['one', 'two squares'], 4, 5.0

    def shifted(time: float) -> float:
        factor = shift or 2.0
        return factor * time / (1 + (factor - 1) * time)

    def velocity(x: torch.Tensor, time: float, captions: list[str]) -> torch.Tensor:
        embeds = model.text.encoders[0](model._tokens(captions)[:, 0]).last_hidden_state
        return model.denoiser(x, torch.full((len(x),), 1000 * time), encoder_hidden_states=embeds).sample

    times, x = [shifted(time) for time in torch.linspace(1, shifted(1e-3), steps).tolist()], start
    for time, after in zip(times, [*times[1:], 0.0], strict=True):
        conditional, unconditional = velocity(x, time, prompts), velocity(x, time, ['', ''])
        guided = unconditional + scale * (conditional - unconditional)
        factors = conditional.flatten(1).std(dim=1) / guided.flatten(1).std(dim=1)
        rescaled = guided * factors[:, None, None, None]
        x = x + (after - time) * (rescale * rescaled + (1 - rescale) * guided)
    sampling = {'guidance_scale': scale, 'guidance_rescale': rescale, 'snr_shift': shift, 'noise_scheduler': 'euler'}
    found = model.generate(prompts, latents=start, size=(64, 64), num_inference_steps=steps, **sampling)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_scheduler_of_the_other_kind_is_refused(make_model, shared_model):
    flow = make_model(objective=Objective(path='flow', prediction_type='velocity'))
    for model, name, message in (
        (flow, 'pndm', "'pndm' cannot sample a flow; use ddim, dpm"),
        (flow, 'EulerDiscreteScheduler', 'cannot sample a flow'),
        (shared_model, 'FlowMatchEulerDiscreteScheduler', 'samples a flow, and this model is diffusion; use ddim'),
        (flow, 'eular', "'eular' is unknown; did you mean 'euler'"),
    ):
        with pytest.raises(UserError, match=message):
            model.generate(['a'], num_inference_steps=2, noise_scheduler=name)


def test_loss_and_gradients_equal_plain_pytorch(make_model):
    model = make_model(caption_dropout=0.0)
    batch = batch_of(model)
    assert_same_loss_and_gradients(model, batch, reference_loss(model, batch), rtol=1e-3, atol=1e-6)


def test_latents_are_standardized_from_images_and_from_moments(make_model):
    model = make_model()
    batch = batch_of(model)
    moments = model.encode(batch[batch_keys.IMAGE])
    mean, std = moments[:, :4].mean(dim=(0, 2, 3)), moments[:, :4].std(dim=(0, 2, 3))
    model.latent_mean.copy_(mean.view(-1, 1, 1))
    model.latent_std.copy_(std.view(-1, 1, 1))
    from_images = model.latents_of(batch)
    from_moments = model.latents_of({batch_keys.LATENT_MOMENTS: moments})
    assert torch.equal(from_images, from_moments)
    without_variances = {batch_keys.LATENT_MOMENTS: moments[:, :4]}
    assert torch.equal(model.latents_of(without_variances, draws_of(model, batch)), from_images)
    torch.testing.assert_close(from_images.std(dim=(0, 2, 3)), torch.ones(4), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    'objective', [pytest.param(Objective(), id='diffusion', marks=pytest.mark.slow), pytest.param(FLOW, id='flow')]
)
def test_loss_of_a_sample_does_not_depend_on_batch_order(make_model, objective):
    """A batch's loss is the mean of its samples' losses for any split over devices, so runs can change their number."""
    model = make_model(objective=objective)
    batch = batch_of(model)
    full = model(batch)
    order = torch.tensor([2, 0, 3, 1])
    shuffled = model({name: tensor[order] for name, tensor in batch.items()})
    torch.testing.assert_close(full.prediction[order], shuffled.prediction, rtol=1e-4, atol=1e-5)
    assert torch.equal(full.target[order], shuffled.target)


def test_batch_without_ids_uses_torchs_generator(shared_model):
    model = shared_model
    whole = batch_of(model)
    batch = {name: whole[name] for name in (batch_keys.IMAGE, batch_keys.INPUT_IDS)}
    torch.manual_seed(3)
    first, second = model(batch).target, model(batch).target
    torch.manual_seed(3)
    assert torch.equal(model(batch).target, first)
    assert not torch.equal(first, second)


def test_a_step_draws_its_random_numbers_together(make_model, monkeypatch):
    """Each draw would take the launch of a kernel."""
    model, layouts = make_model(objective=Objective(offset_noise=0.5)), []
    layout = Draws._layout
    monkeypatch.setattr(Draws, '_layout', lambda self, counts: layouts.append(dict(counts)) or layout(self, counts))
    model(batch_of(model))
    normals = {Purpose.NOISE: 4 * 8 * 8, Purpose.POSTERIOR: 4 * 8 * 8, Purpose.OFFSET_NOISE: 4}
    assert layouts == [dict.fromkeys([Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT], 4) | normals]


def test_offset_noise_shifts_whole_channels(make_model, shared_model):
    plain, offset = shared_model, make_model(objective=Objective(offset_noise=0.5))
    batch = batch_of(plain)
    difference = offset(batch).target - plain(batch).target
    expected = 0.5 * draws_of(plain, batch).normal(Purpose.OFFSET_NOISE, (4, 1, 1))
    torch.testing.assert_close(difference, expected.expand_as(difference), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('mode', ['empty', pytest.param('zeros', marks=pytest.mark.slow)])
def test_caption_dropout_drops_the_configured_fraction(make_model, mode):
    model = make_model(caption_dropout=0.3, caption_dropout_mode=mode)
    size = 2000
    ids = model._tokens(['a caption']).expand(size, -1, -1)
    draws = Draws(17, torch.arange(size), torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long))
    with torch.no_grad():
        embeds = model._condition_of({batch_keys.INPUT_IDS: ids}, draws).embeds
        replacement = model.embed(model.empty_ids[None]).embeds if mode == 'empty' else torch.zeros(1)
    dropped = torch.isclose(embeds, replacement, atol=1e-5).all(dim=(1, 2))
    assert dropped.float().mean() == pytest.approx(0.3, abs=0.04)
    assert torch.equal(dropped, draws.uniform(Purpose.CAPTION_DROPOUT) < 0.3)


@pytest.mark.parametrize('mode', ['empty', pytest.param('zeros', marks=pytest.mark.slow)])
def test_stored_text_embeddings_give_the_same_predictions(make_model, mode):
    model = make_model(caption_dropout=0.5, caption_dropout_mode=mode, mask_padding=True, train_text_encoder=False)
    batch = batch_of(model)
    stored = batch | {batch_keys.TEXT_EMBEDS: model.embed(batch[batch_keys.INPUT_IDS]).embeds.half()}
    torch.testing.assert_close(model(stored).prediction, model(batch).prediction, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(model.eval_forward(stored), model.eval_forward(batch), rtol=1e-2, atol=2e-3)
    random = batch | {batch_keys.TEXT_EMBEDS: torch.randn_like(stored[batch_keys.TEXT_EMBEDS])}
    assert not torch.allclose(model(random).prediction, model(batch).prediction, rtol=1e-2, atol=2e-3)


def test_padding_mask_hides_tokens_after_the_caption(make_model):
    model = make_model(mask_padding=True)
    ids = model._tokens(['short'])
    mask = model.text.padding_mask(ids)
    assert mask[0].tolist() == [True] * 3 + [False] * 13  # start, one word, end
    latents, noise, timestep = torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8), torch.tensor([500])
    condition = model._condition(ids)
    changed = condition.embeds.clone()
    changed[:, 3:] += 10
    both = condition, replace(condition, embeds=changed)
    same = [model.denoise(latents, noise, timestep, each).prediction for each in both]
    torch.testing.assert_close(*same)
    seen = [model.denoise(latents, noise, timestep, replace(each, mask=None)).prediction for each in both]
    assert not torch.allclose(*seen)


def test_frozen_parts_are_not_in_the_state_dict_but_move_with_the_model(make_model):
    model = make_model(train_text_encoder=False)
    assert {name.split('.')[0] for name in model.state_dict()} == {'denoiser'}
    assert {name.split('.')[0] for name, _ in model.named_parameters()} == {'denoiser'}
    model.train()
    assert not (model.vae.training or model.text.training)
    model.to(torch.float64)
    assert {each.dtype for part in (model, model.vae, model.text) for each in part.parameters()} == {torch.float64}


def test_validation_loss_is_deterministic_at_eight_timesteps(shared_model):
    model = shared_model
    batch = batch_of(model)
    first = model.eval_forward(batch)
    torch.manual_seed(99)
    assert torch.equal(first, model.eval_forward({**batch, batch_keys.EPOCH: batch[batch_keys.EPOCH] + 1}))
    assert first.shape == (8, 4)
    assert model.validation_timesteps() == [62, 187, 312, 437, 562, 687, 812, 937]
    metrics = model.get_metrics(is_train=False)
    for metric in metrics.values():
        model.update_metric(batch, first, metric)
    assert float(metrics['loss'].compute()) == pytest.approx(first.mean().item(), rel=1e-5)
    assert float(metrics['loss_t062'].compute()) == pytest.approx(first[0].mean().item(), rel=1e-5)


def test_generated_images_depend_only_on_their_own_seed(shared_model):
    model = shared_model
    both = model.generate(['one', 'two'], seeds=[0, 5], num_inference_steps=2)
    alone = model.generate(['two'], seeds=[5], num_inference_steps=2)
    torch.testing.assert_close(alone[0], both[1], rtol=1e-4, atol=1e-4)
    other = model.generate(['one'], seeds=[1], num_inference_steps=2)
    assert not torch.allclose(other[0], both[0], atol=1e-3), 'seed 0 is an ordinary seed'
    assert model.training, 'the training mode is restored'


def test_worse_weights_of_autoguidance_are_kept_until_others_are_asked_for(make_model):
    model, loaded = make_model(train_text_encoder=False), []

    def weights(guidance: Any) -> dict[str, torch.Tensor]:
        loaded.append(guidance.batch)
        return model.state_dict()

    model.weak_weights = weights
    for batch in (3, 3, 4):
        model.generate(['a'], guidance={'name': 'autoguidance', 'batch': batch}, num_inference_steps=1)
    assert loaded == [3, 4]


@pytest.mark.parametrize(
    'name', ['dpm++', 'euler_ancestral', *(pytest.param(each, marks=pytest.mark.slow) for each in ('heun', 'pndm'))]
)
def test_every_scheduler_generates_finite_reproducible_images(shared_model, name):
    sampling = {'num_inference_steps': 4, 'noise_scheduler': name, 'guidance_rescale': 0.7}
    images = shared_model.generate(['a'], seeds=[3], **sampling)
    assert images.shape == (1, 3, 64, 64)
    assert images.isfinite().all()
    torch.manual_seed(99)
    assert torch.equal(images, shared_model.generate(['a'], seeds=[3], **sampling))


def pixels() -> torch.Tensor:
    return torch.zeros(1, 3, 64, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda m: m.generate([]), 'prompts: pass at least one caption'),
        (lambda m: m.generate('a cat'), r"prompts: pass a list of captions, such as \['a cat'\], instead"),
        (lambda m: m.generate(['a'], seeds=[1, 2]), 'seeds: 2 seeds for 1 prompts'),
        (lambda m: m.generate(['a', 'b'], seeds=[0, 2**32]), 'seeds: 4294967296 is out of range'),
        (
            lambda m: m.generate(['a'], latents=torch.zeros(1, 4, 8, 8), size=(128, 128)),
            r'size: 128x128, but latents of shape \(1, 4, 8, 8\) give images of 64x64 px; pass only one of the two',
        ),
        (
            lambda m: m.generate(['a', 'b'], latents=torch.zeros(1, 4, 8, 8)),
            r'latents: shape \(1, 4, 8, 8\); pass noise of shape \[2, 4, height / 8, width / 8\], one entry per prompt',
        ),
        (lambda m: m.generate(['a'], size=(0, 0)), 'size: 0x0; use positive multiples of 8 px'),
        (lambda m: m.generate(['a'], num_inference_steps=1001), 'num_inference_steps: 1001 is out of range'),
        (lambda m: m.generate(['a'], guidance_scale=-1), 'guidance_scale: -1 is out of range; use 0 or more'),
        (lambda m: m.generate(['a'], guidance_rescale=2), 'guidance_rescale: 2 is out of range; use 0 .* to 1'),
        (lambda m: m({batch_keys.INPUT_IDS: m._tokens(['a'])}), 'batch: has .* needs either image or latent_moments'),
        (lambda m: m.encode(torch.zeros(1, 3, 64, 64)), 'image: dtype torch.float32; images must be uint8'),
        (lambda m: m.encode(torch.zeros(1, 3, 64, 60, dtype=torch.uint8)), 'streams: images of 60x64 px, but the VAE'),
        (lambda m: m.generate(['a'], seeds=3), 'seeds: 3 is not a list, each an integer or None'),
        (lambda m: m.generate(['a'], num_inference_steps='5'), "num_inference_steps: '5' is not an integer"),
        (lambda m: m({'image': pixels(), 'input_ids': ['a']}), 'batch: input_ids is a list; use a tensor'),
        (lambda m: m({'image': pixels(), 'input_ids': m._tokens(['a', 'b'])}), '1 samples in image, but 2 in'),
        (lambda m: m({'image': pixels(), 'input_ids': m._tokens(['a']).float()}), 'input_ids: dtype torch.float32'),
        (
            lambda m: m._check_captions(torch.full((1, 1, 16), 49408), 'prompts'),
            '49408 is not in .* which has 49408 tokens',
        ),
        (lambda m: m.text.check_vocabulary(torch.full((1, 1, 16), -1)), 'input_ids: -1 is not in the vocabulary'),
        (lambda m: m({'latent_moments': pixels(), 'input_ids': m._tokens(['a'])}), 'latent_moments: shape .* mean, '),
        (lambda m: m.text(torch.zeros(1, 2, 16, dtype=torch.long)), r'input_ids: shape \(1, 2, 16\); expected'),
    ],
)
def test_misuse_is_rejected_with_a_message(shared_model, call, message):
    with pytest.raises(ValueError, match=message):
        call(shared_model)


def test_latents_of_the_wrong_scale_are_logged_once(make_model, caplog):
    normal = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    for std, is_logged in ((0.45, True), (0.6, False), (1.8, False), (2.2, True)):
        model = make_model()
        latents = model.latent_mean + model.latent_std * std * normal / normal.std()
        batch = batch_of(model) | {batch_keys.LATENT_MOMENTS: latents}
        for _ in range(2):
            model(batch)
        assert caplog.text.count(f'deviation {std:.2f} in the first batch, but the noise schedule') == is_logged


@pytest.mark.parametrize(
    ('builder', 'sizes'),
    [
        pytest.param(tiny_sdxl, {}, marks=pytest.mark.slow),
        (tiny_mmdit, {'depth': 1, 'dual_attention_blocks': 0, 'text_width': 32}),
    ],
)
def test_captions_that_fill_the_text_encoder_are_counted_once(builder, sizes, small_vae, caplog):
    model = builder(vae=str(small_vae), **sizes)
    length = model.text.token_length
    texts = ['a', 'a cat ' * 3 * length, 'on ' * (length // 6), 'b ' * 2 * length]
    batch = batch_of(model, ['a'] * 4) | {batch_keys.INPUT_IDS: tokenize(model.text.tokenizers, texts)}
    batch[batch_keys.IMAGE_SIZES] = torch.tensor([[64, 64, 0, 0, 64, 64]] * 4)
    for _ in range(2):
        model(batch)
    wanted = f'{{}}: 2 of 4 fill all {length} tokens of the text encoder; longer ones are cut to that length'
    assert [each for each in caplog.messages if 'fill all' in each] == [wanted.format('captions of the first batch')]
    model.generate(texts[:1], num_inference_steps=1)
    for _ in range(2):
        model.generate(texts, num_inference_steps=1)
    assert [each for each in caplog.messages if 'fill all' in each][1:] == [wanted.format('prompts')]


def test_frozen_parts_and_buffers_follow_the_batch(make_model, monkeypatch):
    """FSDP moves to a GPU only what it shards; here the meta device stands for the GPU."""
    model = make_model(train_text_encoder=False)
    places: list[torch.device] = []
    with monkeypatch.context() as patch:
        patch.setattr(model, 'place', places.append)
        model(batch_of(model))
        model.eval_forward(batch_of(model))
    assert places == [torch.device('cpu')] * 2
    model.place(torch.device('meta'))
    assert {each.device.type for part in (model.vae, model.text) for each in part.parameters()} == {'meta'}
    own = [each for each in model.buffers(recurse=False) if each is not None]
    assert len(own) == 4 and {each.device.type for each in own} == {'meta'}
    assert {each.device.type for each in model.denoiser.parameters()} == {'cpu'}, 'moved by FSDP, in shards'


def test_to_empty_keeps_the_weights_of_frozen_parts(make_model):
    """Composer empties the models of ranks other than 0 and fills them from rank 0's state dict."""
    model = make_model(train_text_encoder=False)
    before = {name: tensor.clone() for name, tensor in model.vae.state_dict().items()}
    model.to_empty(device='cpu')
    assert all(torch.equal(before[name], tensor) for name, tensor in model.vae.state_dict().items())
    model.to_empty(device='meta')
    assert {each.device.type for part in (model, model.vae, model.text) for each in part.parameters()} == {'meta'}


@pytest.fixture(scope='module')
def stratified_model(make_model) -> Any:
    return make_model(objective=Objective(timesteps='stratified'))


def test_stratified_timesteps_do_not_depend_on_microbatches(stratified_model):
    model, quantiles = stratified_model, [0.0, 0.2505, 0.9999, 1 - 2.0**-52]
    batch = batch_of(model) | {batch_keys.TIMESTEP_QUANTILE: torch.tensor(quantiles, dtype=torch.float64)}
    timesteps = training_timesteps(model.objective, draws_of(model, batch), batch[batch_keys.TIMESTEP_QUANTILE])
    assert timesteps.tolist() == [0, 250, 999, 999]
    flow = Objective(path='flow', prediction_type='velocity', timesteps='stratified')
    found = training_timesteps(flow, draws_of(model, batch), torch.tensor(quantiles, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([0, 250.5, 999.9, 1000]))
    with torch.no_grad():
        full = model(batch)
        parts = [model({name: tensor[i : i + 2] for name, tensor in batch.items()}) for i in (0, 2)]
    torch.testing.assert_close(torch.cat([part.prediction for part in parts]), full.prediction, rtol=1e-4, atol=1e-5)


def test_stratified_timesteps_need_quantiles_in_the_batch(stratified_model):
    with pytest.raises(ValueError, match='batch: has no timestep_quantile, .* BucketedLoader with stratified=True'):
        stratified_model(batch_of(stratified_model))
