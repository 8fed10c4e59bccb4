"""Load pretrained models and tokenizers of diffusers and transformers, from a folder or the Hugging Face Hub.

Model builders load their frozen parts through this module.
"""

import copy
import functools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from diffusers.models.modeling_utils import ModelMixin
from safetensors import SafetensorError
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from diffusion.compatibility.diffusers_versions import rae_problem, without_own_deprecations
from diffusion.config.byte_sizes import bytes_text
from diffusion.config.model_checks import PIXELS
from diffusion.config.weight_sources import revision_problem
from diffusion.errors import UserError
from diffusion.models import hub_files
from diffusion.models.clip_vocabulary import vocabulary_files
from diffusion.models.diffusers_weights import at_subfolder_or_top
from diffusion.models.hub_errors import TO_FIX, check_config, loading_error, missing_tokenizer_file
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.vae import PixelSpace, Vae, check_sides, description, downsampling, image_step
from diffusion.models.wrapped_vaes import Flux2Vae, Layout, RepresentationVae

log = logging.getLogger(__name__)
Loadable = TypeVar('Loadable')
Builder = TypeVar('Builder', bound=Callable[..., Any])

TINY_VAE = Path(__file__).parent / 'weights' / 'tiny_vae'
"""Folder of the packaged autoencoder for 64 px OpenMoji images, trained by yamls/tiny_vae.yaml."""

AUTOENCODERS = {each.__name__: each for each in (AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC, AutoencoderRAE)}
CLIP_L: dict[str, Any] = {
    'vocab_size': 49408,
    'hidden_size': 768,
    'intermediate_size': 3072,
    'num_hidden_layers': 12,
    'num_attention_heads': 12,
    'max_position_embeddings': 77,
    'hidden_act': 'quick_gelu',
    'layer_norm_eps': 1e-5,
    'projection_dim': 768,
    'bos_token_id': 0,
    'eos_token_id': 2,
    'pad_token_id': 1,
}
"""Configuration of CLIP ViT-L/14, the first text encoder of Stable Diffusion XL and 3."""
CLIP_BIG_G: dict[str, Any] = CLIP_L | {
    'hidden_size': 1280,
    'intermediate_size': 5120,
    'num_hidden_layers': 32,
    'num_attention_heads': 20,
    'hidden_act': 'gelu',
    'projection_dim': 1280,
}
"""Configuration of OpenCLIP ViT-bigG/14, the second text encoder of Stable Diffusion XL and 3."""

_without_weights = False
_checked: list[str] | None = None
"""Descriptions of the weights that `load_pretrained` has checked; None outside of `checking_weights`."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Context in which `load_pretrained` builds models from configurations, without weights, on the default device."""
    global _without_weights
    before, _without_weights = _without_weights, True
    try:
        yield
    finally:
        _without_weights = before


@contextmanager
def checking_weights() -> Iterator[list[str]]:
    """Context like `without_weights` in which `load_pretrained` also checks that the weights could be loaded.

    Weights are neither downloaded nor read. A description of each part's weights, such as `vae: 335 MB to download`, is
    added to the list that the context yields.
    """
    global _checked
    before, _checked = _checked, []
    try:
        with without_weights():
            yield _checked
    finally:
        _checked = before


def check_revision(source: str, revision: str | None) -> None:
    """Raise UserError if the source of frozen parts is a Hub repository without a revision."""
    problem = revision_problem(source, revision)
    if problem is not None:
        raise UserError(f'model.revision: {problem}')


