"""Sampling of latents: the denoising loop, guided predictions, and inference schedulers.

Shapes: B images, C latent channels, H W latent size, L text tokens, D text width.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers.schedulers
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diffusion.config.sampling_checks import (
    guidance_problem,
    rescale_problem,
    scheduler_class_name,
    scheduler_problem,
    seeds_problem,
    shift_problem,
    steps_problem,
)
from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition
from diffusion.models.guidance import Guidance
from diffusion.models.objective import MIN_TIME, Objective, flow_velocity, space_coefficients

Predict = Callable[[Tensor, Tensor, Condition], Tensor]
"""Function that maps noisy latents [B, C, H, W], timesteps [B] and a condition to the denoiser's prediction."""
Denoise = Callable[[Tensor, Tensor], Tensor]
"""Function that maps noisy latents [B, C, H, W] and a timestep [] to a prediction [B, C, H, W]."""


@dataclass(frozen=True)
class LatentGrid:
    """Relation between an image's size in pixels and the size of its latents."""

    channels: int
    """C, number of latent channels."""
    cell: int
    """Side of a latent cell in pixels."""
    patch: int
    """The sides of latents must be multiples of this number of cells, such as a patch size; 1 allows any size."""
    default_side: int
    """Side in latent cells of images that are generated without a given size."""

    def shape(self, size: tuple[int, int] | None) -> tuple[int, int, int]:
        """Return C, H and W of the latents for a height and width in pixels; None uses the default size."""
        height, width = size or (self.default_side * self.cell,) * 2
        unit = self.cell * self.patch
        if min(height, width) <= 0 or height % unit or width % unit:
            what = 'latent cell' if unit == self.cell else 'patch of the denoiser'
            raise UserError(f'size: {height}x{width}; use positive multiples of {unit} px, the size of a {what}')
        return self.channels, height // self.cell, width // self.cell

    def check_patches(self, height: int, width: int) -> None:
        if height % self.patch or width % self.patch:
            raise UserError(
                f"streams: latents of {width}x{height} cells do not divide into the denoiser's patches of "
                f'{self.patch}x{self.patch}; use images whose sides are multiples of {self.patch * self.cell} px'
            )

    def check_noise(self, latents: Tensor, size: tuple[int, int] | None, count: int) -> None:
        """Raise UserError unless `latents` are initial noise for `count` images of a size that the VAE can decode."""
        if latents.ndim != 4 or tuple(latents.shape[:2]) != (count, self.channels) or 0 in latents.shape:
            raise UserError(
                f'latents: shape {tuple(latents.shape)}; pass noise of shape [{count}, {self.channels}, height / '
                f'{self.cell}, width / {self.cell}], one entry per prompt'
            )
        if size is not None and self.shape(size)[1:] != tuple(latents.shape[2:]):
            height, width = (side * self.cell for side in latents.shape[2:])
            raise UserError(
                f'size: {size[0]}x{size[1]}, but latents of shape {tuple(latents.shape)} give images of '
                f'{height}x{width} px; pass only one of the two'
            )


def inference_scheduler(name: str, objective: Objective) -> Any:
    """Return the diffusers scheduler with this short or class name, configured with the objective's noise schedule."""
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


def export_scheduler(objective: Objective) -> Any:
    """Return the scheduler for an exported pipeline: Euler's for velocity flows, DPM++ for other flows, else DDIM."""
    # FlowMatchEulerDiscreteScheduler only supports velocities.
    takes_velocity = objective.prediction_type == 'velocity'
    return inference_scheduler('euler' if takes_velocity else 'dpm++' if objective.is_flow else 'ddim', objective)


