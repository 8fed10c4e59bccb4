"""LatentDiffusion: one ComposerModel of VAE, text encoders, denoiser and noise schedule.

Shapes: B batch, C latent channels, H W latent size, E text encoders, L text tokens, D text width.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.flops import FlopCount, text_encoder_flops, vae_encoder_flops
from diffusion.models.objective import Objective, diffuse, loss_weight, target
from diffusion.models.pretrained import (
    TextConditioner,
    decode_latents,
    downsampling,
    latent_statistics,
    posterior_of,
    tokenize,
)
from diffusion.models.randomness import Draws, Purpose, draws_for
from diffusion.models.sampler import guide, inference_scheduler, sample_latents
from diffusion.models.stage_hooks import stage

log = logging.getLogger(__name__)

NUM_VALIDATION_TIMESTEPS = 8
CAPTION_DROPOUT_MODES = ('empty', 'zeros')


class Denoised(NamedTuple):
    """What the denoiser said, what it should have said [B, C, H, W], and the weight of each sample [B]."""

    prediction: Tensor
    target: Tensor
    weight: Tensor


class ValidationLoss(MeanMetric):
    """Mean squared error at one of the validation timesteps, or over all of them (`index` None)."""

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index = index


class LatentDiffusion(ComposerModel):
    """A text-to-image latent diffusion model, trained by Composer.

    A batch holds, under the names of `diffusion.models.batch_keys`, images or precomputed latents, and tokens.
    Randomness is keyed by the samples' ids, epochs and batches; a batch without ids (another project's loader) gets
    its ids from torch's generator.

    The VAE, and the text encoders unless they are trained, are not sub-modules: they have no place in `parameters()`,
    in checkpoints or in DDP's and FSDP's bookkeeping, but they follow the model from device to device.

    Args:
        denoiser: U-Net from noisy latents, timestep and text to a prediction.
        vae: Autoencoder with its own latent statistics (scaling_factor, or means and standard deviations a channel).
        text: Text encoders and their tokenizers.
        objective: Prediction type, noise schedule, loss weighting.
        caption_dropout: Share of captions dropped, for classifier-free guidance.
        caption_dropout_mode: What a dropped caption becomes: the empty caption, or zeros instead of its embedding.
        mask_padding: Hide the padding after the caption's end from cross-attention.
        train_text_encoder: Train the text encoders with the denoiser.
        encoder_dtype: Precision of the frozen parts; auto is float16 where there is a GPU, else float32.
        posterior: Diffuse a sample of the VAE's posterior, or its mean.
        seed: Of noise, timesteps, posterior and caption dropout, in [0, 2**32).
    """

    alpha_bars: Tensor
    latent_mean: Tensor
    latent_std: Tensor
    empty_ids: Tensor
    sample_losses: Tensor | None
    """What the last `loss` was the mean of, float32 [B]: a `LossGuard` names samples by it. No buffer, never saved."""
    encoders_in_inference_mode: bool
    """Whether frozen encoders run in torch's inference mode, or under no_grad."""

    def __init__(
        self,
        denoiser: UNet2DConditionModel,
        vae: AutoencoderKL,
        text: TextConditioner,
        *,
        objective: Objective | None = None,
        caption_dropout: float = 0.1,
        caption_dropout_mode: Literal['empty', 'zeros'] = 'empty',
        mask_padding: bool = False,
        train_text_encoder: bool = False,
        encoder_dtype: Literal['auto', 'float32', 'float16', 'bfloat16'] = 'auto',
        posterior: Literal['sample', 'mean'] = 'sample',
        seed: int = 17,
    ) -> None:
        super().__init__()
        _check_parts(denoiser, vae, text)
        if not 0 <= caption_dropout <= 1:
            raise UserError(f'caption_dropout: {caption_dropout} is not a share in [0, 1]')
        if caption_dropout_mode not in CAPTION_DROPOUT_MODES:
            raise UserError(f'caption_dropout_mode: {caption_dropout_mode!r}; use empty or zeros')
        self.denoiser = denoiser
        denoiser.fsdp_wrap_fn = is_block  # type: ignore[assignment]
        self.objective = objective or Objective()
        self.caption_dropout = caption_dropout
        self.caption_dropout_mode = caption_dropout_mode
        self.mask_padding = mask_padding
        self.train_text_encoder = train_text_encoder
        self.posterior = posterior
        self.seed = seed
        self.sample_losses = None
        self.encoders_in_inference_mode = False
        self._scale_checked = False
        self._empty_embeds: Tensor | None = None
        self._denoiser_flops = FlopCount(denoiser, channels=vae.config['latent_channels'], text_width=text.width)
        self._sample_flops: dict[tuple[int | bool, ...], int] = {}

        dtype = encoder_precision(encoder_dtype)
        self._frozen: dict[str, nn.Module] = {'vae': _freeze(vae, dtype)}
        if train_text_encoder:
            self.text_encoder = text
        else:
            self._frozen['text'] = _freeze(text, dtype)

        mean, std = latent_statistics(vae)
        empty_ids = tokenize(text.tokenizers, [''])[0]
        self.register_buffer('alpha_bars', self.objective.alpha_bars().float(), persistent=False)
        self.register_buffer('latent_mean', mean.view(-1, 1, 1), persistent=False)
        self.register_buffer('latent_std', std.view(-1, 1, 1), persistent=False)
        self.register_buffer('empty_ids', empty_ids, persistent=False)

    @property
    def vae(self) -> AutoencoderKL:
        return self._frozen['vae']  # type: ignore[return-value]

    @property
    def text(self) -> TextConditioner:
        """The text encoders, trained or frozen."""
        return self.text_encoder if self.train_text_encoder else self._frozen['text']  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.alpha_bars.device

    def _apply(self, fn: Any, recurse: bool = True) -> 'LatentDiffusion':
        for part in self._frozen.values():
            part._apply(fn)
        return super()._apply(fn, recurse)

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> 'LatentDiffusion':
        """Empty what is trained; frozen parts move, since nobody would fill them again (Composer fills from rank 0)."""
        frozen, self._frozen = self._frozen, {}
        try:
            super().to_empty(device=device, recurse=recurse)
        finally:
            self._frozen = frozen
        for part in frozen.values():
            nn.Module.to(part, device)
        return self

    # -- training --

    def forward(self, batch: Mapping[str, Tensor]) -> Denoised:
        """Noise a batch and let the denoiser predict."""
        draws = self._draws(batch)
        latents = self.latents_of(batch, draws)
        self._check_scale(latents)
        timesteps = self._timesteps(batch, draws)
        noise = draws.normal(Purpose.NOISE, latents.shape[1:])
        if self.objective.offset_noise:
            offset = draws.normal(Purpose.OFFSET_NOISE, (latents.shape[1], 1, 1))
            noise = noise + self.objective.offset_noise * offset
        return self.denoise(latents, noise, timesteps, *self._condition_of(batch, draws))

    def denoise(
        self, latents: Tensor, noise: Tensor, timesteps: Tensor, text_embeds: Tensor, mask: Tensor | None = None
    ) -> Denoised:
        """Noise latents [B, C, H, W] to timesteps [B] and let the denoiser predict."""
        alpha_bar = self.alpha_bars[timesteps]
        noisy = diffuse(latents, noise, alpha_bar=alpha_bar)
        prediction = self._predict(noisy, timesteps, text_embeds, mask)
        expected = target(self.objective, latents, noise, alpha_bar=alpha_bar)
        return Denoised(prediction, expected, loss_weight(self.objective, alpha_bar=alpha_bar))

    def loss(self, outputs: Denoised, batch: Mapping[str, Tensor]) -> Tensor:
        """Weighted mean squared error of the prediction, in float32."""
        losses = outputs.weight * squared_error(outputs)
        self.sample_losses = losses.detach()
        return losses.mean()

    def latents_of(self, batch: Mapping[str, Tensor], draws: Draws | None = None) -> Tensor:
        """Normalised latents [B, C, H, W] of a batch, of its pictures or of its precomputed moments.

        With draws they are samples of the VAE's posterior (where the model's `posterior` says so), else its means.
        """
        if batch_keys.LATENT_MOMENTS in batch:
            moments = batch[batch_keys.LATENT_MOMENTS].float()
        elif batch_keys.IMAGE in batch:
            moments = self.encode(batch[batch_keys.IMAGE])
        else:
            raise UserError(
                f'batch: it holds {sorted(batch)}; one of {batch_keys.IMAGE}, {batch_keys.LATENT_MOMENTS} is needed'
            )
        latent_channels = self.vae.config['latent_channels']
        mean, log_variance = moments[:, :latent_channels], moments[:, latent_channels:]
        if draws is not None and self.posterior == 'sample' and log_variance.shape[1]:
            noise = draws.normal(Purpose.POSTERIOR, mean.shape[1:])
            mean = mean + (0.5 * log_variance.clamp(-30.0, 20.0)).exp() * noise
        return (mean - self.latent_mean) / self.latent_std

    def encode(self, images: Tensor) -> Tensor:
        """Mean and log-variance of the VAE's posterior, float32 [B, 2C, H, W], of pictures uint8 [B, 3, 8H, 8W]."""
        if images.dtype != torch.uint8:
            raise UserError(f'{batch_keys.IMAGE}: dtype {images.dtype}; pictures travel as uint8 in [0, 255]')
        vae = self.vae
        with self._encoding(images.device):
            pixels = (images.float() / 127.5 - 1).to(vae.dtype)
            moments = posterior_of(vae, pixels).parameters
        return for_autograd(moments)

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> int:
        """FLOPs of training on a device's batch, by its shape: three forward passes of what it trains, one of encoders.

        Composer's SpeedMonitor asks for this by this name.
        """
        count, _, text_length = batch[batch_keys.INPUT_IDS].shape
        encodes = batch_keys.LATENT_MOMENTS not in batch, batch_keys.TEXT_EMBEDS not in batch
        shape = *self._latent_size_of(batch), text_length, *encodes
        if shape not in self._sample_flops:
            self._sample_flops[shape] = self._count_sample(*shape)
        return count * self._sample_flops[shape]

    # -- evaluation --

    @torch.no_grad()
    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Squared errors at 8 equidistant timesteps with fixed noise, float32 [8, B].

        Fixed noise makes the figures of two checkpoints comparable, and this loss follows sample quality where the
        training loss, dominated by which timesteps came up, does not (Esser et al. 2024, section 5.2).
        """
        latents = self.latents_of(batch)
        condition = self._condition_of(batch)
        sample_id = batch.get(batch_keys.SAMPLE_ID, torch.arange(len(latents), device=latents.device))
        errors = []
        for index, timestep in enumerate(self.validation_timesteps()):
            draws = Draws(self.seed, sample_id, torch.zeros_like(sample_id), torch.full_like(sample_id, index))
            noise = draws.normal(Purpose.VALIDATION_NOISE, latents.shape[1:])
            timesteps = torch.full_like(sample_id, timestep)
            errors.append(squared_error(self.denoise(latents, noise, timesteps, *condition)))
        return torch.stack(errors)

    def validation_timesteps(self) -> list[int]:
        """Middles of 8 equal parts of the schedule."""
        steps = self.objective.num_train_timesteps
        return [int((i + 0.5) * steps / NUM_VALIDATION_TIMESTEPS) for i in range(NUM_VALIDATION_TIMESTEPS)]

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        if is_train:
            return {}
        by_timestep = {f'loss_t{t:03d}': ValidationLoss(index) for index, t in enumerate(self.validation_timesteps())}
        return {'loss': ValidationLoss(), **by_timestep}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        assert isinstance(metric, ValidationLoss)
        metric.update(outputs if metric.index is None else outputs[metric.index])

    # -- sampling --

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str],
        *,
        negative_prompt: str = '',
        seeds: Sequence[int] | None = None,
        size: tuple[int, int] | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        noise_scheduler: str = 'ddim',
        latents: Tensor | None = None,
    ) -> Tensor:
        """Draw a picture for each prompt.

        Args:
            prompts: B captions.
            negative_prompt: What guidance moves away from.
            seeds: One a picture, in [0, 2**32); 0, 1, 2, ... by default. A picture depends on its own seed alone.
            size: Height and width in pixels; the denoiser's own by default.
            num_inference_steps: Steps of the scheduler.
            guidance_scale: 1 or less turns guidance off.
            guidance_rescale: See `diffusion.models.sampler.guide`.
            noise_scheduler: A name of `diffusion.models.sampler.SHORT_NAMES`, or a class of diffusers.
            latents: Standard normals [B, C, H, W] to start from, instead of those of the seeds.

        Returns:
            Pictures, float32 [B, 3, height, width] in [0, 1].
        """
        prompts = list(prompts)
        if not prompts or isinstance(prompts, str):
            raise UserError('prompts: give at least one caption')
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        if len(seeds) != len(prompts):
            raise UserError(f'seeds: {len(seeds)} seeds for {len(prompts)} prompts; give one a picture')
        if latents is None:
            shape = self._latent_shape(size)
            latents = draws_for(seeds, seed=0, device=self.device).normal(Purpose.SAMPLING, shape)
        scheduler = inference_scheduler(noise_scheduler, self.objective)
        embeds, mask = self._condition(self._tokens(prompts))
        if guidance_scale > 1:
            other_embeds, other_mask = self._unconditional(negative_prompt, len(prompts))
            embeds = torch.cat([other_embeds, embeds])
            mask = None if mask is None or other_mask is None else torch.cat([other_mask, mask])

        def denoise(noisy: Tensor, timestep: Tensor) -> Tensor:
            if guidance_scale <= 1:
                return self._predict(noisy, timestep, embeds, mask).float()
            both = self._predict(torch.cat([noisy, noisy]), timestep, embeds, mask).float()
            return guide(*both.chunk(2), scale=guidance_scale, rescale=guidance_rescale)

        with evaluating(self):
            latents = sample_latents(
                denoise, scheduler, latents.float(), num_inference_steps=num_inference_steps, seeds=seeds
            )
            return self.decode(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures float32 [B, 3, 8H, 8W] in [0, 1] of normalised latents [B, C, H, W]."""
        vae = self.vae
        with torch.autocast(latents.device.type, enabled=False):
            raw = (latents.float() * self.latent_std + self.latent_mean).to(vae.dtype)
            pixels = decode_latents(vae, raw).float()
        return (pixels / 2 + 0.5).clamp(0, 1)

    # -- parts of the above --

    def _draws(self, batch: Mapping[str, Tensor]) -> Draws:
        size = len(batch[batch_keys.INPUT_IDS])
        sample_id = batch.get(batch_keys.SAMPLE_ID)
        if sample_id is None:
            sample_id = torch.randint(2**32, (size,), device=self.device)
        zeros = torch.zeros_like(sample_id)
        draws = Draws(
            self.seed, sample_id, batch.get(batch_keys.EPOCH, zeros), batch.get(batch_keys.BATCH_INDEX, zeros)
        )
        return draws.at_once(self._words_of_a_step(batch))

    def _words_of_a_step(self, batch: Mapping[str, Tensor]) -> dict[Purpose, int]:
        """How many random words a sample takes, by purpose."""
        channels = self.vae.config['latent_channels']
        if batch_keys.LATENT_MOMENTS not in batch and batch_keys.IMAGE not in batch:
            return {Purpose.TIMESTEP: 1}
        height, width = self._latent_size_of(batch)
        normals = channels * height * width + channels * height * width % 2
        counts = {Purpose.TIMESTEP: 1, Purpose.CAPTION_DROPOUT: 1, Purpose.NOISE: normals}
        if self.posterior == 'sample':
            counts[Purpose.POSTERIOR] = normals
        if self.objective.offset_noise:
            counts[Purpose.OFFSET_NOISE] = channels + channels % 2
        return counts

    def _latent_size_of(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        """Height and width in latent cells."""
        if batch_keys.LATENT_MOMENTS in batch:
            return tuple(batch[batch_keys.LATENT_MOMENTS].shape[2:])  # type: ignore[return-value]
        height, width = batch[batch_keys.IMAGE].shape[2:]
        cell = downsampling(self.vae)
        return height // cell, width // cell

    def _count_sample(self, height: int, width: int, text_length: int, encodes_images: bool, encodes_text: bool) -> int:
        total = 3 * self._denoiser_flops(height, width, text_length)
        if encodes_images:
            total += vae_encoder_flops(self.vae, height=height, width=width)
        if encodes_text:
            passes = 3 if self.train_text_encoder else 1
            total += passes * text_encoder_flops(self.text, length=text_length)
        return total

    def _timesteps(self, batch: Mapping[str, Tensor], draws: Draws) -> Tensor:
        steps = self.objective.num_train_timesteps
        if self.objective.timesteps == 'uniform':
            return draws.integers(Purpose.TIMESTEP, steps)
        quantiles = batch.get(batch_keys.TIMESTEP_QUANTILE)
        if quantiles is None:
            raise UserError(
                f'batch: it has no {batch_keys.TIMESTEP_QUANTILE}, which objective.timesteps: stratified needs; take a '
                'BucketedLoader with stratified=True, or timesteps: uniform'
            )
        return (quantiles * steps).long().clamp(max=steps - 1)

    def _check_scale(self, latents: Tensor) -> None:
        """Latents scaled twice, or not at all, train without complaint and draw nothing: look at the first batch."""
        if self._scale_checked:
            return
        self._scale_checked = True
        std = float(latents.std())
        if not 0.5 < std < 2:
            log.warning(
                'latents: standard deviation %.2f in the first batch, where the noise schedule expects about 1; is the '
                'VAE the right one for these pictures, and is its scaling_factor (or latents_std) its own?',
                std,
            )

    def _condition_of(self, batch: Mapping[str, Tensor], draws: Draws | None = None) -> tuple[Tensor, Tensor | None]:
        """Text embeddings and padding mask of a batch; with draws, captions are dropped."""
        input_ids, embeds, keep = batch[batch_keys.INPUT_IDS], batch.get(batch_keys.TEXT_EMBEDS), None
        if draws is not None and self.caption_dropout:
            keep = draws.uniform(Purpose.CAPTION_DROPOUT) >= self.caption_dropout
        if keep is not None and self.caption_dropout_mode == 'empty':
            input_ids = torch.where(keep[:, None, None], input_ids, self.empty_ids)
            if embeds is not None:
                embeds = torch.where(keep[:, None, None], embeds, self._embeds_of_nothing().to(embeds.dtype))
            keep = None
        return self._condition(input_ids, keep, embeds)

    def _condition(
        self, input_ids: Tensor, keep: Tensor | None = None, embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Text embeddings [B, L, D], zeros where `keep` is False, and the padding mask [B, L] where it is used."""
        embeds = self.embed(input_ids) if embeds is None else at_least_float32(embeds)
        if keep is not None:
            embeds = embeds * keep[:, None, None]
        return embeds, self.text.padding_mask(input_ids) if self.mask_padding else None

    def embed(self, input_ids: Tensor) -> Tensor:
        """What the text encoders say of tokens [B, E, L]: [B, L, D], float32 of frozen ones."""
        if self.train_text_encoder:
            return self.text(input_ids)
        with self._encoding(input_ids.device):
            embeds = self.text(input_ids)
        return for_autograd(embeds)

    @contextmanager
    def _encoding(self, device: torch.device) -> Iterator[None]:
        """Frozen encoders at work: no gradients, in their own precision."""
        frozen = torch.inference_mode() if self.encoders_in_inference_mode else torch.no_grad()
        with stage('encode'), frozen, torch.autocast(device.type, enabled=False):
            yield

    def _embeds_of_nothing(self) -> Tensor:
        """What the frozen text encoders say of the empty caption [1, L, D], asked once."""
        if self._empty_embeds is None or self._empty_embeds.device != self.device:
            self._empty_embeds = self.embed(self.empty_ids[None])
        return self._empty_embeds

    def _unconditional(self, negative_prompt: str, count: int) -> tuple[Tensor, Tensor | None]:
        dropped = self.caption_dropout_mode == 'zeros' and not negative_prompt
        keep = torch.zeros(count, dtype=torch.bool, device=self.device) if dropped else None
        return self._condition(self._tokens([negative_prompt] * count), keep)

    def _predict(self, noisy: Tensor, timesteps: Tensor, text_embeds: Tensor, mask: Tensor | None) -> Tensor:
        return self.denoiser(noisy, timesteps, text_embeds, encoder_attention_mask=mask, return_dict=False)[0]

    def _tokens(self, captions: Sequence[str]) -> Tensor:
        return tokenize(self.text.tokenizers, captions).to(self.device)

    def _latent_shape(self, size: tuple[int, int] | None) -> tuple[int, int, int]:
        cell = downsampling(self.vae)
        height, width = size or (self.denoiser.config['sample_size'] * cell,) * 2
        if height % cell or width % cell:
            raise UserError(f'size: {height}x{width} is not a multiple of {cell} pixels, the size of a latent cell')
        return self.vae.config['latent_channels'], height // cell, width // cell


def squared_error(outputs: Denoised) -> Tensor:
    """Mean squared error of each sample, float32 [B] (float64 of a model in float64)."""
    difference = at_least_float32(outputs.prediction) - at_least_float32(outputs.target)
    return difference.square().flatten(1).mean(dim=1)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision widened; float64, which tests of summation order use, stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def for_autograd(tensor: Tensor) -> Tensor:
    """At least float32, and a tensor that a graph may keep: one made in inference mode may not be."""
    wide = at_least_float32(tensor)
    return wide.clone() if wide.is_inference() else wide


def encoder_precision(name: str) -> torch.dtype:
    """The dtype of frozen parts; `auto` is float16 where there is a GPU, else float32."""
    if name == 'auto':
        return torch.float16 if torch.cuda.is_available() else torch.float32
    dtypes = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}
    if name not in dtypes:
        raise UserError(f'encoder_dtype: {name!r}; use one of auto, {", ".join(dtypes)}')
    return dtypes[name]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and back to where it was."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _freeze(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    # Not part.to(dtype): diffusers' override of it warns about modules that this VAE has not.
    return nn.Module.to(part.requires_grad_(False).eval(), dtype)


def is_block(module: nn.Module) -> bool:
    """Whether FSDP gathers a module's weights on their own: the denoiser's residual and transformer blocks."""
    return isinstance(module, ResnetBlock2D | Transformer2DModel)


def _check_parts(denoiser: UNet2DConditionModel, vae: AutoencoderKL, text: TextConditioner) -> None:
    channels = vae.config['latent_channels']
    if denoiser.config['in_channels'] != channels or denoiser.config['out_channels'] != channels:
        raise UserError(
            f'denoiser: {denoiser.config["in_channels"]} channels in and {denoiser.config["out_channels"]} out, '
            f'but the VAE has {channels} latent channels; build the denoiser for this VAE'
        )
    width = denoiser.config['cross_attention_dim']
    if width != text.width:
        raise UserError(f'denoiser: cross_attention_dim {width}, but the text encoders give {text.width}')
