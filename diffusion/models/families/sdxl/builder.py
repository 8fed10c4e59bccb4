"""Builders for Stable Diffusion XL (Podell et al. 2023): the published U-Net, and a miniature of it.

`PRETRAINED` is the Hub repository of Stable Diffusion XL base 1.0, which has the CreativeML Open RAIL++-M license.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
)
from typing_extensions import Unpack

from diffusion.config.declarations import FROZEN_PARTS, AtLeast, MultipleOf, WeightsOf, constrained
from diffusion.errors import UserError
from diffusion.models.families.adapter import SIZES
from diffusion.models.frozen_parts import encoder_precision
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import (
    CLIP_BIG_G,
    CLIP_L,
    TINY_VAE,
    build_vae,
    check_sources,
    clip_tokenizer,
    latent_side,
    load_pretrained,
    load_vae,
    tiny_clip_config,
    tokenizes_with,
)
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.training_keywords import Resolution, Revision, TrainingKeywords, VaeSource
from diffusion.models.vae import STABLE_DIFFUSION_VAE, Vae, latent_channels

PRETRAINED = 'stabilityai/stable-diffusion-xl-base-1.0'
REVISION = '462165984030d82259a11f4367a4eed129e94a7b'

UNET: dict[str, Any] = {
    'sample_size': 128,
    'down_block_types': ['DownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'],
    'up_block_types': ['CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'UpBlock2D'],
    'block_out_channels': [320, 640, 1280],
    'layers_per_block': 2,
    'transformer_layers_per_block': [1, 2, 10],
    'attention_head_dim': [5, 10, 20],  # despite the name, numbers of heads, each of width 64
    'cross_attention_dim': 2048,
    'use_linear_projection': True,
    'addition_embed_type': 'text_time',
    'addition_time_embed_dim': 256,
    'projection_class_embeddings_input_dim': 2816,  # 1280 for the pooled text, and 256 for each of six sizes
}
"""The published U-Net, 2,567,463,684 parameters."""

VAE: dict[str, Any] = STABLE_DIFFUSION_VAE | {'sample_size': 1024, 'scaling_factor': 0.13025}

TINY_SIZE_WIDTH = 32
"""Width of the embedding of each image size in the model `tiny_sdxl`."""


def sdxl_tokenizers(
    *, pretrained: str | None = PRETRAINED, revision: str | None = REVISION
) -> list[PreTrainedTokenizerBase]:
    """Return Stable Diffusion XL's tokenizers, built from open_clip's vocabulary if `pretrained` is None."""
    if pretrained is None:
        return tiny_sdxl_tokenizers(max_length=77)
    return [
        load_pretrained(CLIPTokenizer, pretrained, subfolder=subfolder, revision=revision)
        for subfolder in ('tokenizer', 'tokenizer_2')
    ]


@tokenizes_with(sdxl_tokenizers)
@constrained
def sdxl(
    resolution: Annotated[Resolution, MultipleOf(8)] = 1024,
    *,
    pretrained: Annotated[str | None, FROZEN_PARTS, WeightsOf(('vae', 'text_encoder', 'text_encoder_2'))] = PRETRAINED,
    revision: Revision = REVISION,
    vae: VaeSource = None,
    vae_revision: Revision = None,
    **training: Unpack[TrainingKeywords],
) -> LatentDiffusion:
    """Build Stable Diffusion XL: a U-Net from scratch (2,567,463,684 parameters), pretrained VAE and text encoders.

    Args:
        vae: Source of the VAE; None uses that of `pretrained`, which overflows in float16. A folder or repository with
            an AutoencoderKL, such as madebyollin/sdxl-vae-fp16-fix, or with a `vae` subfolder.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(pretrained=pretrained, vae=vae)
    autoencoder = build_vae(vae, pretrained, revision, default=VAE, vae_revision=vae_revision)
    _check_precision(autoencoder, vae or f'{pretrained}/vae', training['encoder_dtype'])
    channels = latent_channels(autoencoder)
    unet: dict[str, Any] = UNET | {
        'sample_size': latent_side(resolution, autoencoder),
        'in_channels': channels,
        'out_channels': channels,
    }
    text = TextConditioner(
        _text_encoders(pretrained, revision),
        sdxl_tokenizers(pretrained=pretrained, revision=revision),
        layer='penultimate',
    )
    return LatentDiffusion(UNet2DConditionModel(**unet), autoencoder, text, **training)


