"""Operations on an autoencoder: encoding, decoding, and the statistics that normalize its latents.

An autoencoder is one of: an AutoencoderKL, whose encoder returns the mean and log-variance of a Gaussian posterior; a
Flux2Vae, which wraps FLUX.2's and returns a posterior too; an AutoencoderDC (DC-AE, Chen et al. 2024) or
RepresentationVae, whose encoders only return latents; or PixelSpace, which changes nothing.

Shapes: B batch, C latent channels, H W latent size; images are [B, 3, 8H, 8W] if the autoencoder downsamples by 8.
"""

import copy
import logging
import math
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC, EfficientViTBlock, ResBlock
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from diffusion.errors import UserError
from diffusion.models.objective import Objective
from diffusion.models.wrapped_vaes import Flux2Vae, RepresentationVae

log = logging.getLogger(__name__)


class PixelSpace(nn.Module):
    """Autoencoder without weights that changes nothing: its latents are the pixels, [B, 3, H, W] in [-1, 1]."""

    # Provide the attributes and methods of diffusers' autoencoders that this file uses.
    config: ClassVar[dict[str, Any]] = {'in_channels': 3, 'latent_channels': 3, 'scaling_factor': 1.0}
    spatial_compression_ratio: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32
    """Data type of the pixels. It does not follow the frozen parts' precision, so that pixels are not rounded."""

    def encode(self, pixels: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return (pixels,)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return (latents,)


Vae = AutoencoderKL | Flux2Vae | AutoencoderDC | RepresentationVae | PixelSpace
AnyVae = TypeVar('AnyVae', bound=nn.Module)

STABLE_DIFFUSION_VAE: dict[str, Any] = {
    'in_channels': 3,
    'out_channels': 3,
    'down_block_types': ['DownEncoderBlock2D'] * 4,
    'up_block_types': ['UpDecoderBlock2D'] * 4,
    'block_out_channels': [128, 256, 512, 512],
    'layers_per_block': 2,
    'latent_channels': 4,
    'norm_num_groups': 32,
    'sample_size': 768,
    'scaling_factor': 0.18215,
}
"""Configuration of Stable Diffusion 2's AutoencoderKL; those of later models change some of its values."""
SIXTEEN_CHANNEL_VAE: dict[str, Any] = STABLE_DIFFUSION_VAE | {
    'sample_size': 1024,
    'latent_channels': 16,
    'use_quant_conv': False,
    'use_post_quant_conv': False,
}
"""Settings that the AutoencoderKLs of FLUX.1 and Stable Diffusion 3 share."""
RAE_BASE_DIMENSION = 4096
"""Size of an image's latents (number of values) at which a flow needs no time shift: 32x32 cells of 4 channels."""
ENCODER_BLOCKS = (ResnetBlock2D, ResBlock, EfficientViTBlock)


def latent_channels(vae: Vae) -> int:
    return vae.config['latent_channels']


def has_variance(vae: Vae) -> bool:
    """Return True if the encoder returns a log-variance, so that latents can be sampled; False for latents only."""
    return isinstance(vae, AutoencoderKL | Flux2Vae)


def latent_statistics(vae: Vae) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the VAE's latents, float32 [C] each; models use (latents - mean) / std.

    Those of a Flux2Vae are [C, k, k]: statistics depend on a cell's position within groups of k x k cells.
    """
    # diffusers' configurations have one of two forms: a scaling_factor with an optional shift_factor, or means and
    # standard deviations per channel with an additional scaling_factor.
    config, channels = vae.config, vae.config['latent_channels']
    mean = config.get('latents_mean') or [config.get('shift_factor') or 0.0] * channels
    std = config.get('latents_std') or [1.0] * channels
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f'vae: latents_mean and latents_std have {len(mean)} and {len(std)} values for {channels} channels; give '
            'one value per channel'
        )
    return torch.tensor(mean, device='cpu'), torch.tensor(std, device='cpu') / config['scaling_factor']


def repeated(statistics: Tensor, latents: Tensor) -> Tensor:
    """Return statistics [C, k, k] in a shape that broadcasts to latents [B, C, H, W]."""
    period, (height, width) = statistics.shape[-1], latents.shape[2:]
    return statistics if period == 1 else statistics.repeat(1, height // period, width // period)


def moments_of(vae: Vae, pixels: Tensor) -> Tensor:
    """Return the posterior's mean and log-variance, [B, 2C, H, W], for images in [-1, 1].

    A VAE without variance (see `has_variance`) gives latents [B, C, H, W].
    """
    if isinstance(vae, AutoencoderKL | Flux2Vae):
        return posterior_of(vae, pixels).parameters
    check_sides(vae, *pixels.shape[2:])
    return vae.encode(pixels, return_dict=False)[0]  # type: ignore[return-value]


def posterior_of(vae: AutoencoderKL | Flux2Vae, pixels: Tensor) -> DiagonalGaussianDistribution:
    """Return the VAE's posterior over latents for images [B, 3, 8H, 8W] in [-1, 1]."""
    check_sides(vae, *pixels.shape[2:])
    return vae.encode(pixels, return_dict=False)[0]  # type: ignore[return-value]


def check_sides(vae: Vae, height: int, width: int) -> None:
    """Raise UserError if a VAE cannot encode or decode images of this size in pixels."""
    # The VAE would silently drop an incomplete cell at the right and bottom edges. Recipes are checked for multiples of
    # 8 px, but a VAE may downsample by more.
    step = image_step(vae)
    if isinstance(vae, RepresentationVae) and (height, width) != (vae.image_side, vae.image_side):
        raise UserError(
            f'streams: images of {width}x{height} px, but this AutoencoderRAE encodes and draws {vae.image_side}x'
            f'{vae.image_side} px only; use that size'
        )
    if height % step or width % step:
        raise UserError(
            f'streams: images of {width}x{height} px, but the VAE downsamples by {step}; use multiples of {step} px'
        )


def encoder_blocks(vae: Vae) -> list[nn.Module]:
    """Return the blocks of a VAE's encoder, which are compiled separately; [] for PixelSpace and RepresentationVae."""
    encoder = getattr(vae, 'encoder', None)
    return [] if encoder is None else [block for block in encoder.modules() if isinstance(block, ENCODER_BLOCKS)]


def decode_latents(vae: Vae, latents: Tensor) -> Tensor:
    """Return images [B, 3, 8H, 8W], roughly in [-1, 1], for unnormalized latents [B, C, H, W]."""
    return vae.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]


