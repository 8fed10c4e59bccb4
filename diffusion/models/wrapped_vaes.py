"""Autoencoders of diffusers in wrappers that give them the interface of AutoencoderKL.

FLUX.2's latents are normalized per channel and position in a group of 2x2 cells. The latents of representation
autoencoders (RAE, Zheng et al. 2025) are the tokens of a frozen image encoder.

Shapes: B batch, C channels of the autoencoder, H W latent size; images are [B, 3, sH, sW], where s is 8 for FLUX.2 and
the side of the encoder's patches for a representation autoencoder.
"""

import copy
from typing import Any, Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn
from torch.nn import functional as F

from diffusion.errors import UserError

Layout = Literal['channels', 'grouped']


class _WrappedVae(nn.Module):
    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    @property
    def encoder(self) -> nn.Module:
        return self.autoencoder.encoder

    @property
    def dtype(self) -> torch.dtype:
        return self.autoencoder.dtype


class Flux2Vae(_WrappedVae):
    """AutoencoderKLFlux2 with one of two layouts of its latents, and with statistics from its batch norm `bn`.

    Layout `channels` keeps the latents [B, C, H, W]. Layout `grouped` makes each group of 2x2 cells one cell, as FLUX.2
    does: [B, 4C, H/2, W/2], with channels in the order (channel, row, column). Both have the same values.
    """

    def __init__(self, autoencoder: AutoencoderKLFlux2, layout: Layout = 'channels') -> None:
        super().__init__(autoencoder)
        config: Any = autoencoder.config
        side, width = config['patch_size']
        if side != width:
            raise UserError(f'vae: AutoencoderKLFlux2 with groups of {side}x{width} cells; use one with square groups')
        self.group = side if layout == 'grouped' else 1
        """Side in cells of the groups that `encode` merges into one cell: 2 for layout `grouped`, 1 for `channels`."""
        self.cells_per_period = side // self.group
        """Side in cells of this layout after which the statistics repeat; latent sizes must be multiples of it."""
        self.spatial_compression_ratio = 2 ** (len(config['block_out_channels']) - 1) * self.group
        channels = config['latent_channels'] * self.group**2
        self.config = {'in_channels': config['in_channels'], 'latent_channels': channels, 'scaling_factor': 1.0}
        # Keep the statistics as numbers: a conversion to half precision would round the buffers.
        bn, shape = autoencoder.bn, (channels, *[self.cells_per_period] * (0 if self.group == side else 2))
        if bn.running_mean is not None and bn.running_var is not None and not bn.running_mean.is_meta:
            mean, std = bn.running_mean, torch.sqrt(bn.running_var + config['batch_norm_eps'])
            self.config |= {'latents_mean': mean.view(shape).tolist(), 'latents_std': std.view(shape).tolist()}

    def exported(self) -> AutoencoderKLFlux2:
        """Return a float32 copy of the autoencoder, with its statistics as they were before a conversion to 16 bits."""
        copied: Any = copy.deepcopy(self.autoencoder).float()
        mean, std = (torch.tensor(self.config[name]).flatten() for name in ('latents_mean', 'latents_std'))
        copied.bn.running_mean.copy_(mean)
        copied.bn.running_var.copy_(std**2 - copied.config['batch_norm_eps'])
        return copied

    def check_statistics(self, where: str) -> None:
        """Raise UserError if the batch norm was never trained, so that it has no statistics."""
        bn: Any = self.autoencoder.bn
        if not bn.running_mean.any() and (bn.running_var == 1).all():
            raise UserError(
                f'{where}: its buffers bn.running_mean and bn.running_var have their initial values, so that latents '
                'would not be normalized; use the published weights, or set both to the statistics of your images'
            )

    def encode(self, pixels: Tensor, return_dict: bool = False) -> tuple[DiagonalGaussianDistribution]:
        """Return a tuple with the posterior in this layout; its latents are not normalized."""
        posterior: Any = self.autoencoder.encode(pixels, return_dict=False)[0]
        if self.group == 1:
            return (posterior,)
        return (DiagonalGaussianDistribution(F.pixel_unshuffle(posterior.parameters, self.group)),)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return a tuple with the images for unnormalized latents in this layout."""
        return self.autoencoder.decode(F.pixel_shuffle(latents, self.group), return_dict=False)  # type: ignore[arg-type, return-value]


class RepresentationVae(_WrappedVae):
    """AutoencoderRAE in a wrapper for images in [-1, 1] of its fixed decoder size only; its latents are normalized."""

    def __init__(self, autoencoder: AutoencoderRAE) -> None:
        super().__init__(autoencoder)
        config: Any = autoencoder.config
        autoencoder.reshape_to_2d = True
        self.image_side: int = autoencoder.decoder_image_size
        self.spatial_compression_ratio: int = config['patch_size']
        self.config = {
            'in_channels': config['num_channels'],
            'latent_channels': config['encoder_hidden_size'],
            'scaling_factor': 1.0,
        }

    def exported(self) -> AutoencoderRAE:
        """Return a float32 copy of the autoencoder."""
        return copy.deepcopy(self.autoencoder).float()

    def encode(self, pixels: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return self.autoencoder.encode(pixels / 2 + 0.5, return_dict=False)  # type: ignore[return-value]

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        images: Any = self.autoencoder.decode(latents, return_dict=False)[0]
        return (images * 2 - 1,)
