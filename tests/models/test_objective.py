"""Noise schedules and targets against diffusers and against closed forms from the papers."""

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from diffusion.models.objective import Objective, diffuse, loss_weight, target

SCHEDULES = ['scaled_linear', 'linear', 'cosine']


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_schedule_matches_diffusers(schedule):
    objective = Objective(beta_schedule=schedule)
    reference = DDPMScheduler(
        **{
            k: v
            for k, v in objective.scheduler_config().items()
            if 'steps_' not in k and k != 'skip_prk_steps' and k != 'set_alpha_to_one'
        }
    )
    torch.testing.assert_close(objective.alpha_bars().float(), reference.alphas_cumprod, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_zero_terminal_snr_ends_at_zero_and_matches_diffusers(schedule):
    objective = Objective(beta_schedule=schedule, zero_terminal_snr=True, prediction_type='v_prediction')
    alpha_bars = objective.alpha_bars()
    assert alpha_bars[-1] == 0
    assert alpha_bars[0] == pytest.approx(Objective(beta_schedule=schedule).alpha_bars()[0].item())
    config = objective.scheduler_config()
    del config['skip_prk_steps']
    torch.testing.assert_close(DDIMScheduler(**config).alphas_cumprod, alpha_bars.float(), rtol=2e-3, atol=1e-6)


def test_shift_divides_the_snr_by_shift_squared():
    snr = [a / (1 - a) for a in (Objective().alpha_bars(), Objective(snr_shift=2).alpha_bars())]
    torch.testing.assert_close(snr[0] / snr[1], torch.full((1000,), 4.0, dtype=torch.float64))
    config = Objective(snr_shift=2).scheduler_config()
    del config['skip_prk_steps']
    torch.testing.assert_close(
        DDIMScheduler(**config).alphas_cumprod.double(), Objective(snr_shift=2).alpha_bars(), rtol=1e-4, atol=1e-6
    )


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


def test_min_snr_with_zero_terminal_snr_is_finite():
    objective = Objective(prediction_type='v_prediction', zero_terminal_snr=True, min_snr_gamma=5.0)
    assert loss_weight(objective, alpha_bar=objective.alpha_bars()).isfinite().all()


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'prediction_type': 'eps'}, "prediction_type: 'eps'; use one of epsilon"),
        ({'beta_schedule': 'sqrt'}, "beta_schedule: 'sqrt'; use one of scaled_linear"),
        ({'zero_terminal_snr': True}, 'zero_terminal_snr: .* use prediction_type: v_prediction'),
        ({'min_snr_gamma': 0.0}, 'min_snr_gamma: 0.0 is not positive'),
        ({'snr_shift': -1.0}, 'snr_shift: -1.0 is not positive'),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)
