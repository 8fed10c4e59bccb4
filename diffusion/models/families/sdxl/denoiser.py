"""U-Nets conditioned on pooled text and image sizes: Stable Diffusion XL (Podell et al. 2023)."""

from dataclasses import replace
from typing import Any

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.families.adapter import SIZES, Condition, DenoiserSizes
from diffusion.models.families.sd2.denoiser import CrossAttentionUNet
from diffusion.models.sampler import inference_scheduler
from diffusion.models.vae import autoencoder_kl_of, with_folded_statistics


class SDXLUNet(CrossAttentionUNet):
    """Adapter of UNet2DConditionModel with pooled text and image sizes, exported as a StableDiffusionXLPipeline."""

    takes_text_mask = False
    takes_sizes = True

    def owns(self, denoiser: UNet2DConditionModel) -> bool:
        return denoiser.config['addition_embed_type'] == 'text_time'

    def sizes(self, denoiser: UNet2DConditionModel) -> DenoiserSizes:
        config = denoiser.config
        # The network embeds each of the sizes, and concatenates the embeddings with the pooled text.
        pooled_width = config['projection_class_embeddings_input_dim'] - SIZES * config['addition_time_embed_dim']
        return replace(super().sizes(denoiser), pooled_width=pooled_width)

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            'timestep': timesteps,
            'encoder_hidden_states': condition.embeds,
            'added_cond_kwargs': {'text_embeds': condition.pooled, 'time_ids': condition.sizes},
        }

    def pipeline(self, model: Any) -> Any:
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
            # If True, an empty negative prompt (and its pooled text) becomes zeros instead of an empty caption's text.
            force_zeros_for_empty_prompt=model.caption_dropout_mode == 'zeros',
            add_watermarker=False,
        )
        # The constructor does not save this setting. Without it, a pipeline loaded from the folder would draw a
        # watermark if the package invisible_watermark is installed.
        pipeline.register_to_config(add_watermarker=False)
        return pipeline

    def single_file(self, model: Any) -> Any:
        from diffusion.models.single_file import sdxl_file

        return sdxl_file(self.pipeline(model), model.objective)
