"""ComposerModel that trains a small AutoencoderKL, the VAE of the quickstart.

Shapes: B batch, C latent channels, H W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import torch
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from diffusion.config.declarations import OBJECTIVE, AtLeast, MultipleOf, NotArchitecture, constrained
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.vae import decode_latents, posterior_of

_STATISTICS_MOMENTUM = 0.01
"""Weight of each batch in the running latent statistics."""


class ReconstructedImages(NamedTuple):
    """Original and reconstructed images [B, 3, 8H, 8W] in [-1, 1], and mean KL(posterior || N(0, 1)) per value, [B]."""

    pixels: Tensor
    reconstructed: Tensor
    divergence: Tensor


class Autoencoder(ComposerModel):
    """AutoencoderKL trained with squared error, a small L1 term for edges, and a small KL term for smooth latents.

    It has neither an adversarial nor a perceptual loss, since it is meant for flat-color images.

    Training tracks a running mean and variance of the latents per channel. `finished()` writes them to the VAE's
    configuration, so that a diffusion model sees latents of mean 0 and standard deviation 1.
    """

    latent_mean: Tensor
    latent_variance: Tensor

    def __init__(self, vae: AutoencoderKL, *, l1_weight: float = 0.05, kl_weight: float = 1e-4) -> None:
        super().__init__()
        self.vae = vae
        self.l1_weight = l1_weight
        self.kl_weight = kl_weight
        self.register_buffer('latent_mean', torch.zeros(vae.config['latent_channels']))
        self.register_buffer('latent_variance', torch.ones(vae.config['latent_channels']))

    def forward(self, batch: Mapping[str, Tensor]) -> ReconstructedImages:
        pixels = batch[batch_keys.IMAGE].float() / 127.5 - 1
        posterior = posterior_of(self.vae, pixels)
        latents = posterior.sample() if self.training else posterior.mode()
        if self.training:
            self._update_statistics(latents.detach())
        divergence = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).flatten(1).mean(dim=1)
        return ReconstructedImages(pixels, decode_latents(self.vae, latents), divergence)

    def loss(self, outputs: ReconstructedImages, batch: Mapping[str, Tensor]) -> Tensor:
        error = outputs.reconstructed - outputs.pixels
        return error.square().mean() + self.l1_weight * error.abs().mean() + self.kl_weight * outputs.divergence.mean()

    def eval_forward(
        self, batch: Mapping[str, Tensor], outputs: ReconstructedImages | None = None
    ) -> ReconstructedImages:
        return outputs or self.forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {'psnr_db': MeanMetric()}

    def update_metric(self, batch: Mapping[str, Tensor], outputs: ReconstructedImages, metric: Metric) -> None:
        values = psnr_db(outputs.reconstructed, outputs.pixels)
        metric.update(values, batch_keys.weights_of(batch, values))

    def finished(self) -> AutoencoderKL:
        """Return the trained autoencoder, with the mean and standard deviation of its latents in its configuration."""
        # Set the scaling factor to 1, as required if latents_std is set: `latent_statistics` also divides by it.
        mean, std = self.latent_mean, self.latent_variance.sqrt()
        self.vae.register_to_config(
            latents_mean=[round(value, 5) for value in mean.tolist()],
            latents_std=[round(value, 5) for value in std.tolist()],
            scaling_factor=1.0,
        )
        return self.vae

    def _update_statistics(self, latents: Tensor) -> None:
        self.latent_mean.lerp_(latents.mean(dim=(0, 2, 3)), _STATISTICS_MOMENTUM)
        self.latent_variance.lerp_(latents.var(dim=(0, 2, 3)), _STATISTICS_MOMENTUM)


def psnr_db(images: Tensor, references: Tensor) -> Tensor:
    """Return each image's peak signal-to-noise ratio in decibels, [B]; pixels are clipped to [-1, 1]."""
    error = (images.clamp(-1, 1) - references.clamp(-1, 1)) / 2
    # The clamp limits the result for identical images to 100 dB.
    return -10 * error.square().flatten(1).mean(dim=1).clamp(min=1e-10).log10()


@constrained
def tiny_autoencoder(
    *,
    block_out_channels: Annotated[Sequence[int], AtLeast(1)] = (24, 48, 64, 96),
    latent_channels: Annotated[int, AtLeast(1)] = 16,
    layers_per_block: Annotated[int, AtLeast(0)] = 1,
    norm_num_groups: Annotated[int, AtLeast(1)] = 8,
    l1_weight: Annotated[float, OBJECTIVE, NotArchitecture()] = 0.05,
    kl_weight: Annotated[float, OBJECTIVE, NotArchitecture()] = 1e-4,
) -> Autoencoder:
    """Build a small AutoencoderKL without attention, ready to train.

    Args:
        block_out_channels: Widths of the levels; each level after the first halves the image side.
        latent_channels: C, channels of the latents.
        layers_per_block: Residual blocks per level.
        norm_num_groups: Groups of the GroupNorm layers; must divide every width.
        l1_weight: Weight of the mean absolute error; the mean squared error has weight 1.
        kl_weight: Weight of the KL divergence per latent element.
    """
    levels = len(block_out_channels)
    if (problem := MultipleOf(norm_num_groups).problem(tuple(block_out_channels))) is not None:
        raise UserError(f'block_out_channels: {problem} (norm_num_groups is {norm_num_groups})')
    vae = AutoencoderKL(
        down_block_types=('DownEncoderBlock2D',) * levels,  # type: ignore[arg-type]
        up_block_types=('UpDecoderBlock2D',) * levels,  # type: ignore[arg-type]
        block_out_channels=tuple(block_out_channels),  # type: ignore[arg-type]
        layers_per_block=layers_per_block,
        latent_channels=latent_channels,
        norm_num_groups=norm_num_groups,
        sample_size=64,
        scaling_factor=1.0,
        mid_block_add_attention=False,
    )
    return Autoencoder(vae, l1_weight=l1_weight, kl_weight=kl_weight)
