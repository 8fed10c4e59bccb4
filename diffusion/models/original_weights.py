"""Weights of a denoiser from a file in the layout of Stable Diffusion's original code (CompVis, Stability AI)."""

from pathlib import Path
from typing import Literal

from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_sd3_transformer_checkpoint_to_diffusers,
)
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.diffusers_weights import open_safetensors
from diffusion.models.weight_fitting import way_out

UNET_PREFIX, AVERAGE_PREFIX = 'model.diffusion_model.', 'model_ema.'


def read_original(denoiser: ModelMixin, file: Path, which: Literal['training', 'ema']) -> dict[str, Tensor]:
    """Return the weights of a denoiser in a file of Stable Diffusion's original code, by their names in diffusers.

    Files in this layout have no configuration: settings that do not show in the shapes, such as the number of attention
    heads, cannot be compared.

    Args:
        denoiser: The U-Net or SD3Transformer2DModel that will take the weights.
        file: A safetensors file with tensors `model.diffusion_model.*`, of Stable Diffusion 1.x, 2.x, XL or 3.
        which: The training weights, or the averaged weights, `model_ema.*`.

    Raises:
        UserError: The file is damaged, has no denoiser or no averaged weights, or has another architecture.
    """
    if isinstance(denoiser, SD3Transformer2DModel):
        return _read_mmdit(denoiser, file, which)
    if not isinstance(denoiser, UNet2DConditionModel):
        raise UserError(
            f'{file}: this layout is known for U-Nets and Stable Diffusion 3 only; use a folder of diffusers'
        )
    with open_safetensors(file) as opened:
        names = renamed(denoiser, [*opened.keys()], file, which)
        return {name: opened.get_tensor(stored) for name, stored in names.items()}


def renamed(
    denoiser: UNet2DConditionModel, stored: list[str], file: Path, which: Literal['training', 'ema']
) -> dict[str, str]:
    """Return the name in a file for each name of a U-Net's tensors in diffusers.

    Args:
        stored: All names in the file.
        file: The file, for messages.
        which: The weights to take; see `read_original`.
    """
    inside = [name for name in stored if name.startswith(UNET_PREFIX)]
    if not inside:
        is_diffusers = 'conv_in.weight' in stored or 'proj_out.weight' in stored
        what = (
            'it is in the layout of diffusers: name its folder, with config.json' if is_diffusers else 'is it a U-Net?'
        )
        raise UserError(f'{file}: has no tensors {UNET_PREFIX}*; {what}')
    average = {name: AVERAGE_PREFIX + name.removeprefix('model.').replace('.', '') for name in inside}
    if which == 'ema' and not {*average.values()} <= {*stored}:
        raise UserError(f'{file}: it has no averaged weights ({AVERAGE_PREFIX}*); use weights: training')
    try:
        # With the names as values, diffusers' conversion returns the map between both layouts.
        found = convert_ldm_unet_checkpoint({name: name for name in inside}, denoiser.config)
    except KeyError as error:
        raise UserError(f'{file}: lacks {UNET_PREFIX}{error.args[0]}; {way_out(denoiser)}') from error
    # The conversion drops tensors that it does not know; with them, the U-Net would compute something else.
    _check_unused({*inside} - {*found.values()}, file, denoiser)
    return {name: average[each] for name, each in found.items()} if which == 'ema' else found


def _read_mmdit(denoiser: SD3Transformer2DModel, file: Path, which: Literal['training', 'ema']) -> dict[str, Tensor]:
    """Return the weights of Stable Diffusion 3's transformer in a file, by their names in diffusers."""
    with open_safetensors(file) as opened:
        stored = {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(UNET_PREFIX)}  # noqa: SIM118
    if not any('.joint_blocks.' in name for name in stored):
        raise UserError(f'{file}: has no tensors {UNET_PREFIX}joint_blocks.*; is it Stable Diffusion 3?')
    if which == 'ema':
        raise UserError(f'{file}: it has no averaged weights; use weights: training')
    try:
        found = convert_sd3_transformer_checkpoint_to_diffusers(stored)  # removes the tensors that it knows
    except KeyError as error:
        raise UserError(f'{file}: lacks {UNET_PREFIX}{error.args[0]}; {way_out(denoiser)}') from error
    _check_unused({f'{UNET_PREFIX}{name}' for name in stored}, file, denoiser)
    return found


def _check_unused(unused: set[str], file: Path, denoiser: ModelMixin) -> None:
    """Raise UserError if a file has tensors of the denoiser that diffusers' conversion does not know."""
    if unused:
        raise UserError(
            f'{file}: the architecture differs from the recipe: {len(unused)} unknown tensors '
            f'({", ".join(sorted(unused)[:2])}); {way_out(denoiser)}'
        )
