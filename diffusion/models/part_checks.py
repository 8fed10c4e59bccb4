"""Checks that the parts of a LatentDiffusion fit together."""

from diffusion.config.model_checks import clean_image_problem
from diffusion.errors import UserError
from diffusion.models.families.adapter import DenoiserSizes
from diffusion.models.objective import Objective
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.vae import PixelSpace, Vae, latent_channels


def check_parts(denoiser: DenoiserSizes, vae: Vae, text: TextConditioner) -> None:
    """Raise UserError unless the channels and widths of denoiser, VAE and text encoders match."""
    channels = latent_channels(vae)
    if denoiser.in_channels != channels or denoiser.out_channels != channels:
        raise UserError(
            f'denoiser: {denoiser.in_channels} input and {denoiser.out_channels} output channels, '
            f'but the VAE has {channels} latent channels; build the denoiser for this VAE'
        )
    if denoiser.text_width != text.width:
        raise UserError(
            f'denoiser: takes text embeddings of width {denoiser.text_width}, but the text encoders have width '
            f'{text.width}; use equal widths'
        )
    if denoiser.pooled_width != text.pooled_width:
        raise UserError(
            f'denoiser: takes pooled text of width {denoiser.pooled_width}, but the text encoders give '
            f'{text.pooled_width}; use the text encoders that it was built for'
        )


def check_perceptual(vae: Vae, objective: Objective) -> None:
    """Raise UserError unless the model is on pixels and its predictions give the clean image, for perceptual losses."""
    if not isinstance(vae, PixelSpace):
        raise UserError('perceptual_losses: need a model on pixels, but this one is on latents; use vae: pixels')
    if (problem := clean_image_problem(vars(objective))) is not None:
        raise UserError(f'perceptual_losses: {problem}')