def scheduler_class(name: str, *, flow: bool = False) -> Any:
    """Return a diffusers scheduler class by short or class name; UserError if unknown or not for this kind of model.

    `flow`: True for a model trained with flow matching, False for a diffusion model.
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
    even_times: bool = False,
) -> Tensor:
    """Denoise initial noise to latents [B, C, H, W]; schedulers that draw noise at each step use one seed per image.

    `even_times`: Use times evenly spaced in [0, 1] before the shift in Euler's method for flows. Otherwise it uses the
    times of diffusers' pipelines, which shift the last step's time, 1/1000, twice.
    """
    kind = type(scheduler)
    if even_times and issubclass(kind, FlowMatchEulerDiscreteScheduler):
        times = [1 - step / num_inference_steps for step in range(num_inference_steps)]
        scheduler.set_timesteps(sigmas=times, device=noise.device)
    else:
        scheduler.set_timesteps(num_inference_steps, device=noise.device)
    extra: dict[str, Any] = {}
    if 'generator' in inspect.signature(scheduler.step).parameters:
        # Use one generator per image, on the CPU, so that the noise depends neither on other images nor on the device.
        extra['generator'] = [torch.Generator().manual_seed(seed) for seed in seeds]
    # Schedulers for flow matching lack init_noise_sigma and scale_model_input: they scale neither noise nor input.
    latents = noise * getattr(scheduler, 'init_noise_sigma', 1.0)
    scale = getattr(scheduler, 'scale_model_input', lambda latents, timestep: latents)
    for timestep in scheduler.timesteps:
        prediction = denoise(scale(latents, timestep), timestep)
        latents = scheduler.step(prediction, timestep, latents, **extra).prev_sample
    return latents


def guided_denoiser(
    predict: Predict,
    condition: Condition,
    scheduler: Any,
    objective: Objective,
    *,
    guidance: Guidance,
    scale: float,
    rescale: float = 0.0,
    unconditional: Condition | None = None,
    weak: Predict | None = None,
) -> Denoise:
    """Return the function that `sample_latents` calls: the guided prediction, converted to what the scheduler expects.

    Args:
        predict: The denoiser's prediction.
        condition: Condition for the prompts.
        guidance: How the weak and the strong prediction are combined.
        scale: Guidance scale; 1 or less turns guidance off.
        rescale: Strength of guidance rescaling; see `rescaled`.
        unconditional: Condition of the weak prediction; not needed without guidance or with `weak`.
        weak: Prediction of a weaker model for the same condition, which replaces the unconditional prediction,
            or None.
    """
    # Schedulers for flow matching expect the velocity, whatever the denoiser predicts.
    takes_velocity = objective.is_flow and 'prediction_type' not in scheduler.config
    # For x-prediction, the published Euler method (Li and He 2025; diffusers' PRXPixelPipeline) divides by at least
    # MIN_TIME, as training does. Heun's method also uses the velocity near t = 0, which this minimum would shrink.
    min_time = MIN_TIME if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else 0.0

    # Compute the unconditional and the conditional prediction in one pass with twice the batch size.
    both = None if unconditional is None else unconditional.followed_by(condition)
    combine = guidance.start(scale)
    low, high = guidance.interval or (-math.inf, math.inf)

    def denoise(noisy: Tensor, timestep: Tensor) -> Tensor:
        time, timesteps = timestep / objective.num_train_timesteps, timestep.expand(len(noisy))
        # Read the time only if needed: reading it waits for the GPU.
        if scale <= 1 or (guidance.interval is not None and not low < float(time) <= high):
            prediction = predict(noisy, timesteps, condition).float()
        else:
            if weak is not None:
                strong, weaker = (each(noisy, timesteps, condition).float() for each in (predict, weak))
            else:
                assert both is not None, 'unconditional guidance needs its condition'
                found = predict(torch.cat([noisy, noisy]), timesteps.repeat(2), both).float()
                weaker, strong = found.chunk(2)
            if guidance.space is None:
                prediction = combine(weaker, strong)
            else:
                shift, factor = space_coefficients(objective, guidance.space, timestep)
                guided = combine(*(shift * noisy + factor * each for each in (weaker, strong)))
                prediction = (guided - shift * noisy) / factor
            prediction = rescaled(prediction, strong, strength=rescale)
        if not takes_velocity:
            return prediction
        return flow_velocity(objective, prediction, noisy, time=time, min_time=min_time)

    return denoise


def rescaled(guided: Tensor, conditional: Tensor, *, strength: float) -> Tensor:
    """Return a guided prediction with the standard deviation of the conditional one, [B, C, H, W].

    `strength` in [0, 1] is its weight in a mix with the unchanged one (Lin et al. 2024, eq. 15 and 16; they use 0.7).
    """
    if strength == 0:
        return guided
    dims = tuple(range(1, guided.ndim))
    # A velocity of 0 (CFG-Zero*) stays 0.
    matched = guided * (conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True).clamp(min=1e-12))
    return strength * matched + (1 - strength) * guided


def as_captions(prompts: Sequence[str]) -> list[str]:
    """Return prompts, a sequence of strings, as a list; raise UserError if it is empty or a single string."""
    # A string is also a sequence of strings, and would give one image per letter.
    if isinstance(prompts, str):
        raise UserError(f'prompts: pass a list of captions, such as [{prompts!r}], instead of one string')
    captions = list(prompts)
    if not captions:
        raise UserError('prompts: pass at least one caption')
    return captions


def check_sampling(
    seeds: Sequence[int],
    num_inference_steps: int,
    objective: Objective,
    *,
    scale: float,
    rescale: float,
    shift: float | None,
) -> None:
    problems = {
        'seeds': next((problem for seed in seeds if (problem := seeds_problem(seed)) is not None), None),
        'num_inference_steps': steps_problem(num_inference_steps, objective.num_train_timesteps),
        'guidance_scale': guidance_problem(scale),
        'guidance_rescale': rescale_problem(rescale),
        'snr_shift': shift_problem(shift, flow=objective.is_flow),
    }
    for where, problem in problems.items():
        if problem is not None:
            raise UserError(f'{where}: {problem}')
