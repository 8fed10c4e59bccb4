"""Model builders: functions that build a LatentDiffusion from a few settings, selected by a recipe's `model.name`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedTokenizerBase
from typing_extensions import Unpack

from diffusion.config.declarations import AtLeast, MultipleOf, constrained, traits
from diffusion.config.model_checks import PIXELS
from diffusion.errors import UserError
from diffusion.models import sd2_config
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pixel_space import PixelSpace
from diffusion.models.pretrained import clip_tokenizer, load_pretrained, read_config
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.training_keywords import (
    MaskPadding,
    PipelineSource,
    Resolution,
    Revision,
    TrainingKeywords,
    VaeSource,
)
from diffusion.models.vae import Vae, downsampling, latent_channels

TINY_VAE = Path(__file__).parent / 'weights' / 'tiny_vae'
"""Folder of the packaged autoencoder for 64 px OpenMoji images, trained by yamls/tiny_vae.yaml."""

AUTOENCODERS: dict[str, type[AutoencoderKL] | type[AutoencoderDC]] = {
    'AutoencoderKL': AutoencoderKL,
    'AutoencoderDC': AutoencoderDC,
}
"""Supported classes of autoencoders by name."""

STABLE_DIFFUSION = traits(u_net=True, pipelines=('StableDiffusionPipeline',))

Builder = TypeVar('Builder', bound=Callable[..., Any])


def tokenizes_with(tokenizers: Callable[..., list[PreTrainedTokenizerBase]]) -> Callable[[Builder], Builder]:
    """Return a decorator for model builders that sets `builder.tokenizers`.

    The attribute is the function that builds the model's tokenizers, without the model, from the same keywords.
    """

    # The loader's workers tokenize captions: they need the tokenizers but must not build the model.
    def decorate(builder: Builder) -> Builder:
        builder.tokenizers = tokenizers  # type: ignore[attr-defined]
        return builder

    return decorate


def sd2_tokenizers(
    *, pretrained: str | None = sd2_config.PRETRAINED, revision: str | None = sd2_config.REVISION
) -> list[PreTrainedTokenizerBase]:
    """Return Stable Diffusion 2's tokenizer in a list, built from open_clip's vocabulary if `pretrained` is None."""
    if pretrained is None:
        return [clip_tokenizer(max_length=77)]
    return [load_pretrained(CLIPTokenizer, pretrained, subfolder='tokenizer', revision=revision)]


@STABLE_DIFFUSION
@tokenizes_with(sd2_tokenizers)
@constrained
def sd2(
    resolution: Annotated[Resolution, MultipleOf(8)] = 512,
    *,
    pretrained: PipelineSource = sd2_config.PRETRAINED,
    revision: Revision = sd2_config.REVISION,
    vae: VaeSource = None,
    mask_padding: MaskPadding = False,
    train_text_encoder: bool = False,
    **training: Unpack[TrainingKeywords],
) -> LatentDiffusion:
    """Build Stable Diffusion 2: a U-Net from scratch (865,910,724 parameters) with pretrained VAE and text encoder.

    Args:
        resolution: Side of the images in pixels, a multiple of 8 and of the VAE's downsampling; sets only the default
            size of generated images.
        pretrained: Source of VAE, text encoder and tokenizer: a repository on the Hub or a local folder in diffusers'
            layout. None builds them with random weights, for tests and for counting parameters and FLOPs.
        revision: Commit of the repository `pretrained`.
        vae: Source of the VAE if it is not `pretrained`: a folder of an AutoencoderKL or AutoencoderDC, a repository
            with a `vae` subfolder, or `pixels` to train on pixels.
        training: The keywords that all models share; see `training_keywords.py`.
    """
    check_sources(pretrained=pretrained, vae=vae)
    if vae is not None:
        autoencoder = load_vae(vae)
    elif pretrained is not None:
        autoencoder = load_vae(pretrained, revision=revision)
    else:
        autoencoder = AutoencoderKL(**sd2_config.VAE)
    if pretrained is not None:
        encoder = load_pretrained(CLIPTextModel, pretrained, subfolder='text_encoder', revision=revision)
    else:
        encoder = CLIPTextModel(CLIPTextConfig(**sd2_config.TEXT_ENCODER))
    sample_size = latent_side(resolution, autoencoder)
    channels = latent_channels(autoencoder)
    unet: dict[str, Any] = sd2_config.UNET | {
        'sample_size': sample_size,
        'in_channels': channels,
        'out_channels': channels,
    }
    return LatentDiffusion(
        UNet2DConditionModel(**unet),
        autoencoder,
        TextConditioner([encoder], sd2_tokenizers(pretrained=pretrained, revision=revision)),
        mask_padding=mask_padding,
        train_text_encoder=train_text_encoder,
        **training,
    )


def tiny_tokenizers(*, max_length: int = 16) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizer of the model `tiny` in a list: CLIP's vocabulary, up to `max_length` tokens per caption."""
    return [clip_tokenizer(max_length=max_length)]


