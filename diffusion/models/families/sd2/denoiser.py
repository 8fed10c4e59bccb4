"""U-Nets with cross-attention: Stable Diffusion 1 and 2 (Rombach et al. 2022)."""

import logging
from typing import Any

from diffusers.loaders.lora_pipeline import StableDiffusionLoraLoaderMixin
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition, DenoiserAdapter, DenoiserSizes
from diffusion.models.sampler import inference_scheduler
from diffusion.models.vae import autoencoder_kl_of, with_folded_statistics

log = logging.getLogger(__name__)


class CrossAttentionUNet(DenoiserAdapter):
    """Adapter of UNet2DConditionModel with one text encoder, exported as a StableDiffusionPipeline."""

    block_classes = (ResnetBlock2D, Transformer2DModel)
    takes_text_mask = True
    lora_writer = StableDiffusionLoraLoaderMixin, 'unet_lora_layers'

    def owns(self, denoiser: UNet2DConditionModel) -> bool:
        return denoiser.config['addition_embed_type'] != 'text_time'  # SDXL's U-Nets have 'text_time'

    def sizes(self, denoiser: UNet2DConditionModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['out_channels'],
            text_width=config['cross_attention_dim'],
            sample_size=config['sample_size'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            'timestep': timesteps,
            'encoder_hidden_states': condition.embeds,
            'encoder_attention_mask': condition.mask,
        }

    def pipeline(self, model: Any) -> Any:
        from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline

        self.check_exportable(model, 'StableDiffusionPipeline')
        if len(model.text.encoders) != 1:
            raise UserError(f'export: {len(model.text.encoders)} text encoders; a StableDiffusionPipeline has one')
        if model.mask_padding:
            log.warning(
                'export: trained with mask_padding, which the diffusers pipeline does not apply; its images will differ'
            )
        if model.caption_dropout_mode == 'zeros':
            log.warning(
                'export: trained with zeros for dropped captions, but the diffusers pipeline uses the empty caption; '
                'its images will differ'
            )
        # This pipeline does not support diffusers' schedulers for flow matching.
        scheduler = inference_scheduler('dpm++' if model.objective.is_flow else 'ddim', model.objective)
        return StableDiffusionPipeline(
            vae=with_folded_statistics(autoencoder_kl_of(model.vae, 'StableDiffusionPipeline')),  # type: ignore[arg-type]
            text_encoder=model.text.encoders[0],
            tokenizer=model.text.tokenizers[0],
            unet=model.denoiser,
            scheduler=scheduler,
            safety_checker=None,  # type: ignore[arg-type]
            feature_extractor=None,  # type: ignore[arg-type]
            requires_safety_checker=False,
        )

    def single_file(self, model: Any) -> Any:
        from diffusion.models.single_file import sd_file

        return sd_file(self.pipeline(model), model.objective)
