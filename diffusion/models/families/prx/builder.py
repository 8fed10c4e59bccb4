"""Builders for PRX (Photoroom 2025, Apache-2.0): the published transformer, and a miniature of it."""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder
from typing_extensions import Unpack

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.config.declarations import AtLeast, MultipleOf, NotArchitecture, constrained, defaults, fixed_on_resume
from diffusion.config.model_checks import base_width_problem
from diffusion.errors import UserError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.pretrained import (
    TINY_VAE,
    build_vae,
    check_revision,
    check_sources,
    clip_tokenizer,
    latent_side,
    load_pretrained,
    load_vae,
    read_config,
    tiny_text,
    tiny_tokenizers,
    tokenizes_with,
)
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.training_keywords import (
    PipelineSource,
    PixelTransformerKeywords,
    Resolution,
    Revision,
    VaeLayout,
    VaeSource,
)
from diffusion.models.vae import SIXTEEN_CHANNEL_VAE, Vae, latent_channels, objective_for

PRETRAINED = 'Photoroom/prx-256-t2i'
TEXT_LENGTH = 256

VAE: dict[str, Any] = SIXTEEN_CHANNEL_VAE | {'scaling_factor': 0.3611, 'shift_factor': 0.1159}
"""The autoencoder of FLUX.1, with 16 channels."""
FLOW = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', uniform_fraction=0.1)
BaseWidth = Annotated[
    int | None,
    AtLeast(1),
    fixed_on_resume('the initial weights, and the learning rates of layers by their width'),
    NotArchitecture(),
]


def prx_tokenizers(
    *, pretrained: str | None = PRETRAINED, revision: str | None = None, max_length: int = TEXT_LENGTH
) -> list[PreTrainedTokenizerBase]:
    """Return PRX's tokenizer in a list; if `pretrained` is None, it is CLIP's, built from open_clip's vocabulary."""
    if pretrained is None:
        return [clip_tokenizer(max_length=max_length)]
    check_revision(pretrained, revision)
    _, tokenizer_class, _ = _text_classes(pretrained, revision)
    tokenizer = load_pretrained(tokenizer_class, pretrained, subfolder='tokenizer', revision=revision)
    tokenizer.model_max_length = max_length
    return [tokenizer]


@tokenizes_with(prx_tokenizers)
@constrained
@defaults(encoder_dtype='bfloat16')
def prx(
    resolution: Annotated[Resolution, MultipleOf(16)] = 256,
    *,
    pretrained: PipelineSource = PRETRAINED,
    revision: Revision = None,
    vae: VaeSource = None,
    vae_revision: Revision = None,
    vae_layout: VaeLayout = 'channels',
    patch_size: Annotated[int, AtLeast(1)] = 2,
    bottleneck_size: int | None = None,
    resolution_embeds: bool = False,
    hidden_size: Annotated[int, MultipleOf(4)] = 1792,
    num_heads: Annotated[int, AtLeast(1)] = 28,
    depth: Annotated[int, AtLeast(1)] = 16,
    max_length: Annotated[int, AtLeast(3)] = TEXT_LENGTH,
    mup_base_width: BaseWidth = None,
    **training: Unpack[PixelTransformerKeywords],
) -> LatentDiffusion:
    """Build PRX: a transformer from scratch (1,170,691,648 parameters), with pretrained VAE and text encoder.

    For pixels (`vae: pixels`, `patch_size: 32`, `bottleneck_size: 256`) it has 1,177,215,744 parameters.

    Args:
        resolution: Side of the images in pixels, a multiple of 16; only sets the default size of generated images.
        pretrained: Source of VAE, text encoder (T5-Gemma, or the language part of Qwen3-VL) and tokenizer: a repository
            on the Hub or a local folder in diffusers' layout. None builds them with random weights, for tests and for
            counting parameters and FLOPs.
        patch_size: Side of a token in latent cells; 32 for pixels.
        resolution_embeds: Condition the transformer on the latents' height and width, as PRX 7B does.
        hidden_size: Width of the transformer, a multiple of 4 times `num_heads`.
        num_heads: Number of attention heads; 64 channels per head is usual.
        max_length: L, number of tokens to which captions are padded and truncated. Padding is masked in the transformer
            and in the text encoder.
        objective: Training objective; by default flow matching with logit-normal timesteps, as published.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(pretrained=pretrained, vae=vae)
    if pretrained is not None:
        check_revision(pretrained, revision)
    autoencoder = build_vae(vae, pretrained, revision, default=VAE, vae_revision=vae_revision, layout=vae_layout)
    text = TextConditioner(
        [_text_encoder(pretrained, revision)],
        prx_tokenizers(pretrained=pretrained, revision=revision, max_length=max_length),
        mask_padding=True,
    )
    sizes: dict[str, Any] = {'hidden_size': hidden_size, 'num_heads': num_heads, 'depth': depth}
    sizes |= {'patch_size': patch_size, 'bottleneck_size': bottleneck_size, 'resolution_embeds': resolution_embeds}
    return _model(resolution, autoencoder, text, training, mup_base_width, train_text_encoder=False, **sizes)


@tokenizes_with(tiny_tokenizers)
@constrained
def tiny_prx(
    resolution: Annotated[Resolution, MultipleOf(16)] = 64,
    *,
    vae: VaeSource = None,
    vae_layout: VaeLayout = 'channels',
    hidden_size: Annotated[int, MultipleOf(4)] = 192,
    num_heads: Annotated[int, AtLeast(1)] = 6,
    depth: Annotated[int, AtLeast(1)] = 6,
    patch_size: Annotated[int, AtLeast(1)] = 1,
    bottleneck_size: int | None = None,
    text_width: Annotated[int, MultipleOf(32)] = 128,
    text_layers: Annotated[int, AtLeast(0)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    mup_base_width: BaseWidth = None,
    train_text_encoder: bool = True,
    **training: Unpack[PixelTransformerKeywords],
) -> LatentDiffusion:
    """Build a miniature PRX: the same transformer with a small text encoder, small enough to train on a laptop.

    Args:
        resolution: Side of the images in pixels, a multiple of 16.
        vae: Folder of an AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC or AutoencoderRAE, or `pixels` to train on
            pixels; by default the packaged VAE for 64 px OpenMoji images.
        hidden_size: Width of the transformer, a multiple of 4 times `num_heads`.
        objective: Training objective; by default flow matching with logit-normal timesteps.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(vae=vae)
    autoencoder = load_vae(vae or str(TINY_VAE), layout=vae_layout)
    text = tiny_text(width=text_width, layers=text_layers, max_length=max_length, mask_padding=True)
    sizes: dict[str, Any] = {'hidden_size': hidden_size, 'num_heads': num_heads, 'depth': depth}
    sizes |= {'patch_size': patch_size, 'bottleneck_size': bottleneck_size}
    return _model(
        resolution, autoencoder, text, training, mup_base_width, train_text_encoder=train_text_encoder, **sizes
    )


