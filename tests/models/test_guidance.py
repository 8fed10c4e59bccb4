"""Guidance against diffusers' guiders and against the equations of the papers."""

from typing import Any

import pytest
import torch

from diffusion.errors import UserError
from diffusion.models.guidance import guidance_of
from diffusion.models.objective import Objective, space_coefficients
from diffusion.models.sampler import guided_denoiser, inference_scheduler, rescaled

SCALE = 4.0


def predictions() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a weak and a strong prediction, [2, 4, 8, 8], of four steps."""
    return list(torch.randn(4, 2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind(0))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ('settings', 'guider', 'arguments'),
    [
        ({'name': 'cfg'}, 'ClassifierFreeGuidance', {}),
        ({'name': 'sparse'}, 'AutoGuidance', {'auto_guidance_layers': [0], 'dropout': 1.0}),
        ({'name': 'cfg_zero_star', 'zero_init_steps': 2}, 'ClassifierFreeZeroStarGuidance', {'zero_init_steps': 2}),
        (
            {'name': 'apg', 'eta': 0.3, 'norm_threshold': 10.0, 'momentum': -0.5},
            'AdaptiveProjectedGuidance',
            {
                **{'guidance_scale': SCALE - 1, 'use_original_formulation': True, 'eta': 0.3},
                **{'adaptive_projected_guidance_rescale': 10.0, 'adaptive_projected_guidance_momentum': -0.5},
            },
        ),
    ],
)
@pytest.mark.parametrize('rescale', [0.0, 0.7])
def test_guided_predictions_equal_those_of_diffusers(settings, guider, arguments, rescale):
    guiders = pytest.importorskip('diffusers.guiders')
    arguments = {'guidance_scale': SCALE, 'guidance_rescale': rescale} | arguments
    reference: Any = getattr(guiders, guider)(**arguments)
    if guider == 'AdaptiveProjectedGuidance':
        from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer

        reference.momentum_buffer = MomentumBuffer(-0.5)  # its loop creates it with the first inputs
    combine = guidance_of(settings, flow=True).start(SCALE)
    for step, (weak, strong) in enumerate(predictions()):
        reference.set_state(step=step, num_inference_steps=4, timestep=torch.tensor(0))
        found = rescaled(combine(weak, strong), strong, strength=rescale)
        expected = reference.forward(strong, weak).pred.nan_to_num()  # 0 / 0 where it rescales a velocity of 0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('limit', [8.0, 0.5, 0.0])
def test_projected_update_equals_the_equations_of_the_paper(limit):
    """Without momentum: each image's update is shortened to the threshold, and its parallel part multiplied by eta."""
    (weak, strong), *_ = predictions()
    settings = {'name': 'apg', 'eta': 0.25, 'norm_threshold': limit, 'momentum': 0.0}
    combine = guidance_of(settings, flow=False).start(SCALE)
    for found, q, p in zip(combine(weak, strong), weak.double(), strong.double(), strict=True):
        update = (p - q) * (min(1.0, limit / float((p - q).norm())) if limit else 1.0)
        direction = p / p.norm()
        parallel = float((update * direction).sum()) * direction
        expected = p + (SCALE - 1) * (update - parallel + 0.25 * parallel)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction', 'sample'])
def test_predictions_of_diffusion_are_converted_to_clean_latents(prediction_type):
    objective = Objective(prediction_type=prediction_type)
    clean, noise = torch.randn(2, 1, 4, 8, 8)
    for timestep, step in ((0.0, 0), (299.6, 300), (999.7, 999)):
        alpha = objective.alpha_bars()[step].float()
        noisy = alpha.sqrt() * clean + (1 - alpha).sqrt() * noise
        exact = {'epsilon': noise, 'sample': clean, 'v_prediction': alpha.sqrt() * noise - (1 - alpha).sqrt() * clean}
        shift, factor = space_coefficients(objective, 'sample', torch.tensor(timestep))
        torch.testing.assert_close(shift * noisy + factor * exact[prediction_type], clean, rtol=1e-4, atol=1e-4)


def guided_velocity(settings: dict[str, Any], time: float, step: int, x: Any, p: Any, q: Any, state: list[Any]) -> Any:
    """Return the guided velocity for the velocities p and q, by the equations of the papers."""
    if settings['name'] == 'cfg_zero_star':
        weights = [float((a * b).sum() / b.square().sum()) for a, b in zip(p, q, strict=True)]
        q = torch.stack([weight * each for weight, each in zip(weights, q, strict=True)])
        return q + SCALE * (p - q) if step else torch.zeros_like(p)
    strong, weak = x - time * p, x - time * q  # clean latents
    state.append(strong - weak - (0.5 * state[-1] if state else 0))
    guided = []
    for update, each in zip(state[-1], strong, strict=True):
        shortened = update * min(1.0, 15 / float(update.norm()))
        guided.append(each + (SCALE - 1) * (shortened - (shortened * each).sum() / each.square().sum() * each))
    return (x - torch.stack(guided)) / time


