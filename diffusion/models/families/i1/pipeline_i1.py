"""Diffusers pipeline of i1 (Zeng et al. 2026): learned null caption for guidance, times evenly spaced before the shift.

Exports contain a copy of this file, so it must not import the package that wrote it. Load a folder with it by
`DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)`.

Shapes: B images, C latent channels, H W latent size, L text tokens, T width of the text embeddings.
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class I1Pipeline(DiffusionPipeline):
    """Pipeline that generates images with an I1Transformer2DModel.

    Args:
        vae: An AutoencoderKL, AutoencoderDC, AutoencoderKLFlux2 or AutoencoderRAE.
        default_sample_size: Side of the images in pixels if a call gives neither height nor width.
        vae_scale_factor: Side in pixels of a cell of the transformer's latents.
        null_caption: True if guidance without a negative prompt uses the transformer's null caption with the prompt's
            mask; False if it uses the empty caption.
    """

    model_cpu_offload_seq = 'text_encoder->transformer->vae'
    transformer: Any
    scheduler: Any
    text_encoder: Any
    tokenizer: Any
    vae: Any

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        text_encoder: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        vae: ModelMixin,
        default_sample_size: int = 256,
        vae_scale_factor: int = 8,
        null_caption: bool = True,
    ) -> None:
        super().__init__()
        # Gemma's tokenizer pads on the left by default, but the transformer numbers a caption's tokens from 0.
        tokenizer.padding_side = 'right'
        parts = {'text_encoder': text_encoder, 'tokenizer': tokenizer, 'vae': vae}
        self.register_modules(transformer=transformer, scheduler=scheduler, **parts)
        self.register_to_config(
            default_sample_size=default_sample_size, vae_scale_factor=vae_scale_factor, null_caption=null_caption
        )
        self.image_processor = VaeImageProcessor(vae_scale_factor=vae_scale_factor)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str],
        negative_prompt: str | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 250,
        guidance_scale: float = 12.0,
        guidance_rescale: float = 1.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = 'pil',
        return_dict: bool = True,
    ) -> Any:
        """Generate one image per prompt; the defaults are the published settings.

        Args:
            negative_prompt: Prompt that guidance steers away from; None or empty for the null caption.
            height: Height in pixels; height and width are by default those of the training images.
            guidance_scale: 1 or less turns guidance off.
            guidance_rescale: Strength in [0, 1] of rescaling the guided prediction to the standard deviation of the
                conditional one.
            latents: Initial noise, standard normal [B, C, H, W], whose shape determines the size of the images.
            output_type: `pil`, `np`, `pt` ([B, 3, height, width] in [0, 1]) or `latent` (normalized latents).

        Returns:
            An ImagePipelineOutput or, if `return_dict` is False, a tuple with the images.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        embeds, mask = self._encode(prompts)
        if guidance_scale > 1:
            # The transformer replaces captions of zeros by its null caption.
            other, other_mask = torch.zeros_like(embeds), mask
            if negative_prompt or not self.config['null_caption']:
                other, other_mask = self._encode([negative_prompt or ''] * len(prompts))
            embeds, mask = torch.cat([other, embeds]), torch.cat([other_mask, mask])
        if latents is None:
            shape = (len(prompts), *self._latent_shape(height, width))
            latents = randn_tensor(shape, generator=generator, device=self._execution_device, dtype=torch.float32)
        assert latents is not None
        noisy: Tensor = latents.to(self._execution_device, torch.float32)
        takes_generator = 'generator' in inspect.signature(self.scheduler.step).parameters
        extra = {'generator': generator} if takes_generator else {}
        with_bar: Any = self.progress_bar
        for timestep in with_bar(self._timesteps(num_inference_steps)):
            prediction = self._predict(noisy, embeds, mask, guidance_scale, guidance_rescale)
            noisy = self.scheduler.step(prediction, timestep, noisy, **extra).prev_sample
        images: Any = noisy
        if output_type != 'latent':
            images = self.image_processor.postprocess(self._decode(noisy).float(), output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _encode(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Return text embeddings including padding's, [B, L, T], and a mask that is False for padding, bool [B, L]."""
        length, device = self.tokenizer.model_max_length, self._execution_device
        found = self.tokenizer(
            captions, padding='max_length', truncation=True, max_length=length, return_tensors='pt'
        ).to(device)
        mask = found.attention_mask.bool()
        embeds = self.text_encoder(found.input_ids, attention_mask=mask).last_hidden_state
        return embeds.to(self.transformer.dtype), mask

    def _latent_shape(self, height: int | None, width: int | None) -> tuple[int, int, int]:
        """Return C, H and W for a height and width in pixels; raise ValueError unless both divide into patches."""
        cell, config = self.config['vae_scale_factor'], self.transformer.config
        height, width = (side or self.config['default_sample_size'] for side in (height, width))
        unit = cell * config['patch_size']
        if height % unit or width % unit:
            raise ValueError(f'height {height} and width {width} must be multiples of {unit}')
        return config['in_channels'], height // cell, width // cell

    def _timesteps(self, steps: int) -> Any:
        """Prepare the scheduler for a number of steps, and return its timesteps."""
        if isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler):
            # The published sampler divides [0, 1] evenly before the shift; the scheduler's default does not.
            times = [1 - step / steps for step in range(steps)]
            self.scheduler.set_timesteps(sigmas=times, device=self._execution_device)
        else:
            self.scheduler.set_timesteps(steps, device=self._execution_device)
        return self.scheduler.timesteps

    def _predict(self, latents: Tensor, embeds: Tensor, mask: Tensor, scale: float, rescale: float) -> Tensor:
        """Return the prediction for latents; guided if `embeds` has B unconditional, then B conditional captions."""
        guides = len(embeds) > len(latents)
        noisy = (torch.cat([latents, latents]) if guides else latents).to(self.transformer.dtype)
        predicted = self.transformer(noisy, embeds, attention_mask=mask, return_dict=False)[0].float()
        if not guides:
            return predicted
        unconditional, conditional = predicted.chunk(2)
        guided = unconditional + scale * (conditional - unconditional)
        ratio = conditional.std(dim=(1, 2, 3), keepdim=True) / guided.std(dim=(1, 2, 3), keepdim=True)
        return rescale * guided * ratio + (1 - rescale) * guided

    def _decode(self, latents: Tensor) -> Tensor:
        """Return images [B, 3, height, width], roughly in [-1, 1], for normalized latents."""
        vae, config = self.vae, self.vae.config
        if isinstance(self.vae, AutoencoderRAE):
            return vae.decode(latents.to(vae.dtype), return_dict=False)[0] * 2 - 1
        if isinstance(self.vae, AutoencoderKLFlux2):
            # The batch norm is over groups of 2x2 cells. The transformer's cells are single cells or such groups.
            side, bn = config['patch_size'][0], vae.bn
            group = math.isqrt(latents.shape[1] // config['latent_channels'])
            # With CPU offload, the statistics are on the CPU until the autoencoder decodes.
            mean, variance = (each.to(latents)[:, None, None] for each in (bn.running_mean, bn.running_var))
            latents = F.pixel_unshuffle(latents, side // group)
            latents = latents * torch.sqrt(variance + config['batch_norm_eps']) + mean
            latents = F.pixel_shuffle(latents, side)
        else:
            latents = latents / config['scaling_factor'] + (config.get('shift_factor') or 0.0)
        return vae.decode(latents.to(vae.dtype), return_dict=False)[0]