def _model(
    resolution: int,
    vae: Vae,
    text: TextConditioner,
    training: PixelTransformerKeywords,
    mup_base_width: int | None,
    *,
    train_text_encoder: bool,
    **sizes: Any,
) -> LatentDiffusion:
    """Build a transformer for a VAE's latents and the embeddings of `text`, and its model."""
    denoiser = transformer(latent_channels(vae), text.width, **sizes)
    training['objective'] = objective_for(vae, training.get('objective'), FLOW)
    return LatentDiffusion(
        denoiser,
        vae,
        text,
        mask_padding=True,
        train_text_encoder=train_text_encoder,
        latent_size=latent_side(resolution, vae),
        mup_base=None if mup_base_width is None else at_width(denoiser, mup_base_width),
        **training,
    )


def transformer(channels: int, text_width: int, *, hidden_size: int, num_heads: int, **sizes: Any) -> Any:
    """Build a PRX transformer; raise UserError unless its heads have a multiple of 4 channels."""
    per_head, rest = divmod(hidden_size, num_heads)
    if rest or per_head % 4:
        raise UserError(
            f'hidden_size: {hidden_size} does not divide into {num_heads} heads of a multiple of 4 channels, which '
            f'the rotary embedding needs; use a multiple of {4 * num_heads}'
        )
    settings = {'in_channels': channels, 'context_in_dim': text_width, 'mlp_ratio': 3.5, **sizes}
    # Half of a head's channels encode the row, and the other half the column.
    settings |= {'hidden_size': hidden_size, 'num_heads': num_heads, 'axes_dim': [per_head // 2] * 2}
    return PRXTransformer2DModel(**settings)


def at_width(denoiser: PRXTransformer2DModel, width: int) -> PRXTransformer2DModel:
    """Return a transformer like `denoiser` on the meta device, with another width: a multiple of the head size."""
    config = denoiser.config
    problem = base_width_problem(width, config['hidden_size'], config['num_heads'])
    if problem is not None:
        raise UserError(f'mup_base_width: {problem}')
    heads = width * config['num_heads'] // config['hidden_size']
    with torch.device('meta'):
        return PRXTransformer2DModel.from_config(config, hidden_size=width, num_heads=heads)  # type: ignore[return-value]


def _text_encoder(pretrained: str | None, revision: str | None) -> PreTrainedModel:
    """Return a pretrained text encoder, or T5-Gemma 2B's encoder with random weights if `pretrained` is None."""
    if pretrained is None:
        return T5GemmaEncoder(_t5gemma_config({}))
    encoder_class, _, settings = _text_classes(pretrained, revision)
    place = {'subfolder': 'text_encoder', 'revision': revision}
    return load_pretrained(encoder_class, pretrained, **place, read_config=settings)


def _text_classes(source: str, revision: str | None) -> tuple[type[Any], type[Any], Callable[[dict[str, Any]], Any]]:
    """Return the classes of a source's text encoder and tokenizer, and the function that reads its configuration."""
    kind = read_config(T5GemmaEncoder, source, subfolder='text_encoder', revision=revision).get('model_type', '')
    if kind in ('t5gemma', 't5_gemma_module'):
        return T5GemmaEncoder, fast_tokenizer('Gemma'), _t5gemma_config
    if kind in ('qwen3_vl', 'qwen3_vl_text'):
        return Qwen3VLTextModel, fast_tokenizer('Qwen2'), _qwen_config
    raise UserError(f'{source}/text_encoder: {kind or "no model"} is not supported; use T5-Gemma or Qwen3-VL')


def _t5gemma_config(content: dict[str, Any]) -> Any:
    """Return the configuration of a T5GemmaEncoder; published files also contain the decoder's."""
    return T5GemmaConfig(encoder=content.get('encoder', content) or None).encoder


def _qwen_config(content: dict[str, Any]) -> Qwen3VLTextConfig:
    """Return the configuration of Qwen3-VL's language part; files may also contain the vision part's."""
    return Qwen3VLTextConfig(**content.get('text_config', content))
