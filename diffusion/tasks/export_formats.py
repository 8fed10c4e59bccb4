"""Formats of an export: a folder that diffusers loads, or a single file in the layout that ComfyUI reads."""

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from diffusion.compatibility.transformers_versions import make_readable_by_version_4
from diffusion.config.load import Recipe
from diffusion.models.autoencoder import Autoencoder
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.log_levels import errors_only
from diffusion.models.lora import save_lora
from diffusion.models.vae import downsampling
from diffusion.tasks.argument_checks import LORA_WEIGHTS
from diffusion.tasks.model_card import AUTOENCODER, LORA, SINGLE_FILE

Part = TypeVar('Part', bound=nn.Module)


def write_folder(model: nn.Module, recipe: Recipe, folder: Path, precision: torch.dtype, *, lora: bool) -> str:
    """Write a model to a folder, and return what was written: a pipeline's class, or a constant of `model_card`.

    Args:
        folder: The folder, which exists.
        lora: Write the LoRA alone.

    Raises:
        UserError: The pipeline of the model's family cannot represent it.
    """
    if isinstance(model, Autoencoder):
        _cast(model.finished(), precision).save_pretrained(folder)
        return AUTOENCODER
    assert isinstance(model, LatentDiffusion)
    if lora:
        assert recipe.lora is not None
        save_lora(model.denoiser, recipe.lora, folder / LORA_WEIGHTS, precision)
        return LORA
    pipeline = model.family.pipeline(model)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            _cast(part, precision)
    # It warns of the parts that a pipeline does not have, such as Stable Diffusion 3's T5.
    with errors_only('diffusers.pipelines.pipeline_utils'):
        pipeline.save_pretrained(folder)
    make_readable_by_version_4(folder, pipeline)
    return type(pipeline).__name__


def write_file(model: nn.Module, recipe: Recipe, file: Path, precision: torch.dtype, *, lora: bool) -> str:
    """Write a model to a file in the layout that ComfyUI reads, and return what was written; see `write_folder`.

    Raises:
        UserError: There is no such layout for the model, or it cannot represent it.
    """
    assert isinstance(model, LatentDiffusion)
    if lora:
        assert recipe.lora is not None
        save_lora(model.denoiser, recipe.lora, file, precision, single_file=True)
        return LORA
    content = model.family.single_file(model)
    side = model.latent_size * downsampling(model.vae)
    content.save(file, dtype=precision, title=recipe.name, objective=model.objective, resolution=side)
    return SINGLE_FILE


def _cast(part: Part, dtype: torch.dtype) -> Part:
    """Convert a part of a pipeline to a dtype in place, and return it."""
    # diffusers overrides part.to() with a method that warns about modules that these parts do not have.
    nn.Module.to(part, dtype)
    return part
