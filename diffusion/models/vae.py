"""Use of a VAE from diffusers: encoding, decoding, and the statistics that normalize its latents.

Shapes: B batch, C latent channels, H W latent size; images are [B, 3, 8H, 8W] if the VAE downsamples by 8.
"""

import copy

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from diffusion.errors import UserError


def latent_channels(vae: AutoencoderKL) -> int:
    """Return C, the number of channels of a VAE's latents."""
    return vae.config['latent_channels']


def latent_statistics(vae: AutoencoderKL) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the VAE's latents, float32 [C] each; models use (latents - mean) / std."""
    # diffusers' configurations have two forms: a scaling_factor with an optional shift_factor, or means and standard
    # deviations per channel with an additional scaling_factor.
    config, channels = vae.config, vae.config['latent_channels']
    mean = config.get('latents_mean') or [config.get('shift_factor') or 0.0] * channels
    std = config.get('latents_std') or [1.0] * channels
    if len(mean) != channels or len(std) != channels:
        raise UserError(
            f'vae: latents_mean and latents_std have {len(mean)} and {len(std)} values for {channels} channels; give '
            'one value per channel'
        )
    return torch.tensor(mean, device='cpu'), torch.tensor(std, device='cpu') / config['scaling_factor']


def posterior_of(vae: AutoencoderKL, pixels: Tensor) -> DiagonalGaussianDistribution:
    """Return the VAE's posterior over latents for images [B, 3, 8H, 8W] in [-1, 1].

    Raises:
        UserError: The images' sides are not multiples of the VAE's downsampling.
    """
    # The VAE would silently drop an incomplete cell at the right and lower edges. Recipes are checked for multiples of
    # 8 px, but a VAE may downsample by more.
    cell, (height, width) = downsampling(vae), pixels.shape[2:]
    if height % cell or width % cell:
        raise UserError(
            f'streams: images of {width}x{height} px, but the VAE downsamples by {cell}; use multiples of {cell} px'
        )
    return vae.encode(pixels, return_dict=False)[0]  # type: ignore[return-value]


def encoder_blocks(vae: AutoencoderKL) -> list[nn.Module]:
    """Return the blocks of a VAE's encoder, which torch.compile compiles one by one."""
    assert isinstance(vae.encoder, nn.Module)
    return [block for block in vae.encoder.modules() if isinstance(block, ResnetBlock2D)]


def decode_latents(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Return images [B, 3, 8H, 8W], roughly in [-1, 1], for unnormalized latents [B, C, H, W]."""
    return vae.decode(latents, return_dict=False)[0]  # type: ignore[arg-type]


def downsampling(vae: AutoencoderKL) -> int:
    """Return the VAE's downsampling factor, pixels per latent cell along one side: 8 for Stable Diffusion."""
    return 2 ** (len(vae.config['block_out_channels']) - 1)


@torch.no_grad()
def with_folded_statistics(vae: AutoencoderKL) -> AutoencoderKL:
    """Return a copy of a VAE with its per-channel latent means and standard deviations folded into its weights.

    diffusers' Stable Diffusion pipeline applies `scaling_factor` only. The 1x1 convolutions next to the latents can
    apply the rest: with normalized latents z = (m - mean) / std, `quant_conv` outputs the moments of z, and
    `post_quant_conv` maps z back to m. A VAE without latent statistics is copied unchanged.
    """
    config = vae.config
    vae = copy.deepcopy(vae).float()
    if not config.get('latents_mean') and not config.get('latents_std') and not config.get('shift_factor'):
        return vae
    if vae.quant_conv is None or vae.post_quant_conv is None:
        raise UserError(
            'export: this VAE has latent statistics per channel but no quant_conv and post_quant_conv to fold them '
            'into; the diffusers pipeline cannot represent it'
        )
    mean, std = latent_statistics(vae)
    into, back = vae.quant_conv, vae.post_quant_conv
    assert into.bias is not None and back.bias is not None
    # W (z * std + mean) + b = (W * std) z + (b + W mean); the bias must use W before it is scaled.
    back.bias += back.weight[:, :, 0, 0] @ mean
    back.weight *= std[None, :, None, None]
    # The first half of the output channels are means, the second half log-variances, which shift by -2 log(std).
    channels = len(std)
    into.bias[:channels] -= mean
    into.bias[:channels] /= std
    into.bias[channels:] -= 2 * std.log()
    into.weight[:channels] /= std[:, None, None, None]
    vae.register_to_config(latents_mean=None, latents_std=None, shift_factor=None, scaling_factor=1.0)
    return vae
