"""`diffusion export`: convert a checkpoint to a folder that unmodified diffusers loads."""

import argparse
import copy
import logging
import re
from pathlib import Path
from typing import Literal, TypeVar

import torch
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from torch import nn

from diffusion.algorithms.average import trained_parameters
from diffusion.algorithms.snapshots import ReconstructedAverage, find_snapshots, reconstruct_average
from diffusion.checkpointing.checkpoint_weights import Weights
from diffusion.checkpointing.run_folder import recipe_of_checkpoint, run_of_checkpoint
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.autoencoder import Autoencoder
from diffusion.models.latent_diffusion import LatentDiffusion, encoder_precision
from diffusion.models.lora import merge_lora, save_lora
from diffusion.models.pretrained import latent_statistics
from diffusion.models.sampler import inference_scheduler
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
    """Export the model of a checkpoint as a StableDiffusionPipeline, or an autoencoder as an AutoencoderKL.

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
            pipeline = pipeline_of(model)
            for part in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
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


def pipeline_of(model: LatentDiffusion) -> StableDiffusionPipeline:
    """Return the diffusers pipeline that generates the same images as the model.

    Raises:
        UserError: The model has several text encoders, or a VAE whose latent statistics cannot be folded.
    """
    if len(model.text.encoders) != 1:
        raise UserError(f'export: {len(model.text.encoders)} text encoders; a StableDiffusionPipeline has one')
    if model.mask_padding:
        log.warning(
            'export: trained with mask_padding, which the diffusers pipeline does not apply; its images will differ'
        )
    if model.caption_dropout_mode == 'zeros':
        log.warning(
            'export: trained with zeros for dropped captions; the diffusers pipeline uses the empty caption instead'
        )
    # The schedulers that diffusers has for flows alone do not fit into this pipeline.
    scheduler = inference_scheduler('dpm++' if model.objective.is_flow else 'ddim', model.objective)
    return StableDiffusionPipeline(
        vae=with_folded_statistics(model.vae),
        text_encoder=model.text.encoders[0],  # type: ignore[arg-type]
        tokenizer=model.text.tokenizers[0],  # type: ignore[arg-type]
        unet=model.denoiser,
        scheduler=scheduler,
        safety_checker=None,  # type: ignore[arg-type]
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )


@torch.no_grad()
def with_folded_statistics(vae: AutoencoderKL) -> AutoencoderKL:
    """Return a copy of a VAE with its per-channel latent means and standard deviations folded into its weights.

    diffusers' Stable Diffusion pipeline applies `scaling_factor` only. The 1x1 convolutions next to the latents can
    apply the rest: with normalized latents z = (m - mean) / std, `quant_conv` outputs the moments of z, and
    `post_quant_conv` maps z back to m. A VAE without latent statistics is copied unchanged.
    """
    config = vae.config
    vae = copy.deepcopy(vae).float()
    if not config.get('latents_mean') and not config.get('latents_std') and not config.get('shift_factor'):
        return vae
    if vae.quant_conv is None or vae.post_quant_conv is None:
        raise UserError(
            'export: this VAE has latent statistics per channel but no quant_conv and post_quant_conv to fold them '
            'into; the diffusers pipeline cannot represent it'
        )
    mean, std = latent_statistics(vae)
    into, back = vae.quant_conv, vae.post_quant_conv
    assert into.bias is not None and back.bias is not None
    # W (z * std + mean) + b = (W * std) z + (b + W mean); the bias must use W before it is scaled.
    back.bias += back.weight[:, :, 0, 0] @ mean
    back.weight *= std[None, :, None, None]
    # The first half of the output channels are means, the second half log-variances, which shift by -2 log(std).
    channels = len(std)
    into.bias[:channels] -= mean
    into.bias[:channels] /= std
    into.bias[channels:] -= 2 * std.log()
    into.weight[:channels] /= std[:, None, None, None]
    vae.register_to_config(latents_mean=None, latents_std=None, shift_factor=None, scaling_factor=1.0)
    return vae


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
    kind = 'StableDiffusionPipeline' if (Path(args.out) / 'model_index.json').exists() else 'AutoencoderKL'
    print(f"{args.out}: {which} weights; load with {kind}.from_pretrained('{args.out}')")
    return 0