def load_pretrained(
    part: type[Loadable],
    source: str,
    *,
    subfolder: str,
    revision: str | None = None,
    read_config: Callable[[dict[str, Any]], Any] | None = None,
) -> Loadable:
    """Load a model or tokenizer of a diffusers pipeline with `from_pretrained`, from a folder or the Hugging Face Hub.

    Args:
        subfolder: Folder of the part in the source, such as `vae` or `text_encoder_2`; empty if the part is at the top.
        revision: Commit of the repository; ignored for a local folder.
        read_config: Function that converts the content of config.json to a configuration, for transformers models whose
            class cannot read it.

    Raises:
        UserError: The files do not exist, are not accessible, or are damaged.
        ExternalError: The Hub did not respond for several minutes.
        OSError: The disk cannot be read.
    """
    if _checked is not None and issubclass(part, nn.Module):
        _checked.append(_check_weights(part, source, subfolder, revision))
    options: dict[str, Any] = {}
    weights = issubclass(part, nn.Module) and not _without_weights
    if Path(source).is_dir():
        if issubclass(part, nn.Module):
            check_config(Path(source, subfolder, 'config.json'))
    else:
        revision = hub_files.fetch(part, source, subfolder=subfolder, revision=revision, weights=weights)
        # Pass the Hub's cache folder, since transformers may default to another one.
        cache_dir = hub_files.constants.HF_HUB_CACHE
        options = {'revision': revision, 'local_files_only': True, 'cache_dir': cache_dir}
    if weights:
        options['use_safetensors'] = True  # unpickling a downloaded file could run arbitrary code
        options['output_loading_info'] = True
        options |= _variant(Path(source, subfolder))
    if weights and issubclass(part, PreTrainedModel):
        options['dtype'] = torch.float32  # transformers 5 would use the dtype in the file
    if weights and issubclass(part, ModelMixin):
        options['low_cpu_mem_usage'] = False  # otherwise diffusers logs a long hint to install accelerate
    loader: Any = part
    try:
        if _without_weights and issubclass(part, ModelMixin):
            with without_own_deprecations():
                config = loader.load_config(source, subfolder=subfolder, **options)
            return loader.from_config(config)
        if issubclass(part, PreTrainedModel) and (_without_weights or read_config is not None):
            config_class: Any = part.config_class
            content, _ = config_class.get_config_dict(source, subfolder=subfolder, **options)
            options['config'] = config_class(**content) if read_config is None else read_config(content)
            if _without_weights:
                return loader(options['config'])
        # Check this first: if the files are missing, transformers 5 returns an empty tokenizer.
        if (missing := missing_tokenizer_file(part, source, subfolder)) is not None:
            raise missing
        with without_own_deprecations():
            loaded = loader.from_pretrained(source, subfolder=subfolder, **options)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        replacement = loading_error(error, part, source, subfolder=subfolder, revision=revision)
        if replacement is None:
            raise
        raise replacement from error
    if not weights:
        return loaded
    model, info = loaded
    # from_pretrained only warns about missing tensors and continues with random values.
    if info['missing_keys']:
        name = min(info['missing_keys'])
        raise UserError(
            f'{"/".join(each for each in (source, subfolder) if each)}: its weight files lack '
            f'{len(info["missing_keys"])} tensors of {part.__name__}, such as {name}; {TO_FIX}'
        )
    return model


def _variant(folder: Path) -> dict[str, str]:
    """Return `from_pretrained`'s argument `variant` for a local folder with only half-precision weights, else {}."""
    found = hub_files.weight_files(folder)
    if found is None or found[0] is None:
        return {}
    log.warning('%s: only has half-precision weights (%s), which are loaded', folder, found[0])
    return {'variant': found[0]}


def _check_weights(part: type[nn.Module], source: str, subfolder: str, revision: str | None) -> str:
    """Check that a model's weights could be loaded; return a description for `checking_weights`."""
    name = subfolder or part.__name__
    if not Path(source).is_dir():
        size = hub_files.check_weights(part, source, subfolder=subfolder, revision=revision)
        return f'{name}: {bytes_text(size)} to download' if size else f'{name}: in the cache'
    folder = Path(source, subfolder)
    # A missing config.json is reported when the model is loaded.
    if (folder / 'config.json').is_file() and hub_files.weight_files(folder) is None:
        raise UserError(f'{folder}: has no {hub_files.STEMS[issubclass(part, ModelMixin)]}.safetensors; {TO_FIX}')
    return f'{name}: in {folder}'


