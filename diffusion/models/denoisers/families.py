"""List of the families of denoisers that LatentDiffusion supports."""

from torch import nn

from diffusion.errors import UserError
from diffusion.models.denoisers.family import DenoiserFamily
from diffusion.models.denoisers.mmdit import MMDiT
from diffusion.models.denoisers.prx import PRX
from diffusion.models.denoisers.sdxl import SDXLUNet
from diffusion.models.denoisers.unet import CrossAttentionUNet

# SDXLUNet comes before CrossAttentionUNet, which would own SDXL's U-Net too: both U-Nets have the same class.
FAMILIES: list[DenoiserFamily] = [SDXLUNet(), CrossAttentionUNet(), PRX(), MMDiT()]
"""Supported families; the first that owns a denoiser is used."""


def register_family(family: DenoiserFamily) -> None:
    """Add a family of your own, which takes precedence over all others; call this when your module is imported."""
    FAMILIES.insert(0, family)


def family_of(denoiser: nn.Module) -> DenoiserFamily:
    """Return the family of a denoiser.

    Raises:
        UserError: No family owns the denoiser.
    """
    for family in FAMILIES:
        if family.owns(denoiser):
            return family
    known = ', '.join(dict.fromkeys(family.denoiser_class.__name__ for family in FAMILIES))
    raise UserError(
        f'denoiser: {type(denoiser).__name__} is of no known family; use {known}, or add one with '
        'diffusion.models.denoisers.families.register_family'
    )
