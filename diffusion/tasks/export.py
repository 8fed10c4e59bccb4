"""`diffusion export`: convert a checkpoint to a folder that unmodified diffusers loads, or to a single file."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
from huggingface_hub import constants
from torch import nn

from diffusion.algorithms.average import trained_parameters
from diffusion.algorithms.post_hoc_ema import ReconstructedAverage, find_snapshots, reconstruct_average
from diffusion.checkpointing.checkpoint_lookup import claimed_checkpoint, recipe_of_checkpoint, run_of_checkpoint
from diffusion.checkpointing.checkpoint_weights import Weights
from diffusion.compatibility.transformers_versions import make_readable_by_version_4
from diffusion.config.families import pipeline_of
from diffusion.config.load import Recipe, load
from diffusion.config.signatures import source_file
from diffusion.errors import UserError
from diffusion.models.autoencoder import Autoencoder
from diffusion.models.frozen_parts import encoder_precision
from diffusion.models.hub_files import errors_only
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.lora import merge_lora, save_lora
from diffusion.models.vae import downsampling
from diffusion.storage.atomic import atomic_file, atomic_folder
from diffusion.tasks.argument_checks import (
    LORA_WEIGHTS,
    MODEL_INDEX,
    ExportOptions,
    check_export,
    check_pipeline,
    is_export,
    is_single_file,
    missing_parts,
)
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.hub_upload import check_access, upload
from diffusion.tasks.model_card import AUTOENCODER, CARD, LORA, SINGLE_FILE, loading, model_card

Part = TypeVar('Part', bound=nn.Module)


def export(
    place: str | Path,
    out: str | Path,
    *,
    weights: Weights | None = None,
    ema_width: float | None = None,
    at: int | None = None,
    layout: str | None = None,
    dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32',
    merge: bool = False,
    push: str | None = None,
    public: bool = False,
) -> str:
    """Export a checkpoint's model as the pipeline of its family, or as an AutoencoderKL if it is an autoencoder.

    If the run trained a LoRA, only the LoRA is exported, as `pytorch_lora_weights.safetensors`, unless `merge` is True.
    If `out` ends with `.safetensors`, the export is a single file in the layout that ComfyUI reads; see
    `models.single_file`. A U-Net's LoRA then has ComfyUI's tensor names; in a folder, it has those of diffusers.

    A folder includes a model card, README.md.

    Args:
        place: A checkpoint or a run's folder; see `find_checkpoint`.
        out: The output folder, which must be new or empty, or a new file. The output is written atomically.
        weights: Averaged or training weights; None exports averaged weights if the checkpoint has them.
        ema_width: Width of a post-hoc EMA to export instead, which is reconstructed from the run's `post_hoc_ema`
            snapshots. Untrained parts come from the checkpoint.
        at: Batch of the post-hoc EMA; None means the last snapshot at or before the checkpoint.
        layout: If `out` ends with `.pt`, layout of the file for the original code of the model's family: `i1`.
        dtype: Precision of the exported weights.
        merge: Merge the run's LoRA into the denoiser's weights, and export the pipeline.
        push: Repository on the Hugging Face Hub, `org/name`, to which the export and a model card are uploaded.
        public: Make a new repository public instead of private.

    Returns:
        Description of the exported weights, such as `ema`.

    Raises:
        UserError: `out` is not empty, the checkpoint or a snapshot cannot be read, settings contradict each other, the
            format cannot represent the model, or the Hub refuses the upload.
        ExternalError: The Hub did not respond: before the export, so that nothing was written, or during the upload,
            so that the export is complete and can be uploaded later.
    """
    options = ExportOptions(str(place), str(out), weights, ema_width, at, layout, dtype, merge, push, public)
    checkpoint = check_export(options)
    out = Path(out)
    if push is not None:
        check_access(push, public=public)
    with claimed_checkpoint(checkpoint, 'export'):
        precision = encoder_precision(dtype)
        recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
        recipe.checkpoint = str(checkpoint)
        average = None if ema_width is None else average_of(checkpoint, ema_width, at=at)
        # Load the training weights, which every checkpoint has: the average replaces all trained parameters below.
        model, which, _ = trained_model(recipe, weights if average is None else 'training')
        if average is not None:
            load_average(model, average)
            which = f'post-hoc EMA {average.width:g} (batch {average.batch})'
        if merge:
            assert isinstance(model, LatentDiffusion)
            merge_lora(model.denoiser)
        denoiser = getattr(model, 'denoiser', None)
        parameters = None if denoiser is None else sum(parameter.numel() for parameter in denoiser.parameters())
        single, shift = is_single_file(out), recipe.generate.snr_shift
        if isinstance(model, LatentDiffusion) and shift is not None and not single:
            # The pipeline's noise scheduler gets the shift of `task: generate`.
            model.objective = replace(model.objective, snr_shift=shift)
        write = write_file if single else write_folder
        with (atomic_file if single else atomic_folder)(out) as unfinished:
            written = write(model, recipe, unfinished, precision, lora=recipe.lora is not None and not merge)
            card = model_card(
                recipe,
                checkpoint,
                weights=which,
                source=push or out.name,
                written=written,
                file=out.name if single else LORA_WEIGHTS,
                num_parameters=parameters,
            )
            if not single:
                (unfinished / CARD).write_text(card, encoding='utf-8')
    if push is not None:
        upload(out, push, card, public=public)
    return which


def average_of(checkpoint: Path, width: float, *, at: int | None = None) -> ReconstructedAverage:
    """Reconstruct a post-hoc EMA of this width at batch `at` (default: the last snapshot up to the checkpoint).

    Raises:
        UserError: The checkpoint is older than the first snapshot.
    """
    run = run_of_checkpoint(checkpoint)
    named = re.match(r'ba(\d+)', checkpoint.resolve().name)  # Checkpointer: ba40000/; Composer: ba40000-rank0.pt
    if at is None and named:
        batches = [snapshot.batch for snapshot in find_snapshots(run)]
        before = [batch for batch in batches if batch <= int(named[1])]
        if not before:
            raise UserError(f'--ema-width: {checkpoint} is before the first snapshot; give --at {batches[0]} or later')
        at = before[-1]
    return reconstruct_average(run, width, at=at)


@torch.no_grad()
def load_average(model: nn.Module, average: ReconstructedAverage) -> None:
    parameters = trained_parameters(model)
    if {name: weight.shape for name, weight in parameters.items()} != average.shapes:
        what = 'the snapshots have an architecture other than the recipe; are they from this run?'
        raise UserError(f'--ema-width: {what}')
    for name, weight in parameters.items():
        weight.copy_(average.tensors[name])


def run_export(options: ExportOptions) -> None:
    """Run `diffusion export` with options that `check_export` has checked."""
    out, push = options.out, options.push
    which = export(**vars(options))
    if push is not None:
        print(f'{push}: uploaded to {constants.ENDPOINT}/{push}')
    if is_single_file(out):
        print(f'{out}: {which} weights in the layout that {options.layout or "ComfyUI"} reads')
        return
    if (Path(out) / LORA_WEIGHTS).exists():
        # Include weight_name, which diffusers requires if HF_HUB_OFFLINE is set.
        load_with = f"pipeline.load_lora_weights('{out}', weight_name='{LORA_WEIGHTS}')"
        print(f'{out}: {which} weights of the LoRA; load with {load_with}')
        return
    kind = check_pipeline(Path(out)) if is_export(Path(out)) else 'AutoencoderKL'
    optional = [part for parts in pipeline_of(kind).optional_parts.values() for part in parts]
    missing = [part for part in missing_parts(Path(out)) if part in optional]
    print(f'{out}: {which} weights; load with {loading(kind, str(out), missing)}')


def write_folder(model: nn.Module, recipe: Recipe, folder: Path, precision: torch.dtype, *, lora: bool) -> str:
    """Write a model or, if `lora`, only its LoRA to a folder; return the kind of export: a class name or `LoRA`.

    Raises:
        UserError: The pipeline of the model's family cannot represent the model.
    """
    if isinstance(model, Autoencoder):
        _cast(model.finished(), precision).save_pretrained(folder)
        return AUTOENCODER
    assert isinstance(model, LatentDiffusion)
    if lora:
        assert recipe.lora is not None
        save_lora(model.denoiser, recipe.lora, folder / LORA_WEIGHTS, precision)
        return LORA
    _check_fusion(model)
    pipeline = model.adapter.pipeline(model)
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            _cast(part, precision)
    # Hide diffusers' warnings about missing parts, such as Stable Diffusion 3's T5.
    with errors_only('diffusers.pipelines.pipeline_utils'):
        pipeline.save_pretrained(folder)
    make_readable_by_version_4(folder, pipeline)
    kind = pipeline_of(type(pipeline).__name__)
    if kind.module:
        _add_code(folder, {'': kind.module, **kind.part_modules})
    return type(pipeline).__name__


def _add_code(folder: Path, modules: Mapping[str, str]) -> None:
    """Copy this package's source files of classes to an export; diffusers loads them with `trust_remote_code`.

    `modules`: Name of the module with the class of each pipeline component; '' is the pipeline itself.
    """
    index = folder / MODEL_INDEX
    content = json.loads(index.read_text(encoding='utf-8'))
    for part, module in modules.items():
        code, key = source_file(module), part or '_class_name'
        shutil.copyfile(code, folder / part / code.name)
        content[key] = [code.stem, content[key][-1] if part else content[key]]
    index.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


def _check_fusion(model: LatentDiffusion) -> None:
    if model.sprint is not None:
        raise UserError(
            f'export: trained with model.sprint, whose fusion layer no {type(model.denoiser).__name__} of diffusers '
            'has; draw with task=generate'
        )


def write_file(model: nn.Module, recipe: Recipe, file: Path, precision: torch.dtype, *, lora: bool) -> str:
    """Write a model or its LoRA to a file for ComfyUI or, with i1, for i1's own code; return the kind of export.

    Raises:
        UserError: The model's family has no such layout, or the layout cannot represent the model.
    """
    assert isinstance(model, LatentDiffusion)
    if lora:
        assert recipe.lora is not None
        save_lora(model.denoiser, recipe.lora, file, precision, single_file=True)
        return LORA
    _check_fusion(model)
    content = model.adapter.single_file(model)
    side = model.latent_size * downsampling(model.vae)
    content.save(file, dtype=precision, title=recipe.name, objective=model.objective, resolution=side)
    return SINGLE_FILE


def _cast(part: Part, dtype: torch.dtype) -> Part:
    # Do not call part.to(), which diffusers overrides: it would warn about modules that these parts do not have.
    nn.Module.to(part, dtype)
    return part