def read_config(part: type[nn.Module], source: str, *, subfolder: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json, from a folder or the Hub, as in `load_pretrained`; {} if a folder has none."""
    path = Path(source, subfolder, 'config.json')
    if not Path(source).is_dir():
        revision = hub_files.fetch(part, source, subfolder=subfolder, revision=revision, weights=False)
        path = hub_files.cached_file(source, f'{subfolder}/config.json'.lstrip('/'), revision=revision)
    check_config(path)
    return json.loads(path.read_bytes()) if path.is_file() else {}


def clip_tokenizer(*, max_length: int = 77, pad_token: str = '!') -> CLIPTokenizer:
    """Build CLIP's tokenizer from the vocabulary in the open_clip package, without downloads.

    Token ids are the same as in `openai/clip-vit-large-patch14`. Stable Diffusion 2 pads with `!`, id 0.
    """
    # Cache it: reading the vocabulary takes 0.2 s, and a run's model and dataset each need the tokenizer.
    return copy.copy(_clip_tokenizer(max_length, pad_token))


@functools.cache
def _clip_tokenizer(max_length: int, pad_token: str) -> CLIPTokenizer:
    # CLIPTokenizer can only read its vocabulary from files.
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, rules = Path(folder, 'vocab.json'), Path(folder, 'merges.txt')
        for path, text in zip((vocabulary, rules), vocabulary_files(), strict=True):
            path.write_text(text, encoding='utf-8')
        return CLIPTokenizer(str(vocabulary), str(rules), model_max_length=max_length, pad_token=pad_token)


def tokenizes_with(tokenizers: Callable[..., list[PreTrainedTokenizerBase]]) -> Callable[[Builder], Builder]:
    """Return a decorator that adds `tokenizers`, the function that builds a model's tokenizers, to a model builder."""

    # The loader's workers tokenize captions. With this attribute, they get the tokenizers without building the model.
    def decorate(builder: Builder) -> Builder:
        builder.tokenizers = tokenizers  # type: ignore[attr-defined]
        return builder

    return decorate


def check_sources(**sources: str | None) -> None:
    """Raise UserError if a source that looks like a path is not a folder; pass sources by setting: `vae='/a/vae'`."""
    for name, source in sources.items():
        # A Hub repository is `org/name`, or just `name` for some old ones.
        if source is None or not (source.startswith(('/', '.', '~')) or source.count('/') > 1):
            continue
        if not Path(source).is_dir():
            raise UserError(
                f'{name}: {source} is not a folder on this machine; give a folder written by save_pretrained of '
                'diffusers or transformers, or the name of a repository on the Hugging Face Hub, org/name'
            )


def load_vae(source: str, *, revision: str | None = None, layout: Layout = 'channels') -> Vae:
    """Load an autoencoder from `source` or its subfolder `vae`; PixelSpace if `source` is `pixels`.

    `layout`: Layout of an AutoencoderKLFlux2's latents (see Flux2Vae); UserError unless `channels` for other classes.
    """
    if source == PIXELS:
        return _only_channels(PixelSpace(), source, layout)
    subfolder, config = _vae_config(source, revision)
    name = config.get('_class_name', AutoencoderKL.__name__)
    where = '/'.join(each for each in (source, subfolder) if each)
    if name not in AUTOENCODERS:
        raise UserError(f'{where}: {name} is not supported; use {" or ".join(AUTOENCODERS)}')
    if (problem := rae_problem(config)) is not None:
        raise UserError(f'{where}: {problem}')
    loaded = load_pretrained(AUTOENCODERS[name], source, subfolder=subfolder, revision=revision)
    if not isinstance(loaded, AutoencoderKLFlux2):
        wrapped = RepresentationVae(loaded) if isinstance(loaded, AutoencoderRAE) else loaded
        return _only_channels(wrapped, source, layout)
    vae = Flux2Vae(loaded, layout)
    if not _without_weights:
        vae.check_statistics(where)
    return vae


def _only_channels(vae: Any, source: str, layout: Layout) -> Any:
    if layout != 'channels':
        raise UserError(
            f'vae_layout: {layout}, but the latents of {source} ({description(vae)}) have one layout; use channels, '
            'or an AutoencoderKLFlux2'
        )
    return vae


def build_vae(
    vae: str | None,
    pretrained: str | None,
    revision: str | None,
    *,
    default: Mapping[str, Any],
    vae_revision: str | None = None,
    layout: Layout = 'channels',
) -> Vae:
    """Load the autoencoder `vae`; if None, that of `pretrained`; if both are None, build `default` untrained.

    With the layout `grouped`, FLUX.2's autoencoder is built in place of `default`.
    """
    if vae is not None:
        return load_vae(vae, revision=vae_revision, layout=layout)
    if pretrained is not None:
        return load_vae(pretrained, revision=revision, layout=layout)
    return AutoencoderKL(**default) if layout == 'channels' else Flux2Vae(AutoencoderKLFlux2(), layout)


def _vae_config(source: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """Return the subfolder of a source that contains its autoencoder, and the autoencoder's config.json."""
    if Path(source).is_dir():
        subfolder = '' if (Path(source) / 'config.json').is_file() else 'vae'
        return subfolder, read_config(AutoencoderKL, source, subfolder=subfolder)
    return at_subfolder_or_top(functools.partial(read_config, AutoencoderKL, source, revision=revision), 'vae')


def latent_side(resolution: int, vae: Vae) -> int:
    """Return the side of the latents of images of `resolution` px; raise UserError if the VAE cannot encode them."""
    # Recipes only ensure multiples of 8, the factor of the default VAEs, but this VAE may have a larger factor.
    step = image_step(vae)
    if resolution % step:
        raise UserError(f'resolution: {resolution} px is not a multiple of {step} px, the size of a latent cell')
    check_sides(vae, resolution, resolution)
    return resolution // downsampling(vae)


def tiny_tokenizers(*, max_length: int = 16) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizer of the model `tiny` in a list: CLIP's vocabulary, up to `max_length` tokens per caption."""
    return [clip_tokenizer(max_length=max_length)]


def tiny_clip_config(*, width: int, layers: int, max_length: int, **more: Any) -> CLIPTextConfig:
    """Return the configuration of a small CLIP text encoder for `clip_tokenizer`, with attention heads of width 32."""
    return CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=max_length,
        bos_token_id=49406,
        eos_token_id=49407,
        pad_token_id=0,
        **more,
    )


def tiny_text(*, width: int, layers: int, max_length: int, mask_padding: bool = False) -> TextConditioner:
    """Return a small CLIP text encoder (random weights, heads of width 32) and the tokenizer of the model `tiny`."""
    config = tiny_clip_config(width=width, layers=layers, max_length=max_length)
    return TextConditioner([CLIPTextModel(config)], tiny_tokenizers(max_length=max_length), mask_padding=mask_padding)
