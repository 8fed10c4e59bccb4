"""LatentDiffusion: a ComposerModel with VAE, text encoders, denoiser and noise schedule.

Shapes: B batch, C latent channels, H W latent size, E text encoders, L text tokens, D text width.
"""

import contextlib
import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from composer.models import ComposerModel
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from typing_extensions import Unpack

from diffusion.config.declarations import constrained
from diffusion.config.model_checks import mirror_problem
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.batch_conditions import image_sizes, sizes_of_uncropped, stored_mask, stored_text
from diffusion.models.families.adapter import Condition, adapter_of, check_parts
from diffusion.models.flops import TrainingFlops
from diffusion.models.frozen_parts import (
    at_least_float32,
    encoder_precision,
    evaluating,
    for_autograd,
    freeze,
    weights_hash,
)
from diffusion.models.guidance import Guidance, WithWeights, guidance_of
from diffusion.models.lora import without_lora
from diffusion.models.objective import (
    Objective,
    diffuse,
    flow_loss_weight,
    interpolate,
    loss_weight,
    target,
    training_timesteps,
)
from diffusion.models.perceptual_losses import check_perceptual, load_perceptual_loss
from diffusion.models.randomness import Draws, Purpose, RandomBits, draws_for, epoch_word, random_bits
from diffusion.models.representation_alignment import (
    FeatureEncoder,
    FeatureProjector,
    alignment_losses,
    build_alignment,
    normalized_over_tokens,
)
from diffusion.models.sampler import (
    LatentGrid,
    Predict,
    as_captions,
    check_sampling,
    guided_denoiser,
    inference_scheduler,
    sample_latents,
)
from diffusion.models.stage_hooks import stage
from diffusion.models.text_conditioner import TextConditioner, TextOutput, tokenize
from diffusion.models.token_routing import FUSION, Route, TokenFusion, TokenRouter
from diffusion.models.training_keywords import PixelTransformerKeywords
from diffusion.models.vae import (
    PixelSpace,
    Vae,
    check_sides,
    decode_latents,
    downsampling,
    has_variance,
    latent_channels,
    latent_statistics,
    moments_of,
    period_of,
    repeated,
)
from diffusion.models.width_transfer import scale_for_width

log = logging.getLogger(__name__)

NUM_VALIDATION_TIMESTEPS = 8
STEP_WORDS = (Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT)
"""Purposes for which a training step draws one random number per sample."""
FIRST_BATCH = 'captions of the first batch'
"""Beginning of the warning that captions in the first training batch are longer than the text encoder allows."""


class Denoised(NamedTuple):
    """Denoiser's prediction and training target, [B, C, H, W], and the loss weight of each sample, [B].

    In training, `alignment` and `perceptual` are further losses, [B], if the model has them. The alignment loss is not
    yet multiplied by its weight; the perceptual loss is.
    """

    prediction: Tensor
    target: Tensor
    weight: Tensor
    alignment: Tensor | None = None
    perceptual: Tensor | None = None
    inputs: tuple[Tensor, Tensor, Condition] | None = None
    """The denoiser's inputs: noisy latents [B, C, H, W], timesteps [B] and condition."""


class ValidationLoss(MeanMetric):
    """Metric: mean squared error at one of the validation timesteps, or over all timesteps if `index` is None."""

    def __init__(self, index: int | None = None) -> None:
        super().__init__()
        self.index = index


