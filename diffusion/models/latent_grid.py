"""Sizes of images and latents that a denoiser can generate, and the checks of sizes that users ask for.

Shapes: B batch, C latent channels, H W latent size.
"""

from dataclasses import dataclass

from torch import Tensor

from diffusion.errors import UserError


@dataclass(frozen=True)
class LatentGrid:
    """Relation between the size of an image in pixels and that of its latents."""

    channels: int
    """C, channels of the latents."""
    cell: int
    """Side of a latent cell in pixels."""
    patch: int
    """Side of a token of the denoiser in latent cells; 1 if it takes any size."""
    default_side: int
    """Side, in latent cells, of images that are generated without a size."""

    def shape(self, size: tuple[int, int] | None) -> tuple[int, int, int]:
        """Return C, H and W of the latents for images of a height and width in pixels; None is the default size.

        Raises:
            UserError: The denoiser cannot generate images of this size.
        """
        height, width = size or (self.default_side * self.cell,) * 2
        unit = self.cell * self.patch
        if min(height, width) <= 0 or height % unit or width % unit:
            what = 'latent cell' if unit == self.cell else 'patch of the denoiser'
            raise UserError(f'size: {height}x{width}; use positive multiples of {unit} px, the size of a {what}')
        return self.channels, height // self.cell, width // self.cell

    def check_patches(self, height: int, width: int) -> None:
        """Raise UserError unless latents of a height and width in cells divide into the denoiser's patches."""
        if height % self.patch or width % self.patch:
            raise UserError(
                f"streams: latents of {width}x{height} cells do not divide into the denoiser's patches of "
                f'{self.patch}x{self.patch}; use images whose sides are multiples of {self.patch * self.cell} px'
            )

    def check_noise(self, latents: Tensor, size: tuple[int, int] | None, count: int) -> None:
        """Raise UserError unless `latents` are initial noise for `count` images of a size that the VAE can decode."""
        if latents.ndim != 4 or tuple(latents.shape[:2]) != (count, self.channels) or 0 in latents.shape:
            raise UserError(
                f'latents: shape {tuple(latents.shape)}; pass noise of shape [{count}, {self.channels}, height / '
                f'{self.cell}, width / {self.cell}], one entry per prompt'
            )
        if size is not None and self.shape(size)[1:] != tuple(latents.shape[2:]):
            height, width = (side * self.cell for side in latents.shape[2:])
            raise UserError(
                f'size: {size[0]}x{size[1]}, but latents of shape {tuple(latents.shape)} give images of '
                f'{height}x{width} px; pass only one of the two'
            )