@torch.no_grad()
@pytest.mark.parametrize('prediction_type', ['velocity', 'sample'])
@pytest.mark.parametrize(
    'settings', [{'name': 'interval', 'low': 0.3, 'high': 0.9}, {'name': 'cfg_zero_star'}, {'name': 'apg'}]
)
def test_sampled_latents_of_a_flow_follow_the_equations(make_model, monkeypatch, settings, prediction_type):
    """Euler's method by hand with each guidance; outside of the interval, only the prompt's prediction is computed."""
    model = make_model(objective=Objective(path='flow', prediction_type=prediction_type, snr_shift=2.0)).eval()
    monkeypatch.setattr(model, 'decode', lambda latents: latents)
    start, prompts, steps = torch.randn(2, 4, 8, 8), ['one', 'two squares'], 4
    plain, state, x, sizes = model._predict, [], start, []
    arguments = {'num_inference_steps': steps, 'guidance_scale': SCALE, 'noise_scheduler': 'euler', 'latents': start}
    times: list[float] = []

    def spied(noisy, timesteps, condition):
        times.append(float(timesteps[0]) / 1000)
        sizes.append(len(noisy))
        return plain(noisy, timesteps, condition)

    monkeypatch.setattr(model, '_predict', spied)
    found = model.generate(prompts, guidance=settings, **arguments)
    is_guided = [settings['name'] != 'interval' or 0.3 < time <= 0.9 for time in times]
    assert sizes == [4 if guided else 2 for guided in is_guided] and len(times) == steps
    assert settings['name'] != 'interval' or {*is_guided} == {True, False}
    conditions = [model._condition(model._tokens(captions)) for captions in (prompts, ['', ''])]
    for step, (time, after) in enumerate(zip(times, [*times[1:], 0.0], strict=True)):
        timesteps = torch.full((2,), 1000 * time)
        p, q = (plain(x, timesteps, each) for each in conditions)
        divisor = time
        if prediction_type == 'sample':
            divisor = max(time, 0.05)
            p, q = ((x - each) / divisor for each in (p, q))
        if settings['name'] == 'interval':
            velocity = q + SCALE * (p - q) if is_guided[step] else p
        else:
            velocity = guided_velocity(settings, divisor, step, x, p, q, state)
        x = x + (after - time) * velocity
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_interval_begins_above_its_lower_end():
    flow = Objective(path='flow', prediction_type='velocity')
    interval = guidance_of({'name': 'interval', 'low': 0.25, 'high': 0.5}, flow=True)
    strong, weak = (lambda *_, each=each: torch.full((1, 1, 1, 1), each) for each in (3.0, 1.0))
    scheduler: Any = inference_scheduler('euler', flow)
    condition: Any = None
    denoise = guided_denoiser(strong, condition, scheduler, flow, guidance=interval, scale=SCALE, weak=weak)
    times = torch.tensor([250.0, 251.0, 500.0, 501.0])
    assert [denoise(torch.zeros(1, 1, 1, 1), time).item() for time in times] == [3, 1 + SCALE * 2, 1 + SCALE * 2, 3]


@pytest.mark.parametrize(('name', 'divisor'), [('euler', 0.05), ('heun', 0.01)])
def test_predicted_latents_become_velocities_near_time_zero(name, divisor):
    objective = Objective(path='flow', prediction_type='sample')
    cfg, condition, scheduler = guidance_of(None, flow=True), None, inference_scheduler(name, objective)
    predict: Any = lambda *_: torch.full((1, 1, 1, 1), 3.0)  # noqa: E731
    denoise = guided_denoiser(predict, condition, scheduler, objective, guidance=cfg, scale=1.0)  # type: ignore[arg-type]
    assert denoise(torch.ones(1, 1, 1, 1), torch.tensor(10.0)).item() == pytest.approx(-2 / divisor)


def test_wrong_guidance_is_refused():
    """The files in tests/config/golden/mistakes have the other messages."""
    with pytest.raises(UserError, match='^guidance.name: cfg_zero_star works on the velocities of a flow'):
        guidance_of({'name': 'cfg_zero_star'}, flow=False)
    with pytest.raises(UserError, match=r"^guidance: \[{'name': 'apg'}\] is not a mapping"):
        guidance_of([{'name': 'apg'}], flow=False)  # type: ignore[arg-type]