def tiny_sdxl_tokenizers(*, max_length: int = 16) -> list[PreTrainedTokenizerBase]:
    """Return two tokenizers with CLIP's vocabulary: the first pads with the end-of-text token, the second with `!`."""
    return [clip_tokenizer(max_length=max_length, pad_token=token) for token in ('<|endoftext|>', '!')]


@tokenizes_with(tiny_sdxl_tokenizers)
@constrained
def tiny_sdxl(
    resolution: Annotated[Resolution, MultipleOf(8)] = 64,
    *,
    vae: VaeSource = None,
    block_out_channels: Annotated[Sequence[int], MultipleOf(32)] = (128, 256),
    layers_per_block: Annotated[int, AtLeast(0)] = 1,
    text_width: Annotated[int, MultipleOf(32)] = 64,
    text_layers: Annotated[int, AtLeast(1)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    train_text_encoder: bool = True,
    **training: Unpack[TrainingKeywords],
) -> LatentDiffusion:
    """Build a miniature Stable Diffusion XL: the same classes, small enough to train on a laptop.

    Args:
        vae: Folder of an AutoencoderKL; by default the packaged VAE for 64 px OpenMoji images.
        block_out_channels: Widths of the U-Net's levels, multiples of 32: GroupNorm has 32 groups, and attention heads
            have width 32. The first level has no attention.
        text_width: Width of each of the two text encoders and of the pooled text, a multiple of 32.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(vae=vae)
    autoencoder = load_vae(vae or str(TINY_VAE))
    channels, levels = latent_channels(autoencoder), len(block_out_channels)
    denoiser = UNet2DConditionModel(
        sample_size=latent_side(resolution, autoencoder),
        in_channels=channels,
        out_channels=channels,
        down_block_types=('DownBlock2D', *['CrossAttnDownBlock2D'] * (levels - 1)),
        up_block_types=(*['CrossAttnUpBlock2D'] * (levels - 1), 'UpBlock2D'),
        block_out_channels=tuple(block_out_channels),
        layers_per_block=layers_per_block,
        attention_head_dim=tuple(width // 32 for width in block_out_channels),  # type: ignore[arg-type]
        cross_attention_dim=2 * text_width,
        use_linear_projection=True,
        addition_embed_type='text_time',
        addition_time_embed_dim=TINY_SIZE_WIDTH,
        projection_class_embeddings_input_dim=text_width + SIZES * TINY_SIZE_WIDTH,
    )
    config = tiny_clip_config(width=text_width, layers=text_layers, max_length=max_length, projection_dim=text_width)
    encoders = [CLIPTextModel(config), CLIPTextModelWithProjection(config)]
    return LatentDiffusion(
        denoiser,
        autoencoder,
        TextConditioner(encoders, tiny_sdxl_tokenizers(max_length=max_length), layer='penultimate'),
        train_text_encoder=train_text_encoder,
        **training,
    )


def _text_encoders(pretrained: str | None, revision: str | None) -> list[CLIPTextModel | CLIPTextModelWithProjection]:
    if pretrained is None:
        return [
            CLIPTextModel(CLIPTextConfig(**CLIP_L)),
            CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_BIG_G)),
        ]
    return [
        load_pretrained(CLIPTextModel, pretrained, subfolder='text_encoder', revision=revision),
        load_pretrained(CLIPTextModelWithProjection, pretrained, subfolder='text_encoder_2', revision=revision),
    ]


def _check_precision(vae: Vae, source: str, encoder_dtype: str) -> None:
    """Raise UserError if a VAE that overflows in float16, according to its configuration, would run in float16."""
    # Stable Diffusion XL's own VAE produces NaNs in float16; diffusers' pipelines convert it to float32.
    if vae.config.get('force_upcast', False) and encoder_precision(encoder_dtype) == torch.float16:
        raise UserError(
            f'model.vae: the configuration of {source} has force_upcast, since its activations overflow in float16; '
            'set encoder_dtype: bfloat16, or vae: madebyollin/sdxl-vae-fp16-fix with vae_revision: '
            '207b116dae70ace3637169f1ddd2434b91b3a8cd'
        )
