"""MMDiT: a transformer with joint attention over image and text tokens, Stable Diffusion 3 (Esser et al. 2024)."""

import copy
import logging
from typing import Any

from diffusers.loaders.lora_pipeline import SD3LoraLoaderMixin
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from diffusion.errors import UserError
from diffusion.models.families.adapter import Condition, DenoiserAdapter, DenoiserSizes, TokenBlocks
from diffusion.models.families.mmdit.text_encoders import Sd3TextConditioner
from diffusion.models.sampler import export_scheduler
from diffusion.models.vae import autoencoder_kl_of, with_folded_statistics
from diffusion.models.wrapped_vaes import Flux2Vae

log = logging.getLogger(__name__)

T5_LENGTH = 't5_length'
"""Key that an export without T5 adds to the first tokenizer's configuration: number of zeros in place of T5 tokens."""
PIPELINE_TEXT_LENGTH = 256
"""Default number of T5 tokens in a StableDiffusion3Pipeline."""


class MMDiT(DenoiserAdapter):
    """Adapter of SD3Transformer2DModel, exported as a StableDiffusion3Pipeline."""

    block_classes = (JointTransformerBlock,)
    takes_text_mask = False
    lora_writer = SD3LoraLoaderMixin, 'transformer_lora_layers'
    token_blocks = TokenBlocks('transformer_blocks', output=1)

    def sizes(self, denoiser: SD3Transformer2DModel) -> DenoiserSizes:
        config = denoiser.config
        return DenoiserSizes(
            in_channels=config['in_channels'],
            out_channels=config['out_channels'],
            text_width=config['joint_attention_dim'],
            pooled_width=config['pooled_projection_dim'],
            patch=config['patch_size'],
            sample_size=config['sample_size'],
            token_width=config['num_attention_heads'] * config['attention_head_dim'],
        )

    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        return {
            'timestep': timesteps,
            'encoder_hidden_states': condition.embeds,
            'pooled_projections': condition.pooled,
        }

    def predict(self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        config: Any = denoiser.config
        most, (height, width) = config['pos_embed_max_size'] * config['patch_size'], noisy.shape[2:]
        if max(height, width) > most:
            raise UserError(
                f'streams: latents of {width}x{height} cells, but the denoiser has position embeddings for {most}x'
                f'{most}; use smaller images, or build it with a larger pos_embed_max_size'
            )
        return super().predict(denoiser, noisy, timesteps, condition)

    def call_arguments(self, pipeline: Any, *, negative: str, guidance: float) -> dict[str, Any]:
        _, height, width = self.noise_shape(pipeline)
        settings = super().call_arguments(pipeline, negative=negative, guidance=guidance)
        settings |= {'height': height * pipeline.vae_scale_factor, 'width': width * pipeline.vae_scale_factor}
        if pipeline.tokenizer_3 is not None:
            settings['max_sequence_length'] = pipeline.tokenizer_3.model_max_length
        elif T5_LENGTH in pipeline.tokenizer.init_kwargs:
            settings['max_sequence_length'] = pipeline.tokenizer.init_kwargs[T5_LENGTH]
        return settings

    def pipeline(self, model: Any) -> Any:
        from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline

        name = StableDiffusion3Pipeline.__name__
        self.check_exportable(model, name)
        text = model.text
        if not isinstance(text, Sd3TextConditioner):
            raise UserError(f'export: the text encoders are not an Sd3TextConditioner, which a {name} needs')
        if model.caption_dropout_mode == 'zeros':
            log.warning(
                'export: trained with zeros for dropped captions, but a %s uses the empty caption; its images will '
                'differ',
                name,
            )
        if text.t5 is None:
            log.info(
                'export: the model has no T5, so load it with %s.from_pretrained(FOLDER, text_encoder_3=None, '
                'tokenizer_3=None)',
                name,
            )
        if text.t5_length != PIPELINE_TEXT_LENGTH:
            log.info('export: call the pipeline with max_sequence_length=%d, as in training', text.t5_length)
        if isinstance(model.vae, Flux2Vae):
            from diffusion.models.normalized_pipelines import NormalizedStableDiffusion3Pipeline as Pipeline

            vae: Any = model.vae.exported()
        else:
            Pipeline = StableDiffusion3Pipeline
            vae = with_folded_statistics(autoencoder_kl_of(model.vae, name), pipeline_shifts=True)
            # Replace None, AutoencoderKL's default, by 0: the pipeline adds the shift factor without a check.
            vae.register_to_config(shift_factor=vae.config.get('shift_factor') or 0.0)
        # By default the pipeline generates images of size `sample_size`. In training this value only sets the scale of
        # the position embeddings, which are stored with the weights.
        transformer = copy.copy(model.denoiser)
        transformer.register_to_config(sample_size=model.latent_size)
        tokenizers = [*text.tokenizers, None]
        if text.t5 is None:
            # `diffusion generate` reads this key from the tokenizer: models' configurations accept no additional keys.
            tokenizers[0] = copy.copy(text.tokenizers[0])
            tokenizers[0].init_kwargs = tokenizers[0].init_kwargs | {T5_LENGTH: text.t5_length}
        encoders = [*text.encoders, None]
        return Pipeline(
            transformer=transformer,
            scheduler=export_scheduler(model.objective),
            vae=vae,
            text_encoder=encoders[0],  # type: ignore[arg-type]
            tokenizer=tokenizers[0],  # type: ignore[arg-type]
            text_encoder_2=encoders[1],  # type: ignore[arg-type]
            tokenizer_2=tokenizers[1],  # type: ignore[arg-type]
            text_encoder_3=encoders[2],  # type: ignore[arg-type]
            tokenizer_3=tokenizers[2],  # type: ignore[arg-type]
        )

    def single_file(self, model: Any) -> Any:
        from diffusion.models.single_file import sd3_file

        autoencoder_kl_of(model.vae, 'single file')
        return sd3_file(self.pipeline(model), model.objective)
