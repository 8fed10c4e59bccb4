"""Training objective: how noise is mixed with the latents, the denoiser's target, and the loss weighting.

Shapes: B batch, C latent channels, H W latent size, T timesteps of the schedule.
Diffusion: x_t = sqrt(alpha_bar) x + sqrt(1 - alpha_bar) eps, where alpha_bar is the fraction of signal variance left.
Flow: x_t = (1 - t) x + t eps with time t in [0, 1]; its timesteps are t * T, as in diffusers.
"""

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_origin, get_type_hints

import torch
from torch import Tensor

from diffusion.config.declarations import check_arguments
from diffusion.config.model_checks import objective_problems
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.randomness import Draws, Purpose

Space = Literal['sample', 'velocity']
"""Space of a prediction: the clean latents, or a flow's velocity."""
MIN_TIME = 0.05
"""Lower bound of t when an error in x is converted to one in velocity by dividing by t (Li and He 2025)."""


@dataclass(frozen=True)
class Objective:
    """Settings of the training objective; the defaults are Stable Diffusion 2's."""

    path: Literal['diffusion', 'flow'] = 'diffusion'
    """diffusion: noise by a schedule of betas; flow: x_t = (1 - t) x + t eps, a straight line (flow matching, Lipman et
    al. 2023; rectified flow, Liu et al. 2023)."""
    prediction_type: Literal['epsilon', 'v_prediction', 'sample', 'velocity'] = 'epsilon'
    """Predict the noise, v = sqrt(a) eps - sqrt(1 - a) x (Salimans and Ho 2022), or the clean latents. A flow predicts
    its velocity eps - x, or the clean latents with the loss on the velocity (Li and He 2025)."""
    beta_schedule: Literal['scaled_linear', 'linear', 'cosine'] = 'scaled_linear'
    """scaled_linear: linear in sqrt(beta) (Rombach et al. 2022); cosine: Nichol and Dhariwal 2021."""
    beta_start: float = 0.00085
    """First beta; the cosine schedule has none."""
    beta_end: float = 0.012
    """Last beta; the cosine schedule has none."""
    num_train_timesteps: int = 1000
    """T, the number of steps of the noise schedule; with flow matching, the denoiser's timestep for pure noise."""
    zero_terminal_snr: bool = False
    """Rescale the schedule so that the last step is pure noise (Lin et al. 2024). Requires v_prediction or sample, and
    no min_snr_gamma."""
    min_snr_gamma: float | None = None
    """Weight the loss in x by min(SNR, gamma) (Hang et al. 2023, who use 5). It cannot be combined with
    zero_terminal_snr, because the step without signal would get the weight 0."""
    offset_noise: float = 0.0
    """Standard deviation of an additional noise that is constant in each channel; 0.1 is common."""
    noise_scale: float = 1.0
    """Standard deviation of a flow's noise; 2 for pixels, as in PRX's published pixel run."""
    snr_shift: float = 1.0
    """Divide the SNR by shift**2, where shift is the image side over the base resolution's side (Hoogeboom et al. 2023,
    eq. 5). For a flow this is the timestep shift of Esser et al. 2024, eq. 23, who use 3 at 1024 px."""
    timesteps: Literal['uniform', 'stratified', 'logit_normal'] = 'uniform'
    """uniform: drawn independently for each sample; stratified: for a global batch of N samples, one in each of N equal
    parts of the schedule, so that losses vary less between batches (the low-discrepancy sampler of Kingma et al. 2021);
    logit_normal, for a flow: mostly from the middle (Esser et al. 2024, eq. 19)."""
    logit_mean: float = 0.0
    """Mean of logit(t) for logit_normal timesteps; larger means more noise."""
    logit_std: float = 1.0
    """Standard deviation of logit(t) for logit_normal timesteps."""
    uniform_fraction: float = 0.0
    """Fraction of logit_normal timesteps that are drawn uniformly instead, so that both ends of the schedule are
    trained too. `snr_shift` does not apply to them, as in PRX's training code."""

    def __post_init__(self) -> None:
        hints = get_type_hints(Objective)
        # Skip Literal fields: `objective_problems` checks them, and lists only the choices that are valid for `path`.
        check_arguments({key: hint for key, hint in hints.items() if get_origin(hint) is not Literal}, vars(self))
        defaults = {each.name: each.default for each in fields(Objective) if each.default is not MISSING}
        for key, problem in objective_problems(vars(self), defaults).items():
            raise UserError(f'{key}: {problem}')

    @property
    def is_flow(self) -> bool:
        """True for flow matching, False for diffusion."""
        return self.path == 'flow'

    def time_of(self, quantiles: Tensor) -> Tensor:
        """Return a flow's times t for uniform random numbers in [0, 1), float64 [B], one time per number."""
        if self.timesteps != 'logit_normal':
            return self._shifted(quantiles)
        # Quantiles below the uniform fraction give uniform times; the others are stretched to [0, 1) for the
        # logit-normal.
        share = self.uniform_fraction
        rest = (quantiles - share) / (1 - share)
        # Stay away from 0 and 1, whose normal quantiles are infinite.
        normal = torch.special.ndtri(rest.clamp(2.0**-33, 1 - 2.0**-33))
        times = self._shifted(torch.sigmoid(self.logit_mean + self.logit_std * normal))
        # The uniform part is not shifted, as in PRX: with a shift of 3, t < 0.05 would be drawn a third as often.
        return torch.where(quantiles < share, quantiles / share, times) if share else times

    def _shifted(self, times: Tensor) -> Tensor:
        """Return a flow's times shifted by `snr_shift` (Esser et al. 2024, eq. 23)."""
        return self.snr_shift * times / (1 + (self.snr_shift - 1) * times)

    def betas(self) -> Tensor:
        """Return the noise variance added by each step of the schedule, float64 [T], after shift and rescaling."""
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
        """Return keyword arguments with which diffusers' schedulers reproduce the noise schedule of training."""
        if self.is_flow:
            prediction = 'sample' if self.prediction_type == 'sample' else 'flow_prediction'
            # steps_offset has no effect on a flow, but a StableDiffusionPipeline warns about values other than 1.
            flow = {'shift': self.snr_shift, 'use_flow_sigmas': True, 'flow_shift': self.snr_shift, 'steps_offset': 1}
            return flow | {'num_train_timesteps': self.num_train_timesteps, 'prediction_type': prediction}
        config: dict[str, Any] = {
            'num_train_timesteps': self.num_train_timesteps,
            'prediction_type': self.prediction_type,
            'clip_sample': False,
            'set_alpha_to_one': False,
            'steps_offset': 1,
            'skip_prk_steps': True,
        }
        if self.zero_terminal_snr:
            # Sampling must start at the step without signal, otherwise training that step is wasted (Lin et al. 2024).
            config |= {'timestep_spacing': 'trailing', 'rescale_betas_zero_snr': True}
        if self.snr_shift != 1:
            unrescaled = Objective(**{**vars(self), 'zero_terminal_snr': False})
            return config | {'trained_betas': unrescaled.betas().tolist()}
        schedule = 'squaredcos_cap_v2' if self.beta_schedule == 'cosine' else self.beta_schedule
        return config | {'beta_schedule': schedule, 'beta_start': self.beta_start, 'beta_end': self.beta_end}

    def _plain_betas(self) -> Tensor:
        """Return the noise variances of the steps, float64 [T], before SNR shift and zero-terminal-SNR rescaling."""
        # Compute on the CPU even under torch.device('meta'), which is set while models are built only to be counted.
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


