"""Builders for i1 (Zeng et al. 2026): the published transformer in its sizes, and a miniature of it."""

from typing import Annotated, Any, Literal

from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from transformers import PreTrainedTokenizerBase
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder, T5GemmaEncoderModel
from typing_extensions import Unpack

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.config.declarations import FROZEN_PARTS, AtLeast, MultipleOf, WeightsOf, constrained, defaults
from diffusion.config.weight_sources import revision_problem
from diffusion.errors import UserError
from diffusion.models.families.i1.transformer_i1 import SIZES, I1Transformer2DModel
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.pretrained import (
    TINY_VAE,
    check_revision,
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
from diffusion.models.training_keywords import Resolution, Revision, TransformerKeywords, VaeLayout, VaeSource
from diffusion.models.vae import latent_channels, objective_for
from diffusion.models.wrapped_vaes import Flux2Vae, Layout

PRETRAINED = 'google/t5gemma-2b-2b-ul2-it'
PRETRAINED_VAE = 'black-forest-labs/FLUX.2-klein-4B'
TEXT_LENGTH = 256
FLOW = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal')


def i1_tokenizers(
    *, pretrained: str | None = PRETRAINED, revision: str | None = None, max_length: int = TEXT_LENGTH
) -> list[PreTrainedTokenizerBase]:
    """Return T5-Gemma's tokenizer in a list; if `pretrained` is None, CLIP's, built from open_clip's vocabulary."""
    if pretrained is None:
        return [clip_tokenizer(max_length=max_length)]
    check_revision(pretrained, revision)
    tokenizer = load_pretrained(fast_tokenizer('Gemma'), pretrained, subfolder='', revision=revision)
    # Gemma's tokenizer pads on the left by default, but the transformer numbers a caption's tokens from 0.
    tokenizer.model_max_length, tokenizer.padding_side = max_length, 'right'
    return [tokenizer]


@tokenizes_with(i1_tokenizers)
@constrained
@defaults(encoder_dtype='bfloat16', caption_dropout_mode='zeros')
def i1(
    resolution: Annotated[Resolution, MultipleOf(16)] = 256,
    *,
    size: Literal['xl', '1.3b', '1.6b', '2b', '2.3b', '2.7b', '3b'] = 'xl',
    pretrained: Annotated[str | None, FROZEN_PARTS, WeightsOf(('text_encoder',))] = PRETRAINED,
    revision: Revision = None,
    vae: VaeSource = PRETRAINED_VAE,
    vae_revision: Revision = None,
    vae_layout: VaeLayout = 'channels',
    max_length: Annotated[int, AtLeast(3)] = TEXT_LENGTH,
    **training: Unpack[TransformerKeywords],
) -> LatentDiffusion:
    """Build i1: a transformer from scratch (XL has 1,034,264,432 parameters), with pretrained VAE and text encoder.

    Args:
        resolution: Side of the images in pixels, a multiple of 16; only sets the default size of generated images.
        size: Size of the transformer: xl has width 1152 and 16 heads, 3b (3,161,172,368 parameters) 2016 and 28. All
            sizes have 29 blocks.
        pretrained: Source of T5-Gemma's encoder and tokenizer: a repository on the Hub or a local folder. None builds
            the encoder, and the default VAE, with random weights, for tests and for counting parameters and FLOPs.
        vae: Source of the VAE: a folder, or a repository with a `vae` subfolder; by default FLUX.2's, whose latents
            have 32 channels.
        vae_revision: Commit of `vae`; required if that is a repository.
        vae_layout: Layout of FLUX.2's latents: `channels` has 32 channels per cell of 8x8 px, and patches of 2x2 cells,
            as published; `grouped` has 128 channels per cell of 16x16 px, and each cell is a token.
        caption_dropout_mode: Replacement for a dropped caption, also in guidance: `zeros` is the transformer's learned
            null caption, as published; `empty` is the empty caption.
        objective: Training objective; by default flow matching with logit-normal timesteps, as published for 256 and
            512 px. At 1024 px, the published run has an snr_shift of 3.33.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(pretrained=pretrained, vae=vae)
    if pretrained is not None:
        check_revision(pretrained, revision)
    text = TextConditioner(
        [_text_encoder(pretrained, revision)],
        i1_tokenizers(pretrained=pretrained, revision=revision, max_length=max_length),
        mask_padding=True,
    )
    width, heads = SIZES[size]
    sizes: dict[str, Any] = {
        'hidden_size': width,
        'num_heads': heads,
        'patch_size': 1 if vae_layout == 'grouped' else 2,
    }
    return _model(resolution, _vae(vae, vae_revision, pretrained, vae_layout), text, training, **sizes)


@tokenizes_with(tiny_tokenizers)
@constrained
@defaults(caption_dropout_mode='zeros')
def tiny_i1(
    resolution: Annotated[Resolution, MultipleOf(8)] = 64,
    *,
    vae: VaeSource = None,
    vae_layout: VaeLayout = 'channels',
    hidden_size: Annotated[int, MultipleOf(8)] = 192,
    num_heads: Annotated[int, AtLeast(1)] = 6,
    depth: Annotated[int, AtLeast(1)] = 7,
    patch_size: Annotated[int, AtLeast(1)] = 1,
    text_width: Annotated[int, MultipleOf(32)] = 128,
    text_layers: Annotated[int, AtLeast(0)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    train_text_encoder: bool = True,
    **training: Unpack[TransformerKeywords],
) -> LatentDiffusion:
    """Build a miniature i1: the same transformer with a small text encoder, small enough to train on a laptop.

    Args:
        resolution: Side of the images in pixels.
        vae: Folder of an autoencoder; by default the packaged VAE for 64 px OpenMoji images.
        hidden_size: Width of the transformer, a multiple of 8 times `num_heads`.
        depth: Number of blocks, which is odd.
        caption_dropout_mode: Replacement for a dropped caption: `zeros` is the transformer's learned null caption;
            `empty` is the empty caption.
        objective: Training objective; by default flow matching with logit-normal timesteps.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(vae=vae)
    if hidden_size % (8 * num_heads):
        raise UserError(
            f'hidden_size: {hidden_size} does not divide into {num_heads} heads of a multiple of 8 channels, which the '
            f'rotary embedding needs; use a multiple of {8 * num_heads}'
        )
    if depth % 2 == 0:
        raise UserError(f'depth: {depth} is even, but the middle block has no long skip; use {depth + 1}')
    text = tiny_text(width=text_width, layers=text_layers, max_length=max_length, mask_padding=True)
    sizes = {'hidden_size': hidden_size, 'num_heads': num_heads, 'depth': depth, 'patch_size': patch_size}
    autoencoder = load_vae(vae or str(TINY_VAE), layout=vae_layout)
    return _model(resolution, autoencoder, text, training, train_text_encoder=train_text_encoder, **sizes)


def _model(
    resolution: int,
    vae: Any,
    text: TextConditioner,
    training: TransformerKeywords,
    *,
    train_text_encoder: bool = False,
    **sizes: int,
) -> LatentDiffusion:
    """Build a transformer for a VAE's latents and the embeddings of `text`, and its model."""
    training['objective'] = objective_for(vae, training.get('objective'), FLOW)
    return LatentDiffusion(
        I1Transformer2DModel(in_channels=latent_channels(vae), text_width=text.width, text_length=text.length, **sizes),
        vae,
        text,
        mask_padding=True,
        train_text_encoder=train_text_encoder,
        latent_size=latent_side(resolution, vae),
        **training,
    )


def _vae(vae: str | None, revision: str | None, pretrained: str | None, layout: Layout) -> Any:
    """Return the autoencoder `vae`; FLUX.2's with random weights if that is the default and nothing is pretrained."""
    source = vae or PRETRAINED_VAE
    if source == PRETRAINED_VAE and pretrained is None:
        return Flux2Vae(AutoencoderKLFlux2(), layout)
    if (problem := revision_problem(source, revision)) is not None:
        raise UserError(f'model.vae_revision: {problem}')
    return load_vae(source, revision=revision, layout=layout)


def _text_encoder(pretrained: str | None, revision: str | None) -> T5GemmaEncoder:
    """Return T5-Gemma's encoder, with random weights and the size of the 2B model if `pretrained` is None."""
    if pretrained is None:
        return T5GemmaEncoder(T5GemmaConfig().encoder)  # type: ignore[arg-type]
    place = {'subfolder': '', 'revision': revision}
    return load_pretrained(T5GemmaEncoderModel, pretrained, **place, read_config=_encoder_config).encoder


def _encoder_config(content: dict[str, Any]) -> T5GemmaConfig:
    """Return the configuration of a T5GemmaEncoderModel, from that of the whole model."""
    return T5GemmaConfig(**{**content, 'is_encoder_decoder': False})
