"""Adapter of the denoiser of i1, a text-to-image model (Zeng et al. 2026)."""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoderModel

from diffusion.models.families.adapter import Condition, DenoiserAdapter, DenoiserSizes, TokenBlocks
from diffusion.models.families.i1.original_layout import OriginalFile, from_original
from diffusion.models.families.i1.transformer_i1 import I1Block, I1Transformer2DModel, TextBlock
from diffusion.models.sampler import export_scheduler
from diffusion.models.vae import downsampling, with_folded_statistics
from diffusion.models.wrapped_vaes import Flux2Vae, RepresentationVae


class I1(DenoiserAdapter):
    """Adapter of I1Transformer2DModel, exported as an I1Pipeline."""

    block_classes = (I1Block, TextBlock)
    takes_text_mask = True
    reads_padding = True  # the text adapter attends to all tokens
    fused_projections = {  # noqa: RUF012
        **dict.fromkeys(['image_qkv', 'text_qkv', 'qkv'], 3),
        **dict.fromkeys(['image_mlp.up', 'text_mlp.up', 'mlp.up'], 2),
    }
    samples_even_times = True
    reads_pickles = True
    token_blocks = TokenBlocks('blocks', per_token={'image_rotary': 1}, output=0, mirrored=True)

    def sizes(self, denoiser: I1Transformer2DModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['in_channels'],
            text_width=config['text_width'],
            patch=config['patch_size'],
            token_width=config['hidden_size'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        # Pass no timesteps: the transformer infers the noise level from the noisy tokens.
        return {'encoder_hidden_states': condition.embeds, 'attention_mask': condition.mask}

    def from_original(self, denoiser: Any, content: Any, which: Literal['training', 'ema'], where: str) -> Any:
        return from_original(denoiser, content, which, where)

    def single_file(self, model: Any) -> Any:
        return OriginalFile(model.denoiser, model.latent_size)

    def noise_shape(self, pipeline: Any) -> tuple[int, int, int]:
        side = pipeline.config.default_sample_size // pipeline.config.vae_scale_factor
        return pipeline.transformer.config['in_channels'], side, side

    def pipeline(self, model: Any) -> Any:
        from diffusion.models.families.i1.pipeline_i1 import I1Pipeline

        self.check_exportable(model, I1Pipeline.__name__)
        has_own_statistics = isinstance(model.vae, Flux2Vae | RepresentationVae)
        return I1Pipeline(
            transformer=model.denoiser,
            scheduler=export_scheduler(model.objective),
            text_encoder=_public(model.text.encoders[0]),
            tokenizer=model.text.tokenizers[0],
            vae=model.vae.exported() if has_own_statistics else with_folded_statistics(model.vae, pipeline_shifts=True),
            default_sample_size=model.latent_size * downsampling(model.vae),
            vae_scale_factor=downsampling(model.vae),
            null_caption=model.caption_dropout_mode == 'zeros',
        )


def _public(encoder: Any) -> Any:
    """Wrap T5-Gemma's encoder in transformers' public class T5GemmaEncoderModel; return other encoders unchanged."""
    if encoder.config.model_type != 't5_gemma_module':
        return encoder
    fields = encoder.config.to_dict()
    with torch.device('meta'):  # do not allocate its own encoder of 10 GB
        whole = T5GemmaEncoderModel(T5GemmaConfig(encoder=fields, decoder=fields, is_encoder_decoder=False))
    whole.encoder = encoder
    return whole
