"""Training objective: the denoiser's target, the noise schedule and the loss weighting.

Shapes: B batch, C latent channels, H W latent size, T timesteps of the schedule.
`alpha_bar` is the fraction of signal variance left at a timestep: x_t = sqrt(alpha_bar) x + sqrt(1 - alpha_bar) eps.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffusion.errors import UserError

PREDICTION_TYPES = ('epsilon', 'v_prediction', 'sample')
BETA_SCHEDULES = ('scaled_linear', 'linear', 'cosine')
TIMESTEPS = ('uniform', 'stratified')


@dataclass(frozen=True)
class Objective:
    """Settings of the training objective; the defaults are Stable Diffusion 2's."""

    prediction_type: Literal['epsilon', 'v_prediction', 'sample'] = 'epsilon'
    """Predict the noise, v = sqrt(a) eps - sqrt(1 - a) x (Salimans and Ho 2022), or the clean latents."""
    beta_schedule: Literal['scaled_linear', 'linear', 'cosine'] = 'scaled_linear'
    """scaled_linear: linear in sqrt(beta) (Rombach et al. 2022); cosine: Nichol and Dhariwal 2021."""
    beta_start: float = 0.00085
    """First beta; the cosine schedule has none."""
    beta_end: float = 0.012
    """Last beta; the cosine schedule has none."""
    num_train_timesteps: int = 1000
    """T, steps of the noise schedule."""
    zero_terminal_snr: bool = False
    """Rescale so that the last step is pure noise (Lin et al. 2024); needs v_prediction or sample."""
    min_snr_gamma: float | None = None
    """Weight the loss by min(SNR, gamma) in terms of x (Hang et al. 2023); 5 is their value."""
    offset_noise: float = 0.0
    """Standard deviation of a constant per channel added to the noise; 0.1 is common."""
    snr_shift: float = 1.0
    """Divide the SNR by shift**2, where shift is the image side over the base resolution's side (Hoogeboom et al. 2023,
    eq. 5)."""
    timesteps: Literal['uniform', 'stratified'] = 'uniform'
    """uniform: drawn independently for each sample; stratified: one in each of N equal parts of the schedule for the N
    samples of a global batch, so that losses vary less between batches (the low-discrepancy sampler of Kingma et al.
    2021)."""

    def __post_init__(self) -> None:
        if self.prediction_type not in PREDICTION_TYPES:
            raise UserError(f'prediction_type: {self.prediction_type!r}; use one of {", ".join(PREDICTION_TYPES)}')
        if self.beta_schedule not in BETA_SCHEDULES:
            raise UserError(f'beta_schedule: {self.beta_schedule!r}; use one of {", ".join(BETA_SCHEDULES)}')
        if self.timesteps not in TIMESTEPS:
            raise UserError(f'timesteps: {self.timesteps!r}; use one of {", ".join(TIMESTEPS)}')
        if self.zero_terminal_snr and self.prediction_type == 'epsilon':
            raise UserError(
                'zero_terminal_snr: epsilon does not determine x at zero SNR; use prediction_type: v_prediction'
            )
        if self.min_snr_gamma is not None and self.min_snr_gamma <= 0:
            raise UserError(f'min_snr_gamma: {self.min_snr_gamma} is not positive; use 5, or null to turn it off')
        if self.snr_shift <= 0:
            raise UserError(f'snr_shift: {self.snr_shift} is not positive; use 1 to leave the schedule unchanged')

    def betas(self) -> Tensor:
        """Return the noise variance that each step of the schedule adds, float64 [T], after shift and rescaling."""
        alpha_bars = self.alpha_bars()
        previous = torch.cat([alpha_bars.new_ones(1), alpha_bars[:-1]])
        return 1 - alpha_bars / previous

    def alpha_bars(self) -> Tensor:
        """Return the fraction of signal variance left after each step of the schedule, float64 [T], decreasing."""
        alpha_bars = torch.cumprod(1 - self._plain_betas(), dim=0)
        if self.snr_shift != 1:
            alpha_bars = alpha_bars / (alpha_bars + self.snr_shift**2 * (1 - alpha_bars))
        return rescale_to_zero_terminal_snr(alpha_bars) if self.zero_terminal_snr else alpha_bars

    def scheduler_config(self) -> dict[str, Any]:
        """Return keywords for diffusers' scheduler classes that reproduce the noise schedule of training."""
        config: dict[str, Any] = {
            'num_train_timesteps': self.num_train_timesteps,
            'prediction_type': self.prediction_type,
            'clip_sample': False,
            'set_alpha_to_one': False,
            'steps_offset': 1,
            'skip_prk_steps': True,
        }
        if self.zero_terminal_snr:
            # Sampling must start at the step without signal, or its training is wasted (Lin et al. 2024).
            config |= {'timestep_spacing': 'trailing', 'rescale_betas_zero_snr': True}
        if self.snr_shift != 1:
            unrescaled = Objective(**{**vars(self), 'zero_terminal_snr': False})
            return config | {'trained_betas': unrescaled.betas().tolist()}
        schedule = 'squaredcos_cap_v2' if self.beta_schedule == 'cosine' else self.beta_schedule
        return config | {'beta_schedule': schedule, 'beta_start': self.beta_start, 'beta_end': self.beta_end}

    def _plain_betas(self) -> Tensor:
        """Return the noise variances of the steps before SNR shift and zero-terminal-SNR rescaling, float64 [T]."""
        # On the CPU also under torch.device('meta'), where models are built to be counted.
        steps = self.num_train_timesteps
        if self.beta_schedule == 'linear':
            return torch.linspace(self.beta_start, self.beta_end, steps, dtype=torch.float64, device='cpu')
        if self.beta_schedule == 'scaled_linear':
            return (
                torch.linspace(self.beta_start**0.5, self.beta_end**0.5, steps, dtype=torch.float64, device='cpu') ** 2
            )
        times = torch.arange(steps + 1, dtype=torch.float64, device='cpu') / steps
        alpha_bars = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
        return (1 - alpha_bars[1:] / alpha_bars[:-1]).clamp(max=0.999)