def downsampling(vae: Vae) -> int:
    """Return the VAE's downsampling factor, in pixels per latent cell along one side: 8 for Stable Diffusion."""
    if isinstance(vae, AutoencoderKL):
        return 2 ** (len(vae.config['block_out_channels']) - 1)
    return vae.spatial_compression_ratio


def period_of(vae: Vae) -> int:
    """Return 2 if each position in a 2x2 square of latents has statistics of its own (FLUX.2's `channels`), else 1."""
    return vae.cells_per_period if isinstance(vae, Flux2Vae) else 1


def image_step(vae: Vae) -> int:
    """Return the number of pixels by which the sides of images must be divisible."""
    return downsampling(vae) * period_of(vae)


def description(vae: Vae) -> str:
    """Return an autoencoder's name for messages and manifests, such as `AutoencoderKL with 4 channels per 8x8 px`."""
    cell = downsampling(vae)
    return f'{_class_name(vae)} with {latent_channels(vae)} channels per {cell}x{cell} px'


def _class_name(vae: Vae) -> str:
    return type(vae.autoencoder if isinstance(vae, Flux2Vae | RepresentationVae) else vae).__name__


def objective_for(vae: Vae, objective: Objective | None, default: Objective) -> Objective:
    """Return a model's objective: the given one or, if it is None, the default one.

    With a RepresentationVae, the default's time shift is sqrt(CHW / 4096), since latents of more dimensions need more
    noise (Zheng et al. 2025). A given flow without a shift is kept, but a warning recommends this shift.
    """
    if not isinstance(vae, RepresentationVae):
        return objective or default
    shift = math.sqrt(latent_channels(vae) * (vae.image_side // downsampling(vae)) ** 2 / RAE_BASE_DIMENSION)
    if objective is not None and objective.is_flow and objective.snr_shift == 1:
        log.warning('objective: no snr_shift, but latents of AutoencoderRAE have many dimensions; use %.2f', shift)
    return objective or replace(default, snr_shift=shift)


def autoencoder_kl_of(vae: Vae, pipeline: str) -> AutoencoderKL:
    """Return the VAE, an AutoencoderKL; raise UserError for any other class, since diffusers' pipelines need this."""
    if not isinstance(vae, AutoencoderKL):
        raise UserError(
            f'export: a {pipeline} decodes with an AutoencoderKL, but this model has an {_class_name(vae)}; '
            'draw with task=generate, or train a model of another family, such as prx, on these latents'
        )
    return vae


@torch.no_grad()
def with_folded_statistics(vae: AnyVae, *, pipeline_shifts: bool = False) -> AnyVae:
    """Return a float32 copy of a VAE with its latent means and standard deviations folded into its weights.

    diffusers' pipelines apply the scalar `scaling_factor`, and some also the scalar `shift_factor` (set
    `pipeline_shifts`). All others are folded into the 1x1 convolutions next to the latents: with normalized latents z =
    (m - mean) / std, `quant_conv` outputs the moments of z, and `post_quant_conv` maps z back to m. Without others, the
    weights stay the same. Raises UserError for pixels, or if these convolutions are needed but missing.
    """
    if isinstance(vae, PixelSpace):
        raise UserError(
            'export: this model is trained on pixels, but the pipeline needs an autoencoder; train on latents'
        )
    assert isinstance(vae, AutoencoderKL | AutoencoderDC)
    config = vae.config
    per_channel = bool(config.get('latents_mean') or config.get('latents_std'))
    if not per_channel and (pipeline_shifts or not config.get('shift_factor')):
        return _float_copy(vae)
    if not isinstance(vae, AutoencoderKL) or vae.quant_conv is None or vae.post_quant_conv is None:
        kind = 'latent statistics per channel' if per_channel else 'a shift_factor'
        raise UserError(
            f'export: this {type(vae).__name__} has {kind} but no quant_conv and post_quant_conv to fold them into, '
            'so that the diffusers pipeline cannot represent it. Draw with task=generate; or replace them by a single '
            "scaling_factor in the VAE's config.json and train again"
        )
    folded = _float_copy(vae)
    mean, std = latent_statistics(folded)
    _fold(folded, mean, std)
    folded.register_to_config(latents_mean=None, latents_std=None, shift_factor=None, scaling_factor=1.0)
    return folded


@torch.no_grad()
def with_latent_scale(vae: AutoencoderKL, scale: float, shift: float = 0.0) -> AutoencoderKL:
    """Return a VAE for programs that always normalize latents m to (m - shift) * scale.

    This is the VAE itself if it has this scale and shift, else a float32 copy with the difference folded into its
    weights. Raises UserError if the VAE does not have the convolutions that this needs.
    """
    mean, std = latent_statistics(vae)
    wanted_mean, wanted_std = torch.full_like(mean, shift), torch.full_like(std, 1 / scale)
    if torch.allclose(mean, wanted_mean) and torch.allclose(std, wanted_std):
        return vae
    if vae.quant_conv is None or vae.post_quant_conv is None:
        raise UserError(
            f'export: programs that read a single file normalize the latents of this family by scale {scale:g} and '
            f'shift {shift:g}, but this VAE has other statistics and no quant_conv and post_quant_conv to fold the '
            'difference into; export a folder instead (--out FOLDER)'
        )
    adapted = _float_copy(vae)
    # With normalized latents z = (m - mean) / std, the VAE must encode to and decode from z / scale + shift.
    ratio = std * scale
    _fold(adapted, mean - shift * ratio, ratio)
    adapted.register_to_config(latents_mean=None, latents_std=None, shift_factor=shift, scaling_factor=scale)
    return adapted


def _fold(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Change a VAE in place so that it encodes to and decodes from (m - mean) / std instead of latents m."""
    into, back = vae.quant_conv, vae.post_quant_conv
    assert into is not None and back is not None and into.bias is not None and back.bias is not None
    # W (z * std + mean) + b = (W * std) z + (b + W mean); the bias must use W before it is scaled.
    back.bias += back.weight[:, :, 0, 0] @ mean
    back.weight *= std[None, :, None, None]
    # The first half of the output channels are means; the second half are log-variances, which shift by -2 log(std).
    channels = len(std)
    into.bias[:channels] -= mean
    into.bias[:channels] /= std
    into.bias[channels:] -= 2 * std.log()
    into.weight[:channels] /= std[:, None, None, None]


def _float_copy(vae: AnyVae) -> AnyVae:
    return copy.deepcopy(vae).float()