def interpolate(latents: Tensor, noise: Tensor, *, time: Tensor) -> Tensor:
    """Add noise to latents along a flow: x_t = (1 - t) x + t noise, [B, C, H, W]; time is [B]."""
    time = _per_sample(time, latents)
    return (1 - time) * latents + time * noise


def target(objective: Objective, latents: Tensor, noise: Tensor, *, alpha_bar: Tensor | None = None) -> Tensor:
    """Return the target of the denoiser's prediction, [B, C, H, W]; only `v_prediction` needs `alpha_bar`."""
    if objective.prediction_type == 'epsilon':
        return noise
    if objective.prediction_type == 'sample':
        return latents
    if objective.is_flow:
        return noise - latents
    assert alpha_bar is not None
    return velocity(latents, noise, alpha_bar=alpha_bar)


def loss_weight(objective: Objective, *, alpha_bar: Tensor) -> Tensor:
    """Return the weight of each sample's squared error in the diffusion loss, [B]; all 1 without min-SNR.

    Min-SNR (Hang et al. 2023) clips the weight of an error in x to min(SNR, gamma). The weight is converted to the
    space of the prediction: an error in x equals the error in epsilon divided by sqrt(SNR), or the error in v divided
    by sqrt(SNR + 1).
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


def flow_loss_weight(objective: Objective, *, time: Tensor) -> Tensor:
    """Return the weights, [B], that convert the samples' squared errors to errors in the velocity, a flow's loss.

    It is 1 for a predicted velocity and 1 / t^2 for a predicted x, since an error d in x is an error d / t in the
    velocity (x_t - x) / t. Here t is at least MIN_TIME.
    """
    return time.clamp(min=MIN_TIME) ** -2 if objective.prediction_type == 'sample' else torch.ones_like(time)


def flow_velocity(
    objective: Objective, prediction: Tensor, noisy: Tensor, *, time: Tensor, min_time: float = 0.0
) -> Tensor:
    """Convert a flow denoiser's prediction for `noisy`, either the velocity or clean latents, to the velocity.

    Clean latents are converted by dividing by the time t, [], or by `min_time` if t is smaller.
    """
    if objective.prediction_type != 'sample':
        return prediction
    return (noisy - prediction) / time.to(noisy.dtype).clamp(min=min_time)


def space_coefficients(objective: Objective, space: Space | None, timestep: Tensor) -> tuple[Tensor, Tensor]:
    """Return a and b, both [], such that a x_t + b p is the denoiser's prediction p converted to another space.

    Args:
        space: None means the space of the denoiser's predictions: a = 0 and b = 1. Only flows have a velocity.
        timestep: Timestep [] of the noise schedule; a fractional one of a diffusion schedule is rounded.
    """
    time = timestep.float() / objective.num_train_timesteps
    zero, one = torch.zeros_like(time), torch.ones_like(time)
    if space in (None, objective.prediction_type):
        return zero, one
    if objective.is_flow:
        rate = time.clamp(min=MIN_TIME)
        return (one / rate, -one / rate) if space == 'velocity' else (one, -time)
    alpha_bar = objective.alpha_bars()[int(timestep.round().clamp(0, objective.num_train_timesteps - 1))].to(time)
    signal, noise = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    return (signal, -noise) if objective.prediction_type == 'v_prediction' else (one / signal, -noise / signal)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values [B] to broadcast with a tensor [B, ...], and convert them to its dtype."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like.dtype)


def training_timesteps(objective: Objective, draws: Draws, quantiles: Tensor | None) -> Tensor:
    """Return a random timestep per sample, [B], int64 or, for a flow, float32; `quantiles` is for stratified ones."""
    steps = objective.num_train_timesteps
    if objective.timesteps != 'stratified':
        if objective.is_flow:
            return (objective.time_of(draws.uniform(Purpose.TIMESTEP)) * steps).float()
        return draws.integers(Purpose.TIMESTEP, steps)
    if quantiles is None:
        raise UserError(
            f'batch: has no {batch_keys.TIMESTEP_QUANTILE}, which objective.timesteps: stratified needs; use a '
            'BucketedLoader with stratified=True, or timesteps: uniform'
        )
    if objective.is_flow:
        return (objective.time_of(quantiles.double()) * steps).float()
    # Clamp, since a quantile just below 1, such as 1 - 2**-52, multiplied by 1000 is rounded to 1000.
    return (quantiles * steps).long().clamp(max=steps - 1)
