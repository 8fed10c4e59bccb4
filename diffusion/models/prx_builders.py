"""Model builders of PRX: the published transformer, and a miniature of it."""

from typing import Annotated, Any, Literal

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from diffusion.config.constraints import AtLeast, MultipleOf, constrained
from diffusion.errors import UserError
from diffusion.models import prx_config
from diffusion.models.builders import TINY_VAE, latent_side, load_vae, tiny_text, tiny_tokenizers, tokenizes_with
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.pretrained import clip_tokenizer, load_pretrained
from diffusion.models.representation_alignment import RepresentationAlignment
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.vae import latent_channels

FLOW = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', uniform_fraction=0.1)
"""PRX's objective in latents."""


def prx_tokenizers(
    *,
    pretrained: str | None = prx_config.PRETRAINED,
    revision: str | None = None,
    max_length: int = prx_config.TEXT_LENGTH,
) -> list[PreTrainedTokenizerBase]:
    """Return PRX's tokenizer in a list; if `pretrained` is None, CLIP's, built from open_clip's vocabulary."""
    if pretrained is None:
        return [clip_tokenizer(max_length=max_length)]
    tokenizer: Any = load_pretrained(AutoTokenizer, pretrained, subfolder='tokenizer', revision=revision)
    tokenizer.model_max_length = max_length
    return [tokenizer]


@tokenizes_with(prx_tokenizers)
@constrained
def prx(
    resolution: Annotated[int, MultipleOf(16)] = 256,
    *,
    pretrained: str | None = prx_config.PRETRAINED,
    revision: str | None = None,
    vae: str | None = None,
    hidden_size: Annotated[int, MultipleOf(4)] = 1792,
    num_heads: Annotated[int, AtLeast(1)] = 28,
    depth: Annotated[int, AtLeast(1)] = 16,
    max_length: Annotated[int, AtLeast(3)] = prx_config.TEXT_LENGTH,
    objective: Objective | None = None,
    caption_dropout: float = 0.1,
    caption_dropout_mode: Literal['empty', 'zeros'] = 'empty',
    encoder_dtype: Literal['auto', 'float32', 'float16', 'bfloat16'] = 'bfloat16',
    posterior: Literal['sample', 'mean'] = 'sample',
    representation_alignment: RepresentationAlignment | None = None,
    seed: int = 17,
) -> LatentDiffusion:
    """Build PRX: a transformer from scratch (1,170,691,648 parameters) with pretrained VAE and T5-Gemma text encoder.

    Args:
        resolution: Side of the images in pixels, a multiple of 16; sets only the default size of generated images.
        pretrained: Source of VAE, text encoder and tokenizer: a repository on the Hub or a local folder in diffusers'
            layout. None builds them with random weights, for tests and for counting parameters and FLOPs.
        revision: Commit of the repository `pretrained`.
        vae: Source of the VAE if it is not `pretrained`: a folder of an AutoencoderKL, or a repository with a `vae`
            subfolder.
        hidden_size: Width of the transformer, a multiple of 4 times `num_heads`.
        num_heads: Number of attention heads; 64 channels per head is usual.
        depth: Number of blocks.
        max_length: L, number of tokens to which captions are padded and truncated. Padding is hidden from the
            transformer and from the text encoder.
        objective: Training objective; by default a flow with logit-normal timesteps, as published. The keywords from
            here on are those of `diffusion.LatentDiffusion`.
    """
    if vae is not None:
        autoencoder = load_vae(vae)
    elif pretrained is not None:
        autoencoder = load_pretrained(AutoencoderKL, pretrained, subfolder='vae', revision=revision)
    else:
        autoencoder = AutoencoderKL(**prx_config.VAE)
    text = TextConditioner(
        [_text_encoder(pretrained, revision)],
        prx_tokenizers(pretrained=pretrained, revision=revision, max_length=max_length),
        mask_padding=True,
    )
    sizes = {'hidden_size': hidden_size, 'num_heads': num_heads, 'depth': depth}
    return LatentDiffusion(
        transformer(latent_channels(autoencoder), text.width, **sizes),
        autoencoder,
        text,
        objective=objective or FLOW,
        caption_dropout=caption_dropout,
        caption_dropout_mode=caption_dropout_mode,
        mask_padding=True,
        train_text_encoder=False,
        encoder_dtype=encoder_dtype,
        posterior=posterior,
        representation_alignment=representation_alignment,
        seed=seed,
        latent_size=latent_side(resolution, autoencoder),
    )


