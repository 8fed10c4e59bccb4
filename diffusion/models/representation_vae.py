"""Representation autoencoders (RAE, Zheng et al. 2025): latents are the tokens of a frozen image encoder.

Shapes: B batch, C width of the encoder, H W its grid of tokens; images are [B, 3, sH, sW] for patches of side s.
"""

import copy
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from torch import Tensor, nn


class RepresentationVae(nn.Module):
    """Wrapper of an AutoencoderRAE for images in [-1, 1], all of the size it decodes to; its latents are normalized."""

    def __init__(self, autoencoder: AutoencoderRAE) -> None:
        super().__init__()
        config: Any = autoencoder.config
        self.autoencoder = autoencoder
        autoencoder.reshape_to_2d = True
        self.image_side: int = autoencoder.decoder_image_size
        self.spatial_compression_ratio: int = config['patch_size']
        self.config = {
            'in_channels': config['num_channels'],
            'latent_channels': config['encoder_hidden_size'],
            'scaling_factor': 1.0,
        }

    @property
    def encoder(self) -> nn.Module:
        return self.autoencoder.encoder

    @property
    def dtype(self) -> torch.dtype:
        return self.autoencoder.dtype

    def exported(self) -> AutoencoderRAE:
        """Return a float32 copy of the autoencoder."""
        return copy.deepcopy(self.autoencoder).float()

    def encode(self, pixels: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        return self.autoencoder.encode(pixels / 2 + 0.5, return_dict=False)  # type: ignore[return-value]

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        images: Any = self.autoencoder.decode(latents, return_dict=False)[0]
        return (images * 2 - 1,)
