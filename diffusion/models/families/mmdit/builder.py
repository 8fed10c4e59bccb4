"""Builders for MMDiT (Esser et al. 2024): Stable Diffusion 3's transformer, and a miniature of it.

`PRETRAINED` is the Hub repository of Stable Diffusion 3.5 medium. Accept the Stability AI Community License there to
download its files.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)
from typing_extensions import Unpack

from diffusion.compatibility.transformers_versions import GENERAL_TOKENIZERS, fast_tokenizer
from diffusion.config.declarations import FROZEN_PARTS, AtLeast, MultipleOf, WeightsOf, constrained, defaults
from diffusion.errors import UserError
from diffusion.models.families.mmdit.text_encoders import Sd3TextConditioner
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.pretrained import (
    CLIP_BIG_G,
    CLIP_L,
    TINY_VAE,
    build_vae,
    check_revision,
    check_sources,
    clip_tokenizer,
    latent_side,
    load_pretrained,
    load_vae,
    tiny_clip_config,
    tokenizes_with,
)
from diffusion.models.training_keywords import Resolution, Revision, TransformerKeywords, VaeLayout, VaeSource
from diffusion.models.vae import SIXTEEN_CHANNEL_VAE, Vae, latent_channels, objective_for

PRETRAINED = 'stabilityai/stable-diffusion-3.5-medium'
T5_LENGTH = 256
T5_WIDTH = 4096
HEAD_WIDTH = 64

SAMPLE_SIZE = 128
"""Scale of the position embeddings at every resolution."""

T5_XXL: dict[str, Any] = {
    'vocab_size': 32128,
    'd_model': T5_WIDTH,
    'd_kv': 64,
    'd_ff': 10240,
    'num_layers': 24,
    'num_heads': 64,
    'feed_forward_proj': 'gated-gelu',
}
"""T5 v1.1 XXL, the third text encoder."""

VAE: dict[str, Any] = SIXTEEN_CHANNEL_VAE | {'scaling_factor': 1.5305, 'shift_factor': 0.0609}
SPECIAL = ('<pad>', '</s>', '<unk>')
"""T5's special tokens, whose ids in T5 are 0, 1 and 2."""
END = '<|endoftext|>'
"""Padding token of the first CLIP tokenizer; the second pads with `!`."""


def sd3_objective(resolution: int) -> Objective:
    """Return Stable Diffusion 3's objective: flow matching with logit-normal timesteps, and a shift of 3 at 1024 px.

    At other resolutions the shift is proportional to the image side (Esser et al. 2024, eq. 23), but at least 1.
    """
    shift = max(1.0, 3 * resolution / 1024)
    return Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', snr_shift=shift)


def mmdit_tokenizers(
    *, pretrained: str | None = PRETRAINED, revision: str | None = None, t5: bool = True, t5_length: int = T5_LENGTH
) -> list[PreTrainedTokenizerBase]:
    """Return Stable Diffusion 3's tokenizers: two for CLIP, and one for T5 unless `t5` is False.

    If `pretrained` is None, CLIP's tokenizers are built from open_clip's vocabulary, and T5's has one token per byte.
    """
    if pretrained is None:
        return tiny_mmdit_tokenizers(max_length=77, t5=t5, t5_length=t5_length)
    check_revision(pretrained, revision)
    names = ['tokenizer', 'tokenizer_2', 'tokenizer_3'] if t5 else ['tokenizer', 'tokenizer_2']
    tokenizers: list[PreTrainedTokenizerBase] = [
        load_pretrained(
            _t5_tokenizer_class(pretrained) if name == 'tokenizer_3' else CLIPTokenizer,
            pretrained,
            subfolder=name,
            revision=revision,
        )
        for name in names
    ]
    for tokenizer in tokenizers[2:]:
        tokenizer.model_max_length = t5_length
    return tokenizers


