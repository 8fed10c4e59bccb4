"""Noise schedules and targets against diffusers and against closed forms from the papers."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from diffusion.errors import UserError
from diffusion.models.objective import (
    Objective,
    diffuse,
    flow_loss_weight,
    flow_velocity,
    interpolate,
    loss_weight,
    target,
)
from diffusion.models.sampler import inference_scheduler

FLOW: dict[str, Any] = {'path': 'flow', 'prediction_type': 'velocity'}
LOGIT_NORMAL: dict[str, Any] = FLOW | {'timesteps': 'logit_normal'}
SCHEDULES = ['scaled_linear', 'linear', 'cosine']


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_schedule_matches_diffusers(schedule):
    objective = Objective(beta_schedule=schedule)
    config = {k: v for k, v in objective.scheduler_config().items() if 'steps_' not in k}
    reference = DDPMScheduler(**{k: v for k, v in config.items() if k not in ('skip_prk_steps', 'set_alpha_to_one')})
    torch.testing.assert_close(objective.alpha_bars().float(), reference.alphas_cumprod, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_zero_terminal_snr_ends_at_zero_and_matches_diffusers(schedule):
    objective = Objective(beta_schedule=schedule, zero_terminal_snr=True, prediction_type='v_prediction')
    alpha_bars = objective.alpha_bars()
    assert alpha_bars[-1] == 0
    assert alpha_bars[0] == pytest.approx(Objective(beta_schedule=schedule).alpha_bars()[0].item())
    found = inference_scheduler('ddim', objective).alphas_cumprod
    torch.testing.assert_close(found, alpha_bars.float(), rtol=2e-3, atol=1e-6)


def test_schedulers_get_the_published_settings():
    # https://huggingface.co/stabilityai/stable-diffusion-2-base/blob/main/scheduler/scheduler_config.json
    published = {'beta_start': 0.00085, 'beta_end': 0.012, 'beta_schedule': 'scaled_linear', 'clip_sample': False}
    published |= {'prediction_type': 'epsilon', 'set_alpha_to_one': False, 'skip_prk_steps': True}
    common = {'num_train_timesteps': 1000, 'steps_offset': 1}
    assert Objective().scheduler_config() == common | published
    flow = {'prediction_type': 'flow_prediction', 'shift': 3.0, 'flow_shift': 3.0, 'use_flow_sigmas': True}
    assert Objective(**FLOW, snr_shift=3.0).scheduler_config() == common | flow


def test_shift_divides_the_snr_by_shift_squared():
    snr = [a / (1 - a) for a in (Objective().alpha_bars(), Objective(snr_shift=2).alpha_bars())]
    torch.testing.assert_close(snr[0] / snr[1], torch.full((1000,), 4.0, dtype=torch.float64))
    found = inference_scheduler('ddim', Objective(snr_shift=2)).alphas_cumprod.double()
    torch.testing.assert_close(found, Objective(snr_shift=2).alpha_bars(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction', 'sample'])
def test_latents_are_recovered_from_noisy_latents_and_target(prediction_type):
    latents, noise = torch.randn(2, 5, 4, 8, 8, dtype=torch.float64).unbind()
    alpha_bar = torch.rand(5, dtype=torch.float64)
    noisy = diffuse(latents, noise, alpha_bar=alpha_bar)
    predicted = target(Objective(prediction_type=prediction_type), latents, noise, alpha_bar=alpha_bar)
    root, other = (a.sqrt().view(5, 1, 1, 1) for a in (alpha_bar, 1 - alpha_bar))
    recovered = {
        'epsilon': (noisy - other * predicted) / root,
        'v_prediction': root * noisy - other * predicted,
        'sample': predicted,
    }
    torch.testing.assert_close(recovered[prediction_type], latents)


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction', 'sample'])
def test_min_snr_weights_an_error_in_x_equally_for_all_prediction_types(prediction_type):
    """An error d in x is d sqrt(SNR) in epsilon and d sqrt(SNR + 1) in v; squared and weighted, all are equal."""
    alpha_bar = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    snr = alpha_bar / (1 - alpha_bar)
    squared = {'epsilon': snr, 'v_prediction': snr + 1, 'sample': torch.ones_like(snr)}[prediction_type]
    weight = loss_weight(Objective(prediction_type=prediction_type, min_snr_gamma=5.0), alpha_bar=alpha_bar)
    torch.testing.assert_close(weight * squared, snr.clamp(max=5.0))


def test_settings_that_do_not_fit_the_path_are_refused():
    """The files in tests/config/golden/mistakes have the other messages."""
    with pytest.raises(UserError, match="^prediction_type: 'eps'; use one of epsilon, v_prediction, sample for path"):
        Objective(prediction_type='eps')  # type: ignore[arg-type]


QUANTILES = torch.arange(200_000, dtype=torch.float64).add(0.5) / 200_000
"""Evenly spaced numbers in (0, 1), in place of random ones, whose statistics would vary."""


def test_flow_is_a_straight_line_whose_derivative_is_the_target():
    latents, noise = torch.randn(2, 5, 4, 8, 8, dtype=torch.float64).unbind()
    time = torch.rand(5, dtype=torch.float64).mul(0.9).requires_grad_()
    moved = interpolate(latents, noise, time=time)
    assert torch.equal(interpolate(latents, noise, time=torch.zeros(5)), latents)
    assert torch.equal(interpolate(latents, noise, time=torch.ones(5)), noise)
    (slope,) = torch.autograd.grad(moved[:, 0, 0, 0].sum(), time)
    torch.testing.assert_close(slope, target(Objective(**FLOW), latents, noise)[:, 0, 0, 0])


def test_error_in_x_is_weighted_as_one_in_the_velocity():
    objective = Objective(path='flow', prediction_type='sample')
    latents, noise, error = torch.randn(3, 7, 4, 8, 8, dtype=torch.float64).unbind()
    time = torch.linspace(0.05, 1, 7, dtype=torch.float64)
    noisy = interpolate(latents, noise, time=time)
    assert torch.equal(target(objective, latents, noise), latents)
    velocities = [
        flow_velocity(objective, latents[i] + error[i], noisy[i], time=time[i]) - (noise - latents)[i] for i in range(7)
    ]
    weighted = flow_loss_weight(objective, time=time) * error.square().flatten(1).mean(1)
    torch.testing.assert_close(weighted, torch.stack(velocities).square().flatten(1).mean(1))
    assert flow_loss_weight(objective, time=torch.tensor([0.0])).item() == pytest.approx(400), 'bounded at t = 0.05'
    assert flow_loss_weight(Objective(**FLOW), time=time).eq(1).all()
    assert flow_velocity(Objective(**FLOW), error, noisy, time=time[0]) is error


@pytest.mark.parametrize(('mean', 'std', 'fraction', 'shift'), [(0, 1, 0, 1), (0.5, 0.8, 0, 1), (0, 1, 0.2, 3)])
def test_logit_normal_times_have_their_distribution(mean, std, fraction, shift):
    """The share of times below a bound is the distribution function of the normal distribution, undoing the shift.

    The uniform part is not shifted: its share below a bound is the bound.
    """
    objective = Objective(**LOGIT_NORMAL, logit_mean=mean, logit_std=std, uniform_fraction=fraction, snr_shift=shift)
    times = objective.time_of(QUANTILES)
    for time in (0.05, 0.3, 0.5, 0.7, 0.95):
        unshifted = time / (shift - (shift - 1) * time)
        logit = torch.logit(torch.tensor(unshifted, dtype=torch.float64))
        normal = torch.special.ndtr((logit - mean) / std).item()
        assert times.lt(time).double().mean().item() == pytest.approx(
            fraction * time + (1 - fraction) * normal, abs=1e-4
        )
    assert times.gt(0).all() and times.lt(1).all()


def test_all_times_may_be_uniform_and_extreme_quantiles_are_finite():
    only_uniform = Objective(**LOGIT_NORMAL, uniform_fraction=1.0, snr_shift=3.0)
    torch.testing.assert_close(only_uniform.time_of(QUANTILES), QUANTILES)
    ends = Objective(**LOGIT_NORMAL).time_of(torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert ends.tolist() == pytest.approx([0.001765, 1 - 0.001765], abs=1e-5), 'the times of 2**-33 and 1 - 2**-33'


def test_shift_is_that_of_diffusers_and_divides_the_snr():
    shifted = Objective(**FLOW, snr_shift=3.0)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    uniform = torch.arange(1, 1001, dtype=torch.float64) / 1000
    torch.testing.assert_close(shifted.time_of(uniform).flip(0).float(), scheduler.sigmas, rtol=1e-6, atol=1e-7)
    time = shifted.time_of(torch.tensor([0.25], dtype=torch.float64))
    assert ((1 - time) / time).square().item() == pytest.approx((0.75 / 0.25) ** 2 / 9)