@tokenizes_with(tiny_tokenizers)
@constrained
def tiny_prx(
    resolution: Annotated[int, MultipleOf(16)] = 64,
    *,
    vae: str | None = None,
    hidden_size: Annotated[int, MultipleOf(4)] = 192,
    num_heads: Annotated[int, AtLeast(1)] = 6,
    depth: Annotated[int, AtLeast(1)] = 6,
    patch_size: Annotated[int, AtLeast(1)] = 1,
    text_width: Annotated[int, MultipleOf(32)] = 128,
    text_layers: Annotated[int, AtLeast(0)] = 2,
    max_length: Annotated[int, AtLeast(3)] = 16,
    objective: Objective | None = None,
    caption_dropout: float = 0.1,
    caption_dropout_mode: Literal['empty', 'zeros'] = 'empty',
    train_text_encoder: bool = True,
    encoder_dtype: Literal['auto', 'float32', 'float16', 'bfloat16'] = 'auto',
    posterior: Literal['sample', 'mean'] = 'sample',
    representation_alignment: RepresentationAlignment | None = None,
    seed: int = 17,
) -> LatentDiffusion:
    """Build a miniature PRX: the same transformer with a small text encoder, small enough to train on a laptop.

    Args:
        resolution: Side of the images in pixels, a multiple of 16.
        vae: Folder of an AutoencoderKL; the packaged one for 64 px OpenMoji images by default.
        hidden_size: Width of the transformer, a multiple of 4 times `num_heads`.
        num_heads: Number of attention heads.
        depth: Number of blocks.
        patch_size: Side of a token in latent cells.
        text_width: D, width of the text encoder, a multiple of 32.
        text_layers: Number of layers of the text encoder.
        max_length: L, number of tokens to which captions are padded and truncated, start and end included.
        objective: Training objective; by default a flow with logit-normal timesteps. The keywords from here on are
            those of `diffusion.LatentDiffusion`.
    """
    autoencoder = load_vae(vae or str(TINY_VAE))
    text = tiny_text(width=text_width, layers=text_layers, max_length=max_length, mask_padding=True)
    sizes = {'hidden_size': hidden_size, 'num_heads': num_heads, 'depth': depth, 'patch_size': patch_size}
    return LatentDiffusion(
        transformer(latent_channels(autoencoder), text.width, **sizes),
        autoencoder,
        text,
        objective=objective or FLOW,
        caption_dropout=caption_dropout,
        caption_dropout_mode=caption_dropout_mode,
        mask_padding=True,
        train_text_encoder=train_text_encoder,
        encoder_dtype=encoder_dtype,
        posterior=posterior,
        representation_alignment=representation_alignment,
        seed=seed,
        latent_size=latent_side(resolution, autoencoder),
    )


def transformer(channels: int, text_width: int, *, hidden_size: int, num_heads: int, **sizes: Any) -> Any:
    """Return a PRX transformer for latents of C channels and text embeddings of width D.

    Raises:
        UserError: The width does not divide into heads of a multiple of 4 channels.
    """
    per_head, rest = divmod(hidden_size, num_heads)
    if rest or per_head % 4:
        raise UserError(
            f'hidden_size: {hidden_size} does not divide into {num_heads} heads of a multiple of 4 channels, which '
            f'the rotary embedding needs; use a multiple of {4 * num_heads}'
        )
    settings = prx_config.TRANSFORMER | {'in_channels': channels, 'context_in_dim': text_width, **sizes}
    # Half of a head's channels encode the row, the other half the column.
    settings |= {'hidden_size': hidden_size, 'num_heads': num_heads, 'axes_dim': [per_head // 2] * 2}
    return PRXTransformer2DModel(**settings)


def _text_encoder(pretrained: str | None, revision: str | None) -> T5GemmaEncoder:
    """Return T5-Gemma's encoder, pretrained, or that of T5-Gemma 2B with random weights if `pretrained` is None."""
    if pretrained is None:
        return T5GemmaEncoder(T5GemmaConfig().encoder)
    return load_pretrained(
        T5GemmaEncoder,
        pretrained,
        subfolder='text_encoder',
        revision=revision,
        # Published with the configuration of encoder and decoder, of which T5GemmaEncoder would read neither.
        read_config=lambda content: T5GemmaConfig(encoder=content.get('encoder', content)).encoder,
    )
