"""PixelSpace: takes the place of an autoencoder in models that are trained on pixels instead of latents."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class PixelSpace(nn.Module):
    """Autoencoder without weights that changes nothing: its latents are the pixels, [B, 3, H, W] in [-1, 1]."""

    # It has the attributes and methods of diffusers' autoencoders that diffusion.models.vae uses.
    config: ClassVar[dict[str, Any]] = {'in_channels': 3, 'latent_channels': 3, 'scaling_factor': 1.0}
    spatial_compression_ratio: ClassVar[int] = 1
    dtype: ClassVar[torch.dtype] = torch.float32
    """Data type of the pixels. It does not follow the precision of the frozen parts, so that pixels are not rounded."""

    def encode(self, pixels: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return pixels [B, 3, H, W] in [-1, 1] in a tuple."""
        return (pixels,)

    def decode(self, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Return latents [B, 3, H, W] in a tuple."""
        return (latents,)
