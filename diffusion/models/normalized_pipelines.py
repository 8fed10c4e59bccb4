"""Pipelines of diffusers that decode with FLUX.2's autoencoder or a representation autoencoder.

Exports contain a copy of this file, so it must not import the package that wrote it. Load a folder with it by
`DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)`.
"""

import math
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.pipelines.prx.pipeline_prx import PRXPipeline
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch.nn import functional as F


class _NormalizedLatents:
    """Mixin for a diffusers pipeline whose denoising loop ends with normalized latents: unnormalize and decode these.

    The denoiser may see each group of 2x2 latent cells as one cell, with four times the channels.
    """

    transformer: Any
    vae: Any

    @property
    def group(self) -> int:
        """Side in latent cells of the groups that are merged into one cell of the denoiser's input; 1 if unmerged."""
        return 1 if self._is_rae else math.isqrt(self.transformer.config.in_channels // self.vae.config.latent_channels)

    @property
    def vae_scale_factor(self) -> int:
        """Side in image pixels of one cell of the denoiser's input, of which a patch may contain several."""
        config = self.vae.config
        return config.patch_size if self._is_rae else 2 ** (len(config.block_out_channels) - 1) * self.group

    @vae_scale_factor.setter
    def vae_scale_factor(self, value: int) -> None:
        # Ignore the value that diffusers' constructors compute, since it is wrong for these autoencoders.
        pass

    @property
    def _is_rae(self) -> bool:
        return isinstance(self.vae, AutoencoderRAE)

    @classmethod
    def _get_signature_types(cls) -> dict[str, Any]:
        # from_pretrained warns about components whose types are not in the signature.
        return super()._get_signature_types() | {'vae': (AutoencoderKLFlux2, AutoencoderRAE)}  # type: ignore[misc]

    def prepare_latents(self, batch_size: int, num_channels_latents: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().prepare_latents(batch_size, self.transformer.config.in_channels, *args, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def __call__(self, *args: Any, output_type: str = 'pil', return_dict: bool = True, **kwargs: Any) -> Any:
        if self._is_rae and 'latent_channels' not in self.vae.config:  # PRXPipeline reads it
            self.vae.register_to_config(latent_channels=self.vae.config.encoder_hidden_size)
        latents = super().__call__(*args, output_type='latent', return_dict=False, **kwargs)[0]  # type: ignore[misc]
        images = latents if output_type == 'latent' else self._decode(latents, output_type)
        self.maybe_free_model_hooks()  # type: ignore[attr-defined]
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _decode(self, latents: torch.Tensor, output_type: str) -> Any:
        if self._is_rae:
            images = self.vae.decode(latents.to(self.vae.dtype), return_dict=False)[0] * 2 - 1
        else:
            bn, side = self.vae.bn, self.vae.config.patch_size[0]
            std = torch.sqrt(bn.running_var.float() + self.vae.config.batch_norm_eps)
            latents = F.pixel_unshuffle(latents.float(), side // self.group)
            latents = latents * std.view(1, -1, 1, 1) + bn.running_mean.float().view(1, -1, 1, 1)
            images = self.vae.decode(F.pixel_shuffle(latents, side).to(self.vae.dtype), return_dict=False)[0]
        return self.image_processor.postprocess(images, output_type=output_type)  # type: ignore[attr-defined]


class NormalizedPRXPipeline(_NormalizedLatents, PRXPipeline):
    """PRXPipeline that decodes with an AutoencoderKLFlux2 or AutoencoderRAE."""

    def __call__(self, *args: Any, use_resolution_binning: bool = False, **kwargs: Any) -> Any:
        if use_resolution_binning:
            raise ValueError('this pipeline draws images of any size, and does not resize them; leave it False')
        return super().__call__(*args, use_resolution_binning=False, **kwargs)


class NormalizedStableDiffusion3Pipeline(_NormalizedLatents, StableDiffusion3Pipeline):
    """StableDiffusion3Pipeline that decodes with an AutoencoderKLFlux2."""