def rescale_to_zero_terminal_snr(alpha_bars: Tensor) -> Tensor:
    """Shift and scale sqrt(alpha_bar) so that the last value is 0 and the first unchanged (Lin et al. 2024, alg. 1)."""
    roots = alpha_bars.sqrt()
    return ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2


def diffuse(latents: Tensor, noise: Tensor, *, alpha_bar: Tensor) -> Tensor:
    """Add noise to latents: x_t = sqrt(alpha_bar) x + sqrt(1 - alpha_bar) noise, [B, C, H, W]; alpha_bar is [B]."""
    alpha_bar = _per_sample(alpha_bar, latents)
    return alpha_bar.sqrt() * latents + (1 - alpha_bar).sqrt() * noise


def velocity(latents: Tensor, noise: Tensor, *, alpha_bar: Tensor) -> Tensor:
    """Return the target of v-prediction, v = sqrt(a) eps - sqrt(1 - a) x (Salimans and Ho 2022)."""
    alpha_bar = _per_sample(alpha_bar, latents)
    return alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * latents


def target(objective: Objective, latents: Tensor, noise: Tensor, *, alpha_bar: Tensor) -> Tensor:
    """Return the denoiser's training target, [B, C, H, W]: noise, latents or velocity, by the prediction type."""
    if objective.prediction_type == 'epsilon':
        return noise
    if objective.prediction_type == 'sample':
        return latents
    return velocity(latents, noise, alpha_bar=alpha_bar)


def loss_weight(objective: Objective, *, alpha_bar: Tensor) -> Tensor:
    """Return the weight of each sample's squared error in the training loss, [B]; ones without min-SNR.

    Min-SNR (Hang et al. 2023) clips the weight of an error in x to min(SNR, gamma). The weight is converted to the
    space of the prediction: an error in x is 1/sqrt(SNR) of one in epsilon and 1/sqrt(SNR + 1) of one in v.
    """
    if objective.min_snr_gamma is None:
        return torch.ones_like(alpha_bar)
    snr = alpha_bar / (1 - alpha_bar)
    clipped = snr.clamp(max=objective.min_snr_gamma)
    if objective.prediction_type == 'epsilon':
        return clipped / snr
    if objective.prediction_type == 'v_prediction':
        return clipped / (snr + 1)
    return clipped


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values [B] so that they broadcast with a tensor [B, ...], and convert them to the tensor's dtype."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like.dtype)