@STABLE_DIFFUSION
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
        resolution: Side of the images in pixels, a multiple of 8 and of the VAE's downsampling.
        vae: Folder of an AutoencoderKL or AutoencoderDC, or `pixels` to train on pixels; the packaged one for 64 px
            OpenMoji images by default.
        block_out_channels: Widths of the U-Net's levels, multiples of 32: GroupNorm has 32 groups, and attention heads
            have width 32.
        layers_per_block: Residual blocks per level.
        text_width: D, width of the text encoder, a multiple of 32.
        text_layers: Number of layers of the text encoder.
        max_length: L, number of tokens to which captions are padded and truncated, start and end included.
        training: The keywords that all models share; see `training_keywords.py`.
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
        denoiser,
        autoencoder,
        text,
        mask_padding=mask_padding,
        train_text_encoder=train_text_encoder,
        **training,
    )


def tiny_text(*, width: int, layers: int, max_length: int, mask_padding: bool = False) -> TextConditioner:
    """Return a small CLIP text encoder with random weights, and the tokenizer of the model `tiny`.

    Args:
        width: D, a multiple of 32, the width of its attention heads.
        layers: Number of layers.
        max_length: L, tokens per caption.
        mask_padding: Hide the padding of captions from the encoder.
    """
    config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=max_length,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=0,
    )
    return TextConditioner([CLIPTextModel(config)], tiny_tokenizers(max_length=max_length), mask_padding=mask_padding)


def check_sources(**sources: str | None) -> None:
    """Check the folders and repositories that a builder loads its parts from, before it loads the first one.

    Args:
        sources: Values by the builder's keyword; None if it loads nothing.

    Raises:
        UserError: A path is not a folder.
    """
    for name, source in sources.items():
        # A repository on the Hub is `org/name`, or `name` for some old ones.
        if source is None or not (source.startswith(('/', '.', '~')) or source.count('/') > 1):
            continue
        if not Path(source).is_dir():
            raise UserError(
                f'{name}: {source} is not a folder on this machine; give a folder written by save_pretrained of '
                'diffusers or transformers, or the name of a repository on the Hugging Face Hub, org/name'
            )


def load_vae(source: str, *, revision: str | None = None) -> Vae:
    """Load an autoencoder.

    Args:
        source: Folder or repository of the autoencoder, or of a model with it in the subfolder `vae`; `_class_name` in
            its config.json is its class. `pixels` gives PixelSpace, for training on pixels.
        revision: Commit of the repository.

    Raises:
        UserError: The files cannot be loaded, or the class is not supported.
    """
    if source == PIXELS:
        return PixelSpace()
    subfolder, config = _vae_config(source, revision)
    name = config.get('_class_name', AutoencoderKL.__name__)
    if name not in AUTOENCODERS:
        raise UserError(
            f'{"/".join(each for each in (source, subfolder) if each)}: {name} is not supported; use '
            f'{" or ".join(AUTOENCODERS)}'
        )
    return load_pretrained(AUTOENCODERS[name], source, subfolder=subfolder, revision=revision)


def _vae_config(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return the subfolder of a source that holds its autoencoder, and the content of the config.json in it."""
    if Path(source).is_dir():
        subfolder = '' if (Path(source) / 'config.json').is_file() else 'vae'
        return subfolder, read_config(AutoencoderKL, source, subfolder=subfolder)
    try:
        return 'vae', read_config(AutoencoderKL, source, subfolder='vae', revision=revision)
    except UserError as error:
        try:
            return '', read_config(AutoencoderKL, source, subfolder='', revision=revision)
        except UserError:
            raise error from error.__cause__


def latent_side(resolution: int, vae: Vae) -> int:
    """Return the side of the latents for an image side of `resolution` pixels.

    Raises:
        UserError: The VAE's downsampling factor does not divide the resolution.
    """
    # The annotation ensures multiples of 8, the cell of the default VAEs, but this VAE may downsample by more.
    cell = downsampling(vae)
    if resolution % cell:
        raise UserError(f'resolution: {resolution} px is not a multiple of {cell} px, the size of a latent cell')
    return resolution // cell