def byte_tokenizer(*, max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per UTF-8 byte, ids 3 to 258, for a T5 encoder with random weights.

    It avoids the download of T5's own vocabulary. Captions end with `</s>` and are padded with `<pad>`, as in T5.
    """
    pieces = [(token, 0.0) for token in SPECIAL] + [(f'<0x{byte:02X}>', -1.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    # Do not use T5's class: in transformers 5, it restores a saved tokenizer's vocabulary but not its byte fallback.
    special = dict(zip(('pad_token', 'eos_token', 'unk_token'), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **special)


def _t5_tokenizer_class(source: str) -> type[PreTrainedTokenizerBase]:
    """Return the class of a pipeline's third tokenizer: the byte tokenizer's if a local folder has one, else T5's."""
    file = Path(source, 'tokenizer_3', 'tokenizer_config.json')
    name = json.loads(file.read_bytes()).get('tokenizer_class') if file.is_file() else None
    return PreTrainedTokenizerFast if name in GENERAL_TOKENIZERS else fast_tokenizer('T5')


@tokenizes_with(mmdit_tokenizers)
@constrained
@defaults(encoder_dtype='bfloat16')
def mmdit(
    resolution: Annotated[Resolution, MultipleOf(16)] = 1024,
    *,
    pretrained: Annotated[
        str | None, FROZEN_PARTS, WeightsOf(('vae', 'text_encoder', 'text_encoder_2', 'text_encoder_3'))
    ] = PRETRAINED,
    revision: Revision = None,
    vae: VaeSource = None,
    vae_revision: Revision = None,
    vae_layout: VaeLayout = 'channels',
    t5: Annotated[bool, FROZEN_PARTS] = True,
    t5_length: Annotated[int, AtLeast(1), FROZEN_PARTS] = T5_LENGTH,
    patch_size: Annotated[int, AtLeast(1)] = 2,
    depth: Annotated[int, AtLeast(1)] = 24,
    dual_attention_blocks: Annotated[int, AtLeast(0)] = 13,
    qk_norm: bool = True,
    pos_embed_max_size: Annotated[int, AtLeast(1)] = 384,
    **training: Unpack[TransformerKeywords],
) -> LatentDiffusion:
    """Build Stable Diffusion 3's MMDiT from scratch, with pretrained VAE, two CLIP text encoders, and T5.

    The defaults give the transformer of Stable Diffusion 3.5 medium (2,243,171,520 parameters). For Stable Diffusion 3
    medium (2,028,328,000 parameters), use `dual_attention_blocks: 0`, `qk_norm: false` and `pos_embed_max_size: 192`.

    Args:
        resolution: Side of the images in pixels, a multiple of 16; sets the default size of generated images, and the
            shift of the default objective.
        t5: Use T5 XXL, which has 4.8 B parameters. False uses zeros in place of its tokens, as diffusers does.
        t5_length: Number of T5 tokens, to which captions are padded and truncated; 77 CLIP tokens come before them.
        depth: Number of blocks and of attention heads; the width is 64 times this number.
        dual_attention_blocks: Number of leading blocks that have a second attention layer for the image tokens only.
        qk_norm: Normalize queries and keys with RMSNorm, which prevents instability in 16 bits.
        pos_embed_max_size: Maximum image side in patches of 16 px; the size of the position embedding table.
        objective: Training objective; by default flow matching with logit-normal timesteps and a shift of 3 at 1024 px,
            proportional to the resolution.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(pretrained=pretrained, vae=vae)
    if pretrained is not None:
        check_revision(pretrained, revision)
    autoencoder = build_vae(vae, pretrained, revision, default=VAE, vae_revision=vae_revision, layout=vae_layout)
    clips = [_clip(pretrained, revision, first=True), _clip(pretrained, revision, first=False)]
    text = Sd3TextConditioner(
        clips,
        _t5(pretrained, revision) if t5 else None,
        mmdit_tokenizers(pretrained=pretrained, revision=revision, t5=t5, t5_length=t5_length),
        width=T5_WIDTH,
        t5_length=t5_length,
    )
    sizes = {'depth': depth, 'dual_attention_blocks': dual_attention_blocks, 'qk_norm': qk_norm}
    sizes |= {'pos_embed_max_size': pos_embed_max_size, 'patch_size': patch_size, 'sample_size': SAMPLE_SIZE}
    return _model(resolution, autoencoder, text, training, train_text_encoder=False, **sizes)


def tiny_mmdit_tokenizers(
    *, max_length: int = 16, t5: bool = True, t5_length: int = 24
) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizers of `tiny_mmdit`: two with CLIP's vocabulary, and one with a token per byte."""
    clips = [clip_tokenizer(max_length=max_length, pad_token=token) for token in (END, '!')]
    return [*clips, *([byte_tokenizer(max_length=t5_length)] if t5 else [])]


@tokenizes_with(tiny_mmdit_tokenizers)
@constrained
def tiny_mmdit(
    resolution: Annotated[Resolution, MultipleOf(16)] = 64,
    *,
    vae: VaeSource = None,
    vae_layout: VaeLayout = 'channels',
    depth: Annotated[int, AtLeast(1)] = 4,
    dual_attention_blocks: Annotated[int, AtLeast(0)] = 2,
    qk_norm: bool = True,
    patch_size: Annotated[int, AtLeast(1)] = 1,
    pos_embed_max_size: Annotated[int, AtLeast(1)] = 32,
    text_width: Annotated[int, MultipleOf(32)] = 64,
    text_layers: Annotated[int, AtLeast(1)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    t5: Annotated[bool, FROZEN_PARTS] = True,
    t5_length: Annotated[int, AtLeast(1), FROZEN_PARTS] = 24,
    train_text_encoder: bool = True,
    **training: Unpack[TransformerKeywords],
) -> LatentDiffusion:
    """Build a miniature of Stable Diffusion 3: the same classes, small enough to train on a laptop.

    Args:
        resolution: Side of the images in pixels, a multiple of 16.
        vae: Folder of an AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC or AutoencoderRAE, or `pixels` to train on
            pixels; by default the packaged VAE for 64 px OpenMoji images.
        depth: Number of blocks and of attention heads; the width is 64 times this number.
        dual_attention_blocks: Number of leading blocks that have a second attention layer for the image tokens only.
        qk_norm: Normalize queries and keys with RMSNorm.
        pos_embed_max_size: Maximum image side in patches; the size of the position embedding table.
        text_width: Width of each CLIP text encoder, a multiple of 32; T5 is 4 times as wide.
        max_length: Number of CLIP tokens, including start and end, to which captions are padded and truncated.
        t5: Use T5; False uses zeros in place of its tokens.
        t5_length: Number of T5 tokens, one per byte of the caption.
        objective: Training objective; by default flow matching with logit-normal timesteps.
        training: Arguments of `LatentDiffusion`; `models.training_keywords` describes those that are not listed here.
    """
    check_sources(vae=vae)
    autoencoder = load_vae(vae or str(TINY_VAE), layout=vae_layout)
    width = 4 * text_width
    config = tiny_clip_config(width=text_width, layers=text_layers, max_length=max_length, projection_dim=text_width)
    t5_config = T5Config(
        vocab_size=512,
        d_model=width,
        d_kv=32,
        d_ff=2 * width,
        num_layers=text_layers,
        num_heads=width // 32,
        feed_forward_proj='gated-gelu',
        dropout_rate=0.0,  # dropout would draw random numbers that are not keyed by sample
    )
    text = Sd3TextConditioner(
        [CLIPTextModelWithProjection(config) for _ in range(2)],
        T5EncoderModel(t5_config) if t5 else None,
        tiny_mmdit_tokenizers(max_length=max_length, t5=t5, t5_length=t5_length),
        width=width,
        t5_length=t5_length,
    )
    sizes = {'depth': depth, 'dual_attention_blocks': dual_attention_blocks, 'qk_norm': qk_norm}
    sizes |= {'pos_embed_max_size': pos_embed_max_size, 'patch_size': patch_size}
    sizes |= {'sample_size': patch_size * pos_embed_max_size}
    return _model(resolution, autoencoder, text, training, train_text_encoder=train_text_encoder, **sizes)


def _model(
    resolution: int,
    vae: Vae,
    text: Sd3TextConditioner,
    training: TransformerKeywords,
    *,
    train_text_encoder: bool,
    **sizes: Any,
) -> LatentDiffusion:
    """Build a transformer for a VAE's latents and the outputs of `text`, and its model."""
    training['objective'] = objective_for(vae, training.get('objective'), sd3_objective(resolution))
    return LatentDiffusion(
        transformer(latent_channels(vae), text, **sizes),
        vae,
        text,
        train_text_encoder=train_text_encoder,
        latent_size=latent_side(resolution, vae),
        **training,
    )


def transformer(
    channels: int, text: Sd3TextConditioner, *, depth: int, dual_attention_blocks: int, qk_norm: bool, **sizes: Any
) -> SD3Transformer2DModel:
    """Build an MMDiT for latents with `channels` channels and for the outputs of the text encoders `text`."""
    if dual_attention_blocks > depth:
        raise UserError(
            f'dual_attention_blocks: {dual_attention_blocks} is more than depth, {depth}; use at most {depth}'
        )
    return SD3Transformer2DModel(
        in_channels=channels,
        out_channels=channels,
        num_layers=depth,
        num_attention_heads=depth,
        attention_head_dim=HEAD_WIDTH,
        joint_attention_dim=text.width,
        caption_projection_dim=depth * HEAD_WIDTH,
        pooled_projection_dim=text.pooled_width,
        dual_attention_layers=tuple(range(dual_attention_blocks)),
        qk_norm='rms_norm' if qk_norm else None,
        **sizes,
    )


def _clip(pretrained: str | None, revision: str | None, *, first: bool) -> CLIPTextModelWithProjection:
    if pretrained is None:
        return CLIPTextModelWithProjection(CLIPTextConfig(**(CLIP_L if first else CLIP_BIG_G)))
    name = 'text_encoder' if first else 'text_encoder_2'
    return load_pretrained(CLIPTextModelWithProjection, pretrained, subfolder=name, revision=revision)


def _t5(pretrained: str | None, revision: str | None) -> T5EncoderModel:
    if pretrained is None:
        return T5EncoderModel(T5Config(**T5_XXL))
    return load_pretrained(T5EncoderModel, pretrained, subfolder='text_encoder_3', revision=revision)
