"""Read denoiser weights from a folder written by diffusers' `save_pretrained`, and fit them to a model.

The folder is local or on the Hugging Face Hub.
"""

import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffusion.config.schema import fits
from diffusion.config.weight_sources import DENOISERS
from diffusion.errors import UserError
from diffusion.models import hub_files
from diffusion.models.hub_errors import check_config

WEIGHT_FILE = 'diffusion_pytorch_model.safetensors'
NO_EFFECT = {'sample_size', 'upcast_attention', 'in_channels', 'out_channels', 'dropout'}
"""Settings ignored when architectures are compared: they do not matter, or (channel counts) show in the shapes."""
U_NET_NAMES = {768: 'Stable Diffusion 1.x', 1024: 'Stable Diffusion 2.x', 2048: 'Stable Diffusion XL'}
"""Published U-Nets by the width of the text embeddings used in their cross-attention."""
CHANNELS = (('denoiser.conv_in.weight', 1), ('denoiser.conv_out.weight', 0), ('denoiser.conv_out.bias', 0))
"""U-Net tensors whose shapes depend on the number of latent channels, each with its channel dimension."""
Found = TypeVar('Found')
log = logging.getLogger(__name__)


def denoiser_folder(denoiser: ModelMixin, folder: Path) -> Path:
    """Return the denoiser's folder within a folder that `save_pretrained` wrote for a pipeline or a denoiser."""
    for name in (subfolder_of(denoiser), *DENOISERS, ''):
        if (folder / name / 'config.json').is_file():
            return folder / name
    raise UserError(
        f'{folder}: has neither {" nor ".join(f"{each}/config.json" for each in DENOISERS)} nor config.json'
    )


def fetched_denoiser_folder(denoiser: ModelMixin, repository: str, revision: str) -> Path:
    """Fetch a repository's denoiser with `hub_files.fetch`, and return the folder of the Hub's cache that has it."""
    fetch = partial(hub_files.fetch, type(denoiser), repository, revision=revision, weights=True)
    subfolder, _ = at_subfolder_or_top(fetch, subfolder_of(denoiser))
    return hub_files.cached_file(repository, f'{subfolder}/config.json'.lstrip('/'), revision=revision).parent


def check_hub_denoiser(denoiser: ModelMixin, repository: str, revision: str) -> int:
    """Check that a repository's denoiser has the same architecture; return the bytes of weights not in the cache."""
    check = partial(hub_files.check_weights, type(denoiser), repository, revision=revision)
    subfolder, size = at_subfolder_or_top(check, subfolder_of(denoiser))
    check_settings(
        denoiser, hub_files.cached_file(repository, f'{subfolder}/config.json'.lstrip('/'), revision=revision)
    )
    return size


def check_local_denoiser(denoiser: ModelMixin, folder: Path) -> None:
    """Raise UserError unless a folder has weight files of a denoiser of the same class and architecture."""
    found = denoiser_folder(denoiser, folder)
    check_settings(denoiser, found / 'config.json')
    _weight_files(found)


def at_subfolder_or_top(request: Callable[..., Found], subfolder: str) -> tuple[str, Found]:
    """Try a request for `subfolder`, then for the top folder (''); return the folder that worked, and the result."""
    try:
        return subfolder, request(subfolder=subfolder)
    except UserError as error:
        try:
            return '', request(subfolder='')
        except UserError:
            raise error from error.__cause__


def subfolder_of(denoiser: ModelMixin) -> str:
    return 'unet' if isinstance(denoiser, UNet2DConditionModel) else 'transformer'


def read_diffusers(denoiser: ModelMixin, folder: Path) -> dict[str, Tensor]:
    """Return the weights in a denoiser's folder by name; UserError if they have another class or architecture."""
    check_settings(denoiser, folder / 'config.json')
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with open_safetensors(file) as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return weights


def check_settings(denoiser: ModelMixin, place: Path) -> None:
    """Raise UserError unless the configuration in file `place` has the denoiser's class and architecture."""
    check_config(place)
    config = json.loads(place.read_bytes())
    kind = type(denoiser).__name__
    if config.get('_class_name') != kind:
        raise UserError(f"{place}: holds a {config.get('_class_name')}, but the model's denoiser is a {kind}")
    different = different_settings(denoiser, config)
    if different:
        raise UserError(
            f'{place}: the architecture differs from the recipe: {"; ".join(different[:4])}; {way_out(denoiser)}'
        )


