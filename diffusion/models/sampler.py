"""Sampling of latents: the denoising loop, classifier-free guidance, and inference schedulers.

Shapes: B images, C latent channels, H W latent size, L text tokens, D text width.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import diffusers.schedulers
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diffusion.config.sampling_checks import scheduler_class_name, scheduler_problem
from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition
from diffusion.models.objective import MIN_TIME, Objective, flow_velocity

Denoise = Callable[[Tensor, Tensor], Tensor]
"""Function from noisy latents [B, C, H, W] and a timestep [] to a prediction [B, C, H, W]."""


def inference_scheduler(name: str, objective: Objective) -> Any:
    """Return one of diffusers' schedulers with the noise schedule that the model was trained on.

    Args:
        name: Short name, such as `ddim`, or class name in diffusers.
        objective: Training objective of the model.

    Raises:
        UserError: The scheduler does not exist, does not support the schedule, or needs a package that is missing.
    """
    found = scheduler_class(name, flow=objective.is_flow)
    accepted = inspect.signature(found.__init__).parameters
    config = objective.scheduler_config()
    if objective.zero_terminal_snr and 'rescale_betas_zero_snr' not in accepted:
        raise UserError(
            f'noise_scheduler: {name} has no rescale_betas_zero_snr, which this model (zero_terminal_snr) needs; '
            'use ddim'
        )
    if 'trained_betas' in config and 'trained_betas' not in accepted:
        raise UserError(f'noise_scheduler: {name} has no trained_betas, which this model (snr_shift) needs; use ddim')
    try:
        return found(**{key: value for key, value in config.items() if key in accepted})
    except ImportError as error:
        raise UserError(
            f'noise_scheduler: {name} needs a package that is missing ({str(error).strip()}); install it, or use ddim'
        ) from error


def scheduler_class(name: str, *, flow: bool = False) -> Any:
    """Return a scheduler class by short name (`ddim`, `dpm++`, `euler`, ...) or by its class name in diffusers.

    Args:
        flow: True for a model that is trained on a flow, False for diffusion.

    Raises:
        UserError: The scheduler does not exist, or does not support this kind of model.
    """
    if (problem := scheduler_problem(name, flow=flow)) is not None:
        raise UserError(f'noise_scheduler: {problem}')
    return getattr(diffusers.schedulers, scheduler_class_name(name, flow=flow))


def sample_latents(
    denoise: Denoise,
    scheduler: Any,
    noise: Tensor,
    *,
    num_inference_steps: int,
    seeds: Sequence[int],
) -> Tensor:
    """Generate latents [B, C, H, W] by denoising pure noise step by step.

    Args:
        denoise: Function from noisy latents and a timestep to the guided prediction.
        scheduler: One of diffusers' schedulers.
        noise: Initial noise, standard normal.
        num_inference_steps: Steps of the scheduler.
        seeds: One seed per image, for schedulers that add noise in each step.
    """
    scheduler.set_timesteps(num_inference_steps, device=noise.device)
    extra: dict[str, Any] = {}
    if 'generator' in inspect.signature(scheduler.step).parameters:
        # Use one generator per image, on the CPU, so that its noise depends neither on other images nor on the device.
        extra['generator'] = [torch.Generator().manual_seed(seed) for seed in seeds]
    # Schedulers that are only for flows start from plain noise and do not scale the input.
    latents = noise * getattr(scheduler, 'init_noise_sigma', 1.0)
    scale = getattr(scheduler, 'scale_model_input', lambda latents, timestep: latents)
    for timestep in scheduler.timesteps:
        prediction = denoise(scale(latents, timestep), timestep)
        latents = scheduler.step(prediction, timestep, latents, **extra).prev_sample
    return latents


def guided_denoiser(
    predict: Callable[[Tensor, Tensor, Condition], Tensor],
    condition: Condition,
    scheduler: Any,
    objective: Objective,
    *,
    scale: float,
    rescale: float = 0.0,
) -> Denoise:
    """Return the function that `sample_latents` calls: the guided prediction in the form that a scheduler takes.

    Args:
        predict: Function from noisy latents, timesteps [B] and a condition to the denoiser's prediction.
        condition: Condition of the prompts. With guidance, the batch starts with the unconditional condition.
        scheduler: One of diffusers' schedulers.
        objective: Training objective of the model.
        scale: Guidance scale; 1 or less turns guidance off.
        rescale: Strength of guidance rescaling; see `guide`.
    """
    # Schedulers that are only for flows take the velocity, whatever the denoiser predicts.
    takes_velocity = objective.is_flow and 'prediction_type' not in scheduler.config
    # Euler's method as published for x-prediction (Li and He 2025; PRXPixelPipeline of diffusers) bounds t as training
    # does. Heun's second step needs the velocity close to t = 0, where the bound would stop it halfway.
    min_time = MIN_TIME if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else 0.0

    def denoise(noisy: Tensor, timestep: Tensor) -> Tensor:
        if scale <= 1:
            prediction = predict(noisy, timestep.expand(len(noisy)), condition).float()
        else:
            both = torch.cat([noisy, noisy])
            both = predict(both, timestep.expand(len(both)), condition).float()
            prediction = guide(*both.chunk(2), scale=scale, rescale=rescale)
        if not takes_velocity:
            return prediction
        time = timestep / objective.num_train_timesteps
        return flow_velocity(objective, prediction, noisy, time=time, min_time=min_time)

    return denoise


def guide(unconditional: Tensor, conditional: Tensor, *, scale: float, rescale: float = 0.0) -> Tensor:
    """Return the guided prediction of classifier-free guidance (Ho and Salimans 2022), [B, C, H, W].

    Args:
        unconditional: Prediction for the negative prompt.
        conditional: Prediction for the prompt.
        scale: Guidance scale; 1 is no guidance.
        rescale: Interpolation in [0, 1] towards a result with the standard deviation of `conditional` (Lin et al. 2024,
            equations 15 and 16, who use 0.7).
    """
    guided = unconditional + scale * (conditional - unconditional)
    if rescale == 0:
        return guided
    dims = tuple(range(1, guided.ndim))
    matched = guided * (conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True))
    return rescale * matched + (1 - rescale) * guided
