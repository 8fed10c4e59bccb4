"""U-Nets conditioned on pooled text and image sizes: Stable Diffusion XL (Podell et al. 2023)."""

import logging
from typing import Any

from diffusers.loaders.lora_pipeline import StableDiffusionLoraLoaderMixin
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.families.adapter import SIZES, Condition, DenoiserAdapter, DenoiserSizes
from diffusion.models.sampler import inference_scheduler
from diffusion.models.vae import autoencoder_kl_of, with_folded_statistics

log = logging.getLogger(__name__)


class SDXLUNet(DenoiserAdapter):
    """Adapter of UNet2DConditionModel with pooled text and image sizes, exported as a StableDiffusionXLPipeline."""

    block_classes = (ResnetBlock2D, Transformer2DModel)
    takes_text_mask = False
    lora_writer = StableDiffusionLoraLoaderMixin, 'unet_lora_layers'
    takes_sizes = True

    def owns(self, denoiser: UNet2DConditionModel) -> bool:
        return denoiser.config['addition_embed_type'] == 'text_time'

    def sizes(self, denoiser: UNet2DConditionModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['out_channels'],
            text_width=config['cross_attention_dim'],
            # The network embeds each of the sizes, and concatenates the embeddings with the pooled text.
            pooled_width=config['projection_class_embeddings_input_dim'] - SIZES * config['addition_time_embed_dim'],
            sample_size=config['sample_size'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            'timestep': timesteps,
            'encoder_hidden_states': condition.embeds,
            'added_cond_kwargs': {'text_embeds': condition.pooled, 'time_ids': condition.sizes},
        }

    def pipeline(self, model: Any) -> Any:
        # Import here: training does not need pipelines, and importing them takes seconds.
        from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline

        self.check_exportable(model, 'StableDiffusionXLPipeline')
        if len(model.text.encoders) != 2:
            raise UserError(f'export: {len(model.text.encoders)} text encoders; a StableDiffusionXLPipeline has two')
        # This pipeline does not support diffusers' schedulers for flow matching.
        scheduler = inference_scheduler('dpm++' if model.objective.is_flow else 'ddim', model.objective)
        pipeline = StableDiffusionXLPipeline(
            vae=with_folded_statistics(autoencoder_kl_of(model.vae, 'StableDiffusionXLPipeline')),
            text_encoder=model.text.encoders[0],
            text_encoder_2=model.text.encoders[1],
            tokenizer=model.text.tokenizers[0],
            tokenizer_2=model.text.tokenizers[1],
            unet=model.denoiser,
            scheduler=scheduler,
            # This embeds an empty negative prompt (and its pooled text) as zeros instead of as the empty caption.
            force_zeros_for_empty_prompt=model.caption_dropout_mode == 'zeros',
            add_watermarker=False,
        )
        # The constructor does not save this setting. Without it, a pipeline loaded from the folder would draw a
        # watermark if the package invisible_watermark is installed.
        pipeline.register_to_config(add_watermarker=False)
        return pipeline

    def single_file(self, model: Any) -> Any:
        # Import here: training does not need it.
        from diffusion.models.single_file import sdxl_file

        return sdxl_file(self.pipeline(model), model.objective)