class LatentDiffusion(ComposerModel):
    """Text-to-image latent diffusion model for Composer's Trainer.

    A batch contains images or precomputed latents, and token ids; `diffusion.models.batch_keys` defines its keys.
    Random numbers are keyed by the samples' ids, epochs and batches. A batch without sample ids (from another project's
    loader) gets random ids from torch's generator.

    The VAE and frozen text encoders are not submodules: they are not in `parameters()` or checkpoints, and DDP and FSDP
    ignore them. They still move with the model between devices.

    Args:
        denoiser: diffusers network that predicts from noisy latents, timestep and text; it must belong to one of the
            families in `diffusion.config.families`.
        vae: Autoencoder with its latent statistics (scaling_factor, or mean and standard deviation per channel), or
            PixelSpace.
        text: Text encoders and their tokenizers.
        mask_padding: Mask the padding after the end of the caption in the denoiser.
        train_text_encoder: Train the text encoders together with the denoiser.
        latent_size: Side length, in latent pixels, of images generated without a given size; None uses the side length
            that the denoiser was built for.
        mup_base: The denoiser at the width for which the learning rate was tuned; can be on the meta device. muP scales
            initial weights and learning rates from this width to that of `denoiser`. None turns muP off.
        feature_encoder: Frozen image encoder for alignment and perceptual losses; None loads the encoder named in their
            settings.
        training: Keyword arguments that all models share; see `training_keywords.py`.
    """

    alpha_bars: Tensor
    """Signal variance at each timestep, float32 [T]; not used for flow matching."""
    latent_mean: Tensor
    latent_std: Tensor
    empty_ids: Tensor
    sample_losses: Tensor | None
    """Losses per sample from the last call of `loss`, float32 [B]; `LossGuard` uses them to find bad samples. None
    before the first call; never saved."""
    denoiser_is_frozen: bool
    """True if only a LoRA of the denoiser is trained; the LoRA's own FLOPs, about 1%, are not counted."""
    learning_rate_factors: dict[str, float]
    """muP's learning rate factors for this width, by parameter name; the factor of other parameters is 1."""
    random_bits: Callable[..., RandomBits]
    """Function that draws a training step's random numbers; `speed.compile` replaces it with a compiled version."""
    router: TokenRouter | None
    """Hooks that let image tokens skip blocks in training; None unless `route_tokens` was called."""
    encoders_in_inference_mode: bool
    """True to run frozen encoders in torch's inference mode, False to run them under no_grad."""

    @constrained
    def __init__(
        self,
        denoiser: ModelMixin,
        vae: Vae,
        text: TextConditioner,
        *,
        mask_padding: bool = False,
        train_text_encoder: bool = False,
        latent_size: int | None = None,
        mup_base: ModelMixin | None = None,
        feature_encoder: FeatureEncoder | None = None,
        **training: Unpack[PixelTransformerKeywords],
    ) -> None:
        super().__init__()
        self.adapter = adapter_of(denoiser)
        self.denoiser_sizes = self.adapter.sizes(denoiser)
        check_parts(self.denoiser_sizes, vae, text)
        self.caption_dropout = training['caption_dropout']
        self.caption_dropout_mode = training['caption_dropout_mode']
        if not 0 <= self.caption_dropout <= 1:
            raise UserError(f'caption_dropout: {self.caption_dropout} is not a fraction in [0, 1]')
        self.denoiser = denoiser
        # Composer calls this function to select the submodules that FSDP wraps.
        denoiser.fsdp_wrap_fn = self.adapter.is_block  # type: ignore[assignment]
        self.objective = training['objective'] or Objective()
        if mask_padding and not self.adapter.takes_text_mask:
            raise UserError(f'mask_padding: true, but a {type(denoiser).__name__} takes no mask of the text; use false')
        self.mask_padding = mask_padding
        self.latent_size = latent_size or self.denoiser_sizes.sample_size or 0
        if self.latent_size <= 0:
            raise UserError(
                f'latent_size: a {type(denoiser).__name__} has no size of its own; give the side in latent pixels'
            )
        self.train_text_encoder = train_text_encoder
        self.posterior = training['posterior']
        self.seed = training['seed']
        self.sample_losses = None
        self.denoiser_is_frozen = False
        self.router = None
        self.weak_weights: Callable[[Guidance], Mapping[str, Tensor]] | None = None
        self._weak: tuple[Guidance, WithWeights] | None = None
        self.random_bits = random_bits
        self.encoders_in_inference_mode = False
        self._scale_checked = False
        self._captions_checked: set[str] = set()
        self._empty_text: TextOutput | None = None
        self._placed_on: torch.device | None = None
        self.sprint = training['sprint']
        if self.sprint is not None:
            # Add it before anything copies, compiles or shards the denoiser.
            for each in filter(None, (denoiser, mup_base)):
                self._add_fusion(each)
        self._flops = TrainingFlops(denoiser, text, trains_text=train_text_encoder)

        # A plain dict hides the frozen parts from nn.Module. Otherwise FSDP would shard them, although `vae.encode`
        # bypasses the hooks that gather the shards ("got mixed torch.Tensor and DTensor"), and checkpoints would
        # include them.
        dtype = encoder_precision(training['encoder_dtype'])
        self._frozen: dict[str, nn.Module] = {'vae': freeze(vae, dtype)}
        if train_text_encoder:
            self.text_encoder = text
        else:
            self._frozen['text'] = freeze(text, dtype)
        self.representation_alignment = training['representation_alignment']
        if self.representation_alignment is not None:
            # Make the projector a submodule, so that the optimizer, checkpoints and FSDP treat it like the denoiser.
            encoder, self.feature_projector, self._capture = build_alignment(
                self.representation_alignment,
                denoiser,
                self.adapter,
                width=self.denoiser_sizes.token_width,
                encoder=feature_encoder,
            )
            self._frozen['image_encoder'] = freeze(encoder, dtype)
        if (perceptual_losses := training['perceptual_losses']) is not None:
            check_perceptual(vae, self.objective)
            # Keep these networks in float32, since gradients flow through them.
            self._frozen['perceptual_loss'] = freeze(
                load_perceptual_loss(perceptual_losses, feature_encoder), torch.float32
            )

        if self.sprint is not None:
            assert self.adapter.token_blocks is not None
            self.route_tokens(self.sprint.route(len(self.adapter.token_blocks.of(denoiser))))
        self.learning_rate_factors = {} if mup_base is None else self._scale_for_width(mup_base)

        # The buffers are not persistent: they are derived from the settings, and a checkpoint must not replace them.
        mean, std = latent_statistics(vae)
        empty_ids = tokenize(text.tokenizers, [''])[0]
        self.register_buffer('alpha_bars', self.objective.alpha_bars().float(), persistent=False)
        for name, values in (('latent_mean', mean), ('latent_std', std)):
            self.register_buffer(name, values.view(len(values), *(values.shape[1:] or (1, 1))), persistent=False)
        self.register_buffer('empty_ids', empty_ids, persistent=False)

    def _scale_for_width(self, base: ModelMixin) -> dict[str, float]:
        factors = scale_for_width(self.denoiser, base, prefix='denoiser.')
        if (settings := self.representation_alignment) is not None:
            # The projector's first layer reads the denoiser's tokens, so muP's rules treat it as an output layer.
            width, encoder = self.adapter.sizes(base).token_width, self.image_encoder
            assert width is not None and encoder is not None
            with torch.device('meta'):
                narrow = FeatureProjector.of(settings.projection, width, settings.hidden_size, encoder.width)
            factors |= scale_for_width(self.feature_projector[0], narrow[0], prefix='feature_projector.0.')
        return factors

    def _add_fusion(self, denoiser: nn.Module) -> None:
        """Add SPRINT's layer to a denoiser as a submodule, so that FSDP gathers it together with the denoiser."""
        width = self.adapter.sizes(denoiser).token_width
        if width is None or self.adapter.token_blocks is None:
            raise UserError(f'sprint: a {type(denoiser).__name__} has no image tokens; use a transformer')
        with next(denoiser.parameters()).device:
            denoiser.add_module(FUSION, TokenFusion(width))

    @property
    def vae(self) -> Vae:
        """The frozen autoencoder."""
        return self._frozen['vae']  # type: ignore[return-value]

    @property
    def text(self) -> TextConditioner:
        """The text encoders, trained or frozen."""
        return self.text_encoder if self.train_text_encoder else self._frozen['text']  # type: ignore[return-value]

    @property
    def ignores_padding(self) -> bool:
        """True if the text embeddings of padding have no effect, so that stored text leaves them out."""
        return self.mask_padding and not self.adapter.reads_padding

    @property
    def latent_grid(self) -> LatentGrid:
        """Image and latent sizes that the denoiser can generate."""
        patch = math.lcm(self.denoiser_sizes.patch, period_of(self.vae))
        return LatentGrid(latent_channels(self.vae), downsampling(self.vae), patch, self.latent_size)

    @property
    def device(self) -> torch.device:
        """Device of the model's buffers."""
        return self.alpha_bars.device

    def _apply(self, fn: Any, recurse: bool = True) -> 'LatentDiffusion':
        # nn.Module.to, half, cuda and others all call _apply, which would miss the frozen parts.
        for part in self._frozen.values():
            part._apply(fn)
        self._placed_on = None
        return super()._apply(fn, recurse)

    def place(self, device: torch.device) -> None:
        """Move the frozen parts and the model's own buffers to a device, unless they are already there.

        FSDP only moves the modules that it shards, which are submodules of this one.
        """
        if self._placed_on == device:
            return
        for part in self._frozen.values():
            nn.Module.to(part, device)
        super()._apply(lambda tensor: tensor.to(device), recurse=False)
        self._placed_on = device

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> 'LatentDiffusion':
        """Move the model to a device, leaving trained parameters uninitialized; frozen parts keep their weights."""
        # Composer empties the models on ranks other than 0 and fills them from rank 0's state dict, which does not
        # contain the frozen parts.
        frozen, self._frozen = self._frozen, {}
        try:
            super().to_empty(device=device, recurse=recurse)
        finally:
            self._frozen = frozen
        for part in frozen.values():
            nn.Module.to(part, device)
        self._placed_on = None
        return self

    def forward(self, batch: Mapping[str, Tensor]) -> Denoised:
        """Add noise to a batch at random timesteps; return the denoiser's predictions, targets and loss weights."""
        self.place(batch_keys.device_of(batch))
        # Draw all random numbers of the step in one call: on a GPU, each small draw would take a kernel launch.
        draws = self.draws_of(batch).precompute_draws(STEP_WORDS, self._normals_of_a_step(batch), self.random_bits)
        latents = self.latents_of(batch, draws)
        self._check_scale(latents)
        self._check_captions(batch[batch_keys.INPUT_IDS], FIRST_BATCH)
        if self.sprint is not None and self.router is not None:
            self.router.begin(draws)  # even if no token is dropped: DDP needs a gradient of the mask token
        timesteps = training_timesteps(self.objective, draws, batch.get(batch_keys.TIMESTEP_QUANTILE))
        noise = draws.normal(Purpose.NOISE, latents.shape[1:])
        if self.objective.offset_noise:
            offset = draws.normal(Purpose.OFFSET_NOISE, (latents.shape[1], 1, 1))
            noise = noise + self.objective.offset_noise * offset
        condition = self._condition_of(batch, draws)
        if self.representation_alignment is None:
            outputs = self.denoise(latents, noise, timesteps, condition)
        else:
            with self._capture.capturing() as captured:
                outputs = self.denoise(latents, noise, timesteps, condition)
            outputs = outputs._replace(alignment=self._alignment_losses(batch, *captured))
        if (perceptual := self.perceptual_loss) is not None:
            predicted = self._predicted_latents(outputs, latents, timesteps)
            with stage('perceptual_loss'):
                outputs = outputs._replace(perceptual=perceptual(predicted, latents))
        return outputs

    def denoise(self, latents: Tensor, noise: Tensor, timesteps: Tensor, condition: Condition) -> Denoised:
        """Add noise to latents [B, C, H, W] at timesteps [B]; return predictions, targets and loss weights."""
        if self.objective.is_flow:
            noise = noise * self.objective.noise_scale
            time = timesteps / self.objective.num_train_timesteps
            inputs = interpolate(latents, noise, time=time), timesteps, condition
            prediction = self._predict(*inputs)
            weight = flow_loss_weight(self.objective, time=time).to(torch.float32)
            return Denoised(prediction, target(self.objective, latents, noise), weight, inputs=inputs)
        alpha_bar = self.alpha_bars[timesteps]
        inputs = diffuse(latents, noise, alpha_bar=alpha_bar), timesteps, condition
        prediction = self._predict(*inputs)
        expected = target(self.objective, latents, noise, alpha_bar=alpha_bar)
        return Denoised(prediction, expected, loss_weight(self.objective, alpha_bar=alpha_bar), inputs=inputs)

    def keep_reference(self) -> None:
        """Keep a frozen copy of the denoiser for `reference_outputs`, and freeze the text encoder, which both share.

        Call this before the denoiser is compiled or sharded, and before the optimizer is built.
        """
        self._frozen['reference'] = copy.deepcopy(self.denoiser).requires_grad_(False).eval()
        self.text.requires_grad_(False)

    def reference_digest(self) -> str | None:
        """Return the hash of the weights of the copy that `keep_reference` kept; None if there is none."""
        reference = self._frozen.get('reference')
        return None if reference is None else weights_hash(reference)

    @torch.no_grad()
    def reference_outputs(self, outputs: Denoised) -> Denoised:
        """Return `outputs` with the prediction of the frozen reference: the kept copy, else the model without LoRA."""
        assert outputs.inputs is not None
        reference = self._frozen.get('reference')
        with contextlib.nullcontext() if reference is not None else without_lora(self.denoiser):
            return outputs._replace(prediction=self._predict(*outputs.inputs, reference))

    def loss(self, outputs: Denoised, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted mean squared error plus alignment and perceptual losses, float32; set `sample_losses`."""
        losses = outputs.weight * squared_error(outputs)
        if outputs.alignment is not None and self.representation_alignment is not None:
            losses = losses + self.representation_alignment.weight * outputs.alignment
        if outputs.perceptual is not None:
            losses = losses + outputs.perceptual
        self.sample_losses = losses.detach()
        return losses.mean()

    def draws_of(self, batch: Mapping[str, Tensor]) -> Draws:
        """Return a source of random numbers for a batch, keyed by each sample's id, epoch, occurrence and batch."""
        sample_id = batch.get(batch_keys.SAMPLE_ID)
        if sample_id is None:
            sample_id = torch.randint(2**32, (len(batch[batch_keys.INPUT_IDS]),), device=self.device)
        zeros = torch.zeros_like(sample_id)
        keys = (batch_keys.EPOCH, batch_keys.OCCURRENCE, batch_keys.BATCH_INDEX)
        epoch, occurrence, batch_index = (batch.get(key, zeros) for key in keys)
        return Draws(self.seed, sample_id, epoch_word(epoch, occurrence), batch_index)

    def route_tokens(self, route: Route) -> TokenRouter:
        """Let image tokens skip denoiser blocks in training; call this before FSDP wraps the denoiser.

        The router's `begin` and `finish` must be called before and after each batch's forward and backward pass.
        """
        blocks = self.adapter.token_blocks
        assert blocks is not None, 'the family has no token blocks'
        if self.sprint is not None and self.router is not None:
            raise UserError('algorithms.tread: model.sprint routes tokens too; remove one of the two')
        if blocks.mirrored and (problem := mirror_problem(route.start, route.end, len(blocks.of(self.denoiser)))):
            raise UserError(f'{"tread" if self.sprint is None else "sprint"}: {problem}')
        self.router = TokenRouter(self.denoiser, blocks, route)
        self._flops.route(route)
        return self.router

    def latents_of(self, batch: Mapping[str, Tensor], draws: Draws | None = None) -> Tensor:
        """Return the normalized latents [B, C, H, W] of a batch, from its images or precomputed latent moments.

        With `draws` and the setting `posterior: sample`, latents are samples of the VAE's posterior, else its mean.
        """
        if batch_keys.LATENT_MOMENTS in batch:
            moments = batch[batch_keys.LATENT_MOMENTS].float()
        elif batch_keys.IMAGE in batch:
            moments = self.encode(batch[batch_keys.IMAGE])
        else:
            raise UserError(
                f'batch: has {sorted(batch)}, but needs either {batch_keys.IMAGE} or {batch_keys.LATENT_MOMENTS}'
            )
        # Stored moments may only contain means, in which case log_variance has no channels.
        channels = latent_channels(self.vae)
        if moments.ndim != 4 or moments.shape[1] not in (channels, 2 * channels):
            raise UserError(
                f'{batch_keys.LATENT_MOMENTS}: shape {tuple(moments.shape)}, but this VAE has {channels} channels; '
                f'use its mean, [B, {channels}, H, W], or mean and log-variance, [B, {2 * channels}, H, W]'
            )
        mean, log_variance = moments[:, :channels], moments[:, channels:]
        if draws is not None and self.posterior == 'sample' and log_variance.shape[1]:
            noise = draws.normal(Purpose.POSTERIOR, mean.shape[1:])
            # Clamp like diffusers' DiagonalGaussianDistribution.
            mean = mean + (0.5 * log_variance.clamp(-30.0, 20.0)).exp() * noise
        return (mean - repeated(self.latent_mean, mean)) / repeated(self.latent_std, mean)

    def encode(self, images: Tensor) -> Tensor:
        """Encode uint8 images to mean and log-variance, float32 [B, 2C, H, W], or [B, C, H, W] without variance."""
        batch_keys.check_images(images)
        vae = self.vae
        with self._encoding(images.device):
            pixels = (images.float() / 127.5 - 1).to(vae.dtype)
            moments = moments_of(vae, pixels)
        return for_autograd(moments)

    def encode_batch(self, batch: Mapping[str, Tensor], batch_size: int) -> dict[str, Tensor]:
        """Return a batch with the frozen encoders' outputs instead of images, encoding `batch_size` samples at a time.

        Outputs that the batch already has are kept. Token ids stay, and so do images if the model is trained on pixels.
        """
        batch_keys.check_batch(batch)
        encoded, device = dict(batch), self.device
        images, has_encoder = encoded.pop(batch_keys.IMAGE, None), not isinstance(self.vae, PixelSpace)
        if images is not None:
            parts = [part.to(device, non_blocking=True) for part in images.split(batch_size)]
            if self.image_encoder is not None and batch_keys.IMAGE_FEATURES not in batch:
                encoded[batch_keys.IMAGE_FEATURES] = torch.cat([self.image_features(part) for part in parts])
            if not has_encoder:
                encoded[batch_keys.IMAGE] = images
            elif batch_keys.LATENT_MOMENTS not in batch:
                encoded[batch_keys.LATENT_MOMENTS] = torch.cat([self.encode(part) for part in parts])
        if not self.train_text_encoder and batch_keys.TEXT_EMBEDS not in batch:
            ids = batch[batch_keys.INPUT_IDS].to(device, non_blocking=True)
            texts = [self.embed(part) for part in ids.split(batch_size)]
            encoded[batch_keys.TEXT_EMBEDS] = torch.cat([text.embeds for text in texts])
            pooled = [text.pooled for text in texts if text.pooled is not None]
            if pooled:
                encoded[batch_keys.TEXT_POOLED] = torch.cat(pooled)
        return encoded

    @property
    def token_side(self) -> int:
        """Side in pixels of the image square that each denoiser token covers."""
        return self.denoiser_sizes.patch * downsampling(self.vae)

    @property
    def image_encoder(self) -> FeatureEncoder | None:
        """The frozen image encoder for representation alignment; None if alignment is off or features are stored."""
        return self._frozen.get('image_encoder')  # type: ignore[return-value]

    @property
    def perceptual_loss(self) -> nn.Module | None:
        """The networks for perceptual losses; None if these are off."""
        return self._frozen.get('perceptual_loss')

    def use_stored_features(self) -> None:
        """Release the image encoder, because all training batches contain its features."""
        self._frozen.pop('image_encoder', None)

    def image_features(self, images: Tensor) -> Tensor:
        """Return the image encoder's features at each token's position in the image, float32 [B, N, F]."""
        encoder = self.image_encoder
        assert encoder is not None, 'the model has no representation alignment, or its features are stored'
        height, width = (side // self.token_side for side in images.shape[2:])
        with self._encoding(images.device):
            features = encoder(images, (height, width))
        return for_autograd(features)

    def flops_per_batch(self, batch: Mapping[str, Tensor]) -> int:
        """Return the FLOPs of training on a device's batch; Composer's SpeedMonitor calls this method.

        The count is three forward passes of the trained parts (forward and backward; two for a denoiser with a LoRA),
        one of each frozen encoder that the batch needs, and the passes of the networks of perceptual losses. A
        preference pair is two samples with a pass of the reference each. The optimizer's FLOPs are not counted.
        """
        count, _, token_length = batch[batch_keys.INPUT_IDS].shape
        outputs = batch_keys.LATENT_MOMENTS, batch_keys.TEXT_EMBEDS, batch_keys.IMAGE_FEATURES
        is_pair = batch_keys.REJECTED_IMAGE in batch
        shape = *self._latent_size_of(batch), token_length, *(output not in batch for output in outputs), is_pair
        return count * self._flops.of_sample(self, *shape)

    @torch.no_grad()
    def eval_forward(self, batch: Mapping[str, Tensor], outputs: Any = None) -> Tensor:
        """Return the validation losses of a batch: squared errors at 8 timesteps with fixed noise, float32 [8, B]."""
        # Fixed noise makes the losses of two checkpoints comparable. This loss correlates with sample quality. The
        # training loss does not, because it mostly depends on the drawn timesteps (Esser et al. 2024, section 5.2).
        self.place(batch_keys.device_of(batch))
        latents = self.latents_of(batch)
        condition = self._condition_of(batch)
        sample_id = batch.get(batch_keys.SAMPLE_ID, torch.arange(len(latents), device=latents.device))
        errors = []
        for index, timestep in enumerate(self.validation_timesteps()):
            draws = Draws(self.seed, sample_id, torch.zeros_like(sample_id), torch.full_like(sample_id, index))
            noise = draws.normal(Purpose.VALIDATION_NOISE, latents.shape[1:])
            timesteps = torch.full_like(sample_id, timestep)
            errors.append(squared_error(self.denoise(latents, noise, timesteps, condition)))
        return torch.stack(errors)

    def validation_timesteps(self) -> list[int]:
        """Return the 8 timesteps for validation losses: the midpoints of equal parts of the noise schedule."""
        steps = self.objective.num_train_timesteps
        return [int((i + 0.5) * steps / NUM_VALIDATION_TIMESTEPS) for i in range(NUM_VALIDATION_TIMESTEPS)]

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        if is_train:
            return {}
        by_timestep = {f'loss_t{t:03d}': ValidationLoss(index) for index, t in enumerate(self.validation_timesteps())}
        return {'loss': ValidationLoss(), **by_timestep}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        assert isinstance(metric, ValidationLoss)
        errors = outputs if metric.index is None else outputs[metric.index]
        metric.update(errors, batch_keys.weights_of(batch, errors))

    @torch.no_grad()
    @constrained
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
        guidance: Mapping[str, Any] | None = None,
        snr_shift: float | None = None,
        noise_scheduler: str = 'ddim',
        latents: Tensor | None = None,
    ) -> Tensor:
        """Generate one image per prompt.

        Args:
            prompts: B captions.
            negative_prompt: Prompt that guidance steers away from.
            seeds: One seed per image, in [0, 2**32); 0, 1, 2, ... by default. Each image only depends on its own seed.
            size: Height and width in pixels, multiples of the VAE's downsampling; the denoiser's own size by default.
            num_inference_steps: Steps of the noise scheduler, from 1 to the number of training timesteps.
            guidance_scale: 0 or more; 1 or less turns guidance off.
            guidance_rescale: Strength in [0, 1] of rescaling the guided prediction to the standard deviation of the
                conditional one (Lin et al. 2024); 0 turns rescaling off.
            guidance: Name and settings of the guidance, such as `{'name': 'apg', 'eta': 0.5}`; see
                `diffusion.models.guidance`. None means classifier-free guidance.
            snr_shift: Shift of a flow's sampling times toward noise; by default the objective's.
            noise_scheduler: A name from `diffusion.config.sampling_checks.SCHEDULERS`, or a scheduler class of
                diffusers.
            latents: Initial noise, standard normal [B, C, H, W], used instead of noise drawn from the seeds; its shape
                determines the image size.

        Returns:
            Images, float32 [B, 3, height, width] in [0, 1].

        Raises:
            UserError: An argument is out of range.
        """
        prompts = as_captions(prompts)
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        if len(seeds) != len(prompts):
            raise UserError(f'seeds: {len(seeds)} seeds for {len(prompts)} prompts; pass one seed per prompt')
        method = guidance_of(guidance, flow=self.objective.is_flow)
        if (weak := self._weak_predict(method, seeds)) is not None and negative_prompt:
            raise UserError('negative_prompt: this guidance has no unconditional prediction; set one of the two')
        strength = {'scale': guidance_scale, 'rescale': guidance_rescale}
        check_sampling(seeds, num_inference_steps, self.objective, **strength, shift=snr_shift)
        grid = self.latent_grid
        if latents is not None:
            grid.check_noise(latents, size, len(prompts))
            latents = latents.to(self.device)
        else:
            # Use the seeds as sample ids, so that an image's noise does not depend on other images.
            shape = grid.shape(size)
            latents = draws_for(seeds, seed=0, device=self.device).normal(Purpose.SAMPLING, shape)
        check_sides(self.vae, *(side * grid.cell for side in latents.shape[2:]))
        objective = self.objective if snr_shift is None else replace(self.objective, snr_shift=snr_shift)
        scheduler = inference_scheduler(noise_scheduler, objective)
        with evaluating(self):  # a text encoder in training mode may apply dropout
            sizes = sizes_of_uncropped(latents, cell=grid.cell) if self.adapter.takes_sizes else None
            condition = self._condition(self._tokens(prompts), sizes=sizes)
            is_needed = guidance_scale > 1 and weak is None
            unconditional = self._unconditional(negative_prompt, condition) if is_needed else None
            denoise = guided_denoiser(
                *(self._predict, condition, scheduler, objective),
                guidance=method,
                **strength,
                unconditional=unconditional,
                weak=weak,
            )
            start = latents.float() * self.objective.noise_scale
            latents = sample_latents(
                denoise,
                scheduler,
                start,
                num_inference_steps=num_inference_steps,
                seeds=seeds,
                even_times=self.adapter.samples_even_times,
            )
            return self.decode(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalized latents [B, C, H, W] to images, float32 [B, 3, height, width] in [0, 1]."""
        vae = self.vae
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float() * repeated(self.latent_std, latents) + repeated(self.latent_mean, latents)
            pixels = decode_latents(vae, latents.to(vae.dtype)).float()
        return (pixels / 2 + 0.5).clamp(0, 1)

    def _normals_of_a_step(self, batch: Mapping[str, Tensor]) -> dict[Purpose, int]:
        channels = latent_channels(self.vae)
        if batch_keys.LATENT_MOMENTS not in batch and batch_keys.IMAGE not in batch:
            return {}
        height, width = self._latent_size_of(batch)
        normals = channels * height * width
        counts = {Purpose.NOISE: normals}
        if self.posterior == 'sample' and has_variance(self.vae):
            counts[Purpose.POSTERIOR] = normals
        if self.objective.offset_noise:
            counts[Purpose.OFFSET_NOISE] = channels
        return counts

    def _latent_size_of(self, batch: Mapping[str, Tensor]) -> tuple[int, int]:
        if batch_keys.LATENT_MOMENTS in batch:
            return tuple(batch[batch_keys.LATENT_MOMENTS].shape[2:])  # type: ignore[return-value]
        height, width = batch[batch_keys.IMAGE].shape[2:]
        cell = downsampling(self.vae)
        return height // cell, width // cell

    def _check_scale(self, latents: Tensor) -> None:
        # Latents that are scaled twice, or not at all, train without an error but produce unusable images. Only check
        # the first batch, since reading the value waits for the GPU. Pixels need no scaling.
        if self._scale_checked or isinstance(self.vae, PixelSpace):
            return
        self._scale_checked = True
        std = float(latents.std())
        if not 0.5 < std < 2:
            log.warning(
                'latents: standard deviation %.2f in the first batch, but the noise schedule expects about 1; check '
                'that the VAE suits these images and that its scaling_factor (or latents_std) is correct',
                std,
            )

    def _check_captions(self, input_ids: Tensor, what: str) -> None:
        """Log a warning if captions fill all tokens of the text encoder; once for training and once for prompts.

        `what` is `FIRST_BATCH` or `prompts`. In training, only the first batch is read: reading waits for the GPU.
        Raises UserError for token ids outside of the vocabulary.
        """
        if what in self._captions_checked or input_ids.shape[1:] != self.empty_ids.shape:
            return
        self.text.check_vocabulary(input_ids)
        count = int(self.text.fills(input_ids).sum())
        if count or what == FIRST_BATCH:
            self._captions_checked.add(what)
        if count:
            log.warning(
                '%s: %d of %d fill all %d tokens of the text encoder; longer ones are cut to that length',
                *(what, count, len(input_ids), self.text.token_length),
            )

    def _condition_of(self, batch: Mapping[str, Tensor], draws: Draws | None = None) -> Condition:
        """Return the denoiser's conditioning inputs for a batch; with `draws`, drop captions at random."""
        input_ids, keep = batch[batch_keys.INPUT_IDS], None
        text = stored_text(batch, takes_pooled=self.denoiser_sizes.pooled_width is not None)
        mask = stored_mask(batch, mask_padding=self.ignores_padding)
        sizes = image_sizes(batch) if self.adapter.takes_sizes else None
        if draws is not None and self.caption_dropout:
            keep = draws.uniform(Purpose.CAPTION_DROPOUT) >= self.caption_dropout
        if keep is not None and self.caption_dropout_mode == 'empty':
            self._check_token_ids(input_ids)
            # Replace the token ids too, not only the embeddings: the padding mask is computed from the ids.
            input_ids = torch.where(keep[:, None, None], input_ids, self.empty_ids)
            if text is not None:
                text = text.where(keep, self._empty_caption_text())
            if mask is not None:
                mask = torch.where(keep[:, None], mask, self.text.padding_mask(self.empty_ids[None]))
            keep = None
        return self._condition(input_ids, keep, text, mask=mask, sizes=sizes)

    def _check_token_ids(self, input_ids: Tensor) -> None:
        if input_ids.shape[1:] != self.empty_ids.shape:
            encoders, tokens = self.empty_ids.shape
            raise UserError(
                f'{batch_keys.INPUT_IDS}: shape {tuple(input_ids.shape)}, but caption_dropout needs ids of shape '
                f'[B, {encoders}, {tokens}]; pad or cut captions to {tokens} tokens, as '
                'diffusion.models.text_conditioner.tokenize does, or set caption_dropout=0'
            )

    def _condition(
        self,
        input_ids: Tensor,
        keep: Tensor | None = None,
        text: TextOutput | None = None,
        *,
        mask: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Condition:
        """Return the condition for token ids [B, E, L], or for precomputed `text`; zeros where `keep` [B] is False."""
        text = self.embed(input_ids) if text is None else text.map(at_least_float32)
        if keep is not None:
            text = text.where(keep, text.map(torch.zeros_like))
        if mask is None and self.mask_padding:
            mask = self.text.padding_mask(input_ids)
        return Condition(text.embeds, mask, text.pooled, sizes)

    def embed(self, input_ids: Tensor) -> TextOutput:
        """Return text embeddings for token ids [B, E, L]; frozen encoders return float32."""
        if self.train_text_encoder:
            return self.text(input_ids)
        with self._encoding(input_ids.device):
            text = self.text(input_ids)
        return text.map(for_autograd)

    def _alignment_losses(self, batch: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        """Return the alignment loss per sample, float32 [B]; `tokens` are all or, on a route, the kept image tokens."""
        if batch_keys.IMAGE_FEATURES in batch:
            features = batch[batch_keys.IMAGE_FEATURES]
        elif batch_keys.IMAGE in batch:
            features = self.image_features(batch[batch_keys.IMAGE])
        else:
            raise UserError(
                f'batch: has neither {batch_keys.IMAGE} nor {batch_keys.IMAGE_FEATURES}, but '
                'model.representation_alignment needs one; use a dataset of images, precompute the latents again with '
                'this model, or set model.representation_alignment: null'
            )
        settings = self.representation_alignment
        if settings is not None and settings.spatial_norm is not None:
            features = normalized_over_tokens(features, settings.spatial_norm)
        # Blocks on the route process only the tokens that the router keeps.
        routed = self.router is not None and tokens.shape[1] < features.shape[1]
        kept = self.router.kept if routed and self.router is not None else None
        height, width = (side // self.denoiser_sizes.patch for side in self._latent_size_of(batch))
        return alignment_losses(self.feature_projector(tokens, (height, width)), features, kept)

    def _predicted_latents(self, outputs: Denoised, latents: Tensor, timesteps: Tensor) -> Tensor:
        """Return the clean latents [B, C, H, W] implied by predictions of x or of a flow's velocity."""
        if self.objective.prediction_type == 'sample':
            return at_least_float32(outputs.prediction)
        # x_t = x + t v and x' = x_t - t v', so x' = x + t (v - v').
        time = (timesteps / self.objective.num_train_timesteps).view(-1, 1, 1, 1)
        return latents + time * (outputs.target - at_least_float32(outputs.prediction))

    @contextmanager
    def _encoding(self, device: torch.device) -> Iterator[None]:
        """Context for running frozen encoders: no gradients, no autocast, and profiled as the stage `encode`."""
        # Turn off autocast, which would run a float32 VAE in half precision.
        frozen = torch.inference_mode() if self.encoders_in_inference_mode else torch.no_grad()
        with stage('encode'), frozen, torch.autocast(device.type, enabled=False):
            yield

    def _empty_caption_text(self) -> TextOutput:
        """Return the frozen text encoders' output for the empty caption, a batch of 1, cached per device."""
        if self._empty_text is None or self._empty_text.embeds.device != self.device:
            self._empty_text = self.embed(self.empty_ids[None])
        return self._empty_text

    def _unconditional(self, negative_prompt: str, condition: Condition) -> Condition:
        """Return the condition that guidance steers away from; without a negative prompt, that of a dropped caption."""
        if self.caption_dropout_mode == 'zeros' and not negative_prompt:
            pooled = None if condition.pooled is None else torch.zeros_like(condition.pooled)
            return replace(condition, embeds=torch.zeros_like(condition.embeds), pooled=pooled)
        return self._condition(self._tokens([negative_prompt] * len(condition)), sizes=condition.sizes)

    def _predict(self, noisy: Tensor, timesteps: Tensor, condition: Condition, denoiser: Any = None) -> Tensor:
        """Return the denoiser's prediction for noisy latents [B, C, H, W] at timesteps [B] of the noise schedule."""
        self.latent_grid.check_patches(*noisy.shape[2:])
        if self.adapter.timesteps_up_to_one:
            timesteps = timesteps / self.objective.num_train_timesteps
        return self.adapter.predict(denoiser or self.denoiser, noisy, timesteps, condition)

    def _weak_predict(self, guidance: Guidance, seeds: Sequence[int]) -> Predict | None:
        """Return the function for a guidance's weaker prediction; None if that is the unconditional prediction."""
        if guidance.weak == 'checkpoint':
            return functools.partial(self._predict, denoiser=self._weak_denoiser(guidance))
        return None if guidance.weak == 'unconditional' else self._sparse_predict(seeds)

    def _weak_denoiser(self, guidance: Guidance) -> WithWeights:
        """Return the denoiser with the worse weights that a guidance names; cached until another guidance is used."""
        if self.weak_weights is None:
            raise UserError('guidance: the model has no run with other weights; use diffusion generate or evaluate')
        if self.train_text_encoder:
            raise UserError('guidance: autoguidance needs the same text encoder, and this run trains it; use cfg')
        if self._weak is None or self._weak[0] != guidance:
            self._weak = None  # free the memory first
            weights, own = self.weak_weights(guidance), self.denoiser.state_dict(prefix='denoiser.')
            found = {name.partition('.')[2]: weights[name].to(own[name]) for name in own.keys() & weights.keys()}
            self._weak = guidance, WithWeights(self.denoiser, found)
        return self._weak[1]

    def _sparse_predict(self, seeds: Sequence[int]) -> Predict:
        """Return a variant of `_predict` in which some tokens, drawn by image seed and call number, skip blocks."""
        if (router := self.router) is None:
            raise UserError('guidance: sparse needs a model with algorithms.tread or model.sprint; use cfg')
        draws, calls = draws_for(seeds, seed=0, device=self.device), itertools.count()

        def predict(noisy: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
            step = replace(draws, batch_index=torch.full_like(draws.sample_id, next(calls)))
            with router.routing(step, in_sampling=True):
                return self._predict(noisy, timesteps, condition)

        return predict

    def _tokens(self, captions: Sequence[str]) -> Tensor:
        """Tokenize captions; return token ids on the model's device, int64 [B, E, L]."""
        ids = tokenize(self.text.tokenizers, captions)
        self._check_captions(ids, 'prompts')
        return ids.to(self.device)


def squared_error(outputs: Denoised) -> Tensor:
    """Return the mean squared error of the prediction per sample, float32 [B] (float64 for a float64 model)."""
    difference = at_least_float32(outputs.prediction) - at_least_float32(outputs.target)
    return difference.square().flatten(1).mean(dim=1)
