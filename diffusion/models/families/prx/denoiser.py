"""PRX: a transformer in which image tokens attend to themselves and to text tokens (Photoroom 2025)."""

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_prx import PRXBlock, PRXTransformer2DModel
from torch import Tensor

from diffusion.compatibility.diffusers_versions import keep_prx_masks_small, without_own_deprecations
from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition, DenoiserAdapter, DenoiserSizes, TokenBlocks
from diffusion.models.sampler import export_scheduler, inference_scheduler
from diffusion.models.vae import PixelSpace, downsampling, with_folded_statistics
from diffusion.models.wrapped_vaes import Flux2Vae, RepresentationVae

log = logging.getLogger(__name__)

keep_prx_masks_small()


def _loadable_in_pipeline(encoder: Any) -> Any:
    """Return a text encoder with a configuration that a saved PRXPipeline can load; only T5-Gemma's is changed."""
    # diffusers reads config.json as a T5GemmaConfig and uses its `encoder` part. A T5GemmaEncoder's configuration is
    # only the content of that part, in which diffusers would find no `encoder` and use the 2B model's values.
    if encoder.config.model_type != 't5_gemma_module':
        return encoder
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig

    fields = encoder.config.to_dict()
    whole = T5GemmaConfig(encoder=fields, decoder=fields)
    for name, value in fields.items():
        if not hasattr(whole, name):
            setattr(whole, name, value)
    encoder = copy.copy(encoder)
    encoder.config = whole
    return encoder


class PRX(DenoiserAdapter):
    """Adapter of PRXTransformer2DModel, exported as a PRXPipeline or, if trained on pixels, as a PRXPixelPipeline."""

    block_classes = (PRXBlock,)
    timesteps_up_to_one = True
    takes_text_mask = True
    fused_projections = {'attention.img_qkv_proj': 3, 'attention.txt_kv_proj': 2}  # noqa: RUF012
    token_blocks = TokenBlocks('blocks', per_token={'image_rotary_emb': 2})

    def sizes(self, denoiser: PRXTransformer2DModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['in_channels'],
            text_width=config['context_in_dim'],
            patch=config['patch_size'],
            token_width=config['hidden_size'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        return {'timestep': timesteps, 'encoder_hidden_states': condition.embeds, 'attention_mask': condition.mask}

    def noise_shape(self, pipeline: Any) -> tuple[int, int, int]:
        side = pipeline.config.default_sample_size // pipeline.vae_scale_factor  # default_sample_size is in pixels
        return pipeline.transformer.config['in_channels'], side, side

    def call_arguments(self, pipeline: Any, *, negative: str, guidance: float) -> dict[str, Any]:
        # These pipelines reject a guidance scale below 1, and resize images to the sizes of the published models.
        # Unlike training, their text cleaning changes prompts (lower case, no punctuation).
        settings = {'guidance_scale': max(guidance, 1.0), 'use_resolution_binning': False, 'negative_prompt': negative}
        return settings if _is_on_pixels(pipeline) else settings | {'skip_text_cleaning': True}

    def draw(
        self, pipeline: Any, prompts: list[str], *, noise: Tensor, generators: list[torch.Generator], **arguments: Any
    ) -> Tensor:
        if _is_on_pixels(pipeline):
            # The pipeline scales noise that it draws itself, but not `latents`.
            noise = noise * pipeline.config.noise_scale
        # Draw one image at a time: guidance in diffusers' PRX pipelines fails for more than one prompt.
        draw_one = super().draw
        images = torch.cat(
            [
                draw_one(pipeline, [prompt], noise=start[None], generators=[generator], **arguments)
                for prompt, start, generator in zip(prompts, noise, generators, strict=True)
            ]
        )
        # The pixel pipeline returns values in [-1, 1].
        return (images / 2 + 0.5).clamp(0, 1) if _is_on_pixels(pipeline) else images

    def pipeline(self, model: Any) -> Any:
        if len(model.text.encoders) != 1:
            raise UserError(f'export: {len(model.text.encoders)} text encoders; a PRXPipeline has one')
        if not model.mask_padding:
            log.warning(
                'export: trained without mask_padding, but a PRXPipeline masks the padding of captions; its images '
                'will differ'
            )
        if model.caption_dropout_mode == 'zeros':
            log.warning(
                'export: trained with zeros for dropped captions, but a PRXPipeline uses the empty caption; its images '
                'will differ'
            )
        with without_own_deprecations():
            if isinstance(model.vae, PixelSpace):
                return _pixel_pipeline(model)
            self.check_exportable(model, 'PRXPipeline')
            return _latent_pipeline(model)


def _is_on_pixels(pipeline: Any) -> bool:
    return type(pipeline).__name__ == 'PRXPixelPipeline'


def _latent_pipeline(model: Any) -> Any:
    from diffusers.pipelines.prx.pipeline_prx import PRXPipeline

    log.info(
        'export: call the pipeline with skip_text_cleaning=True, or it changes prompts (lower case, no punctuation), '
        'and with use_resolution_binning=False unless the image side is 256, 512 or 1024 px'
    )
    if isinstance(model.vae, Flux2Vae | RepresentationVae):
        from diffusion.models.normalized_pipelines import NormalizedPRXPipeline as PRXPipeline

        vae: Any = model.vae.exported()
    else:
        vae = with_folded_statistics(model.vae, pipeline_shifts=True)
    # Replace None, AutoencoderKL's default, by 0: the pipeline adds the shift factor to latents without a check.
    # AutoencoderDC has no shift factor, and loading it with one would cause a warning.
    if isinstance(vae, AutoencoderKL):
        vae.register_to_config(shift_factor=vae.config.get('shift_factor') or 0.0)
    return PRXPipeline(
        transformer=model.denoiser,
        scheduler=export_scheduler(model.objective),
        text_encoder=_loadable_in_pipeline(model.text.encoders[0]),
        tokenizer=model.text.tokenizers[0],
        vae=vae,
        default_sample_size=model.latent_size * downsampling(model.vae),
    )


def _pixel_pipeline(model: Any) -> Any:
    from diffusers.pipelines.prx.pipeline_prx_pixel import PRXPixelPipeline

    if not model.objective.is_flow or model.objective.prediction_type != 'sample':
        raise UserError(
            f'export: a PRXPixelPipeline samples a flow by x-prediction, but this model has path '
            f'{model.objective.path} and prediction_type {model.objective.prediction_type}; generate images with '
            'task=generate'
        )
    log.info('export: call the pipeline with use_resolution_binning=False unless the image side is 1024 px')
    velocity = replace(model.objective, prediction_type='velocity')  # the pipeline converts predictions to velocities
    return PRXPixelPipeline(
        transformer=model.denoiser,
        scheduler=inference_scheduler('euler', velocity),
        text_encoder=_loadable_in_pipeline(model.text.encoders[0]),
        tokenizer=model.text.tokenizers[0],
        default_sample_size=model.latent_size,
        prompt_max_tokens=model.text.length,
        noise_scale=model.objective.noise_scale,
    )
