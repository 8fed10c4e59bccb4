"""`diffusion export`: convert a checkpoint to a folder that unmodified diffusers loads."""

import argparse
import json
import logging
import re
from pathlib import Path
from typing import Literal, TypeVar

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from torch import nn

from diffusion.algorithms.average import trained_parameters
from diffusion.algorithms.snapshots import ReconstructedAverage, find_snapshots, reconstruct_average
from diffusion.checkpointing.checkpoint_weights import Weights
from diffusion.checkpointing.run_folder import recipe_of_checkpoint, run_of_checkpoint
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.autoencoder import Autoencoder
from diffusion.models.frozen_parts import encoder_precision
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.lora import merge_lora, save_lora
from diffusion.storage.atomic import atomic_folder
from diffusion.tasks.argument_checks import check_export
from diffusion.tasks.evaluate import trained_model

log = logging.getLogger(__name__)

Part = TypeVar('Part', bound=nn.Module)


def export(
    place: str | Path,
    out: str | Path,
    *,
    weights: Weights | None = None,
    ema_width: float | None = None,
    at: int | None = None,
    dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32',
    merge: bool = False,
) -> str:
    """Export the model of a checkpoint as the pipeline of its family, or an autoencoder as an AutoencoderKL.

    Of a run with a LoRA, the LoRA alone is exported, as `pytorch_lora_weights.safetensors`, unless `merge` is True.

    Args:
        place: A checkpoint or a run's folder; see `find_checkpoint`.
        out: The output folder, which must not exist or be empty. It appears complete or not at all.
        weights: Averaged or training weights; None exports averaged weights if the checkpoint has them.
        ema_width: Width of a post-hoc EMA to export instead, reconstructed from the run's `post_hoc_ema` snapshots; the
            checkpoint supplies the parts that are not trained.
        at: Batch of the post-hoc EMA; None is the batch of the last snapshot at or before the checkpoint.
        dtype: Precision of the exported weights.
        merge: Add the LoRA of the run to the denoiser's weights, and export the pipeline.

    Returns:
        Description of the weights that were exported, such as `ema`.

    Raises:
        UserError: `out` is not empty, the checkpoint or a snapshot cannot be read, or settings contradict each other.
    """
    out = Path(out)
    checkpoint = check_export(place, out, weights=weights, ema_width=ema_width, at=at, merge=merge)
    precision = encoder_precision(dtype)
    recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
    recipe.checkpoint = str(checkpoint)
    average = None if ema_width is None else average_of(checkpoint, ema_width, at=at)
    # An average replaces all trained parameters below, so load the weights that every checkpoint has.
    model, which = trained_model(recipe, weights if average is None else 'training')
    if average is not None:
        load_average(model, average)
        which = f'post-hoc EMA {average.width:g} (batch {average.batch})'
    if merge:
        assert isinstance(model, LatentDiffusion)
        merge_lora(model.denoiser)
    with atomic_folder(out) as unfinished:
        if isinstance(model, Autoencoder):
            _cast(model.finished(), precision).save_pretrained(unfinished)
        elif recipe.lora is not None and not merge:
            assert isinstance(model, LatentDiffusion)
            save_lora(model.denoiser, recipe.lora, str(unfinished), precision)
        else:
            assert isinstance(model, LatentDiffusion)
            pipeline = model.family.pipeline(model)
            for part in pipeline.components.values():
                if isinstance(part, nn.Module):
                    _cast(part, precision)
            pipeline.save_pretrained(unfinished)
    return which


def average_of(checkpoint: Path, width: float, *, at: int | None = None) -> ReconstructedAverage:
    """Reconstruct the average of any width from the snapshots of a checkpoint's run.

    Args:
        checkpoint: A checkpoint of the run.
        width: Width of the average; see `reconstruct_average`.
        at: Batch of the average; None is the batch of the last snapshot at or before the checkpoint.

    Raises:
        UserError: The checkpoint is older than the first snapshot.
    """
    run = run_of_checkpoint(checkpoint)
    named = re.match(r'ba(\d+)', checkpoint.resolve().name)  # ba40000/ of Checkpointer, ba40000-rank0.pt of Composer
    if at is None and named:
        batches = [snapshot.batch for snapshot in find_snapshots(run)]
        before = [batch for batch in batches if batch <= int(named[1])]
        if not before:
            raise UserError(f'--ema-width: {checkpoint} is before the first snapshot; give --at {batches[0]} or later')
        at = before[-1]
    return reconstruct_average(run, width, at=at)


@torch.no_grad()
def load_average(model: nn.Module, average: ReconstructedAverage) -> None:
    """Copy the values of an average into a model's trained parameters."""
    parameters = trained_parameters(model)
    if {name: weight.shape for name, weight in parameters.items()} != average.shapes:
        raise UserError('--ema-width: the snapshots have another architecture than the recipe; are they from this run?')
    for name, weight in parameters.items():
        weight.copy_(average.tensors[name])


def _cast(part: Part, dtype: torch.dtype) -> Part:
    """Convert a part of a pipeline to a dtype in place, and return it."""
    # Not part.to(): diffusers overrides it with a method that warns about modules that these parts do not have.
    nn.Module.to(part, dtype)
    return part


def run_export(args: argparse.Namespace) -> int:
    """Run `diffusion export`; return the exit status."""
    which = export(
        args.checkpoint,
        args.out,
        weights=args.weights,
        ema_width=args.ema_width,
        at=args.at,
        dtype=args.dtype,
        merge=args.merge,
    )
    if (Path(args.out) / LORA_WEIGHT_NAME_SAFE).exists():
        # diffusers requires the name if HF_HUB_OFFLINE is set.
        load_with = f"pipeline.load_lora_weights('{args.out}', weight_name='{LORA_WEIGHT_NAME_SAFE}')"
        print(f'{args.out}: {which} weights of the LoRA; load with {load_with}')
        return 0
    index = Path(args.out) / 'model_index.json'
    kind = json.loads(index.read_text(encoding='utf-8'))['_class_name'] if index.exists() else 'AutoencoderKL'
    print(f"{args.out}: {which} weights; load with {kind}.from_pretrained('{args.out}')")
    return 0