def different_settings(denoiser: ModelMixin, config: Mapping[str, Any]) -> list[str]:
    """Describe how a saved configuration differs from the denoiser's; weight shapes do not show all differences."""
    defaults = {name: each.default for name, each in inspect.signature(type(denoiser).__init__).parameters.items()}
    own: Mapping[str, Any] = denoiser.config
    names = [name for name in defaults if name in own and name not in NO_EFFECT]
    stored = {name: config.get(name, defaults[name]) for name in names}
    return [f'{name} is {stored[name]}, expected {own[name]}' for name in names if not _equal(stored[name], own[name])]


def _equal(one: Any, other: Any) -> bool:
    """Return True if two values of a setting are equal; a scalar equals a list that repeats it for every block."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, list | tuple) or isinstance(other, list | tuple):
        many, single = (one, other) if isinstance(one, list | tuple) else (other, one)
        return all(_equal(each, single) for each in many)
    return bool(one == other)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / f'{WEIGHT_FILE}.index.json'
    if index.is_file():
        check_config(index)
        names = json.loads(index.read_bytes()).get('weight_map')
        if not fits(dict[str, str], names):
            raise UserError(f'{index}: has no weight_map of tensors to files; save the model again')
        missing = [name for name in sorted({*names.values()}) if not (folder / Path(name).name).is_file()]
        if missing:
            raise UserError(f'{folder / missing[0]} does not exist, but {index.name} lists it; copy it again')
    found = hub_files.weight_files(folder)
    if found is None:
        raise UserError(
            f'{folder / WEIGHT_FILE} does not exist; save the model with save_pretrained(safe_serialization=True)'
        )
    variant, files = found
    if variant is not None:
        log.warning('%s: only has half-precision weights (%s), which are loaded', folder, variant)
    return files


@contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file, whose tensors can be read one at a time; raise UserError if it is missing or damaged."""
    try:
        with safe_open(file, framework='pt') as opened:
            yield opened
    except (SafetensorError, FileNotFoundError) as error:
        raise UserError(f'{file}: not readable ({error}); copy it again') from error


def resized(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a model's weights with zeros for additional latent channels, and descriptions of what was added.

    With zeros, the first prediction equals that of the source weights: the additional input channels have no effect,
    and the additional output channels are zero. `own` are the model's tensors by name.
    """
    result, added = dict(weights), []
    for name, dimension in CHANNELS:
        if name not in own or name not in weights:
            continue
        stored, wanted = weights[name], own[name].shape
        target = torch.Size([*stored.shape[:dimension], wanted[dimension], *stored.shape[dimension + 1 :]])
        if target == wanted and stored.shape[dimension] < wanted[dimension]:
            grown = stored.new_zeros(wanted)
            grown.narrow(dimension, 0, stored.shape[dimension]).copy_(stored)
            result[name] = grown
            added.append(f'{name} {tuple(stored.shape)} -> {tuple(wanted)}')
    return result, added


def fitting_hint(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a hint if `weights` come from a LoRA or have another text embedding width than `own`, else ''."""
    if any('.lora_A.' in name for name in weights):
        return '; it is the checkpoint of a LoRA: start from the folder that diffusion export --merge writes'
    theirs, ours = _text_width(weights), _text_width(own)
    if theirs == ours or theirs is None or ours is None:
        return ''
    return (
        f'; its cross-attention takes text embeddings of width {theirs}{_family(theirs)}, the model has width '
        f'{ours}{_family(ours)}'
    )


def way_out(denoiser: ModelMixin) -> str:
    width = denoiser.config.get('cross_attention_dim')
    family = U_NET_NAMES.get(width) if isinstance(width, int) else None
    return f'use weights of {family}, or other model settings' if family else 'use other model settings'


def _text_width(weights: Mapping[str, Tensor]) -> int | None:
    return next((each.shape[1] for name, each in weights.items() if name.endswith('attn2.to_k.weight')), None)


def _family(width: int) -> str:
    return f' ({U_NET_NAMES[width]})' if width in U_NET_NAMES else ''
