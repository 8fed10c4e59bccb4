"""`diffusion export`: a checkpoint to a folder that stock diffusers loads."""

import argparse
import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Literal, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import nn

from diffusion.checkpointing.runs import Weights, find_checkpoint, recipe_beside
from diffusion.config import load
from diffusion.evaluate import trained_model
from diffusion.models.autoencoder import Autoencoder
from diffusion.models.latent_diffusion import LatentDiffusion, encoder_precision
from diffusion.models.parts import latent_statistics
from diffusion.models.sampler import inference_scheduler

log = logging.getLogger(__name__)

Part = TypeVar('Part', bound=nn.Module)


def export(
    place: str | Path,
    out: str | Path,
    *,
    weights: Weights | None = None,
    dtype: Literal['float32', 'float16', 'bfloat16'] = 'float32',
) -> Weights:
    """Write the model of a checkpoint as a StableDiffusionPipeline (an autoencoder's as an AutoencoderKL).

    Args:
        place: A checkpoint or a run's folder; see `find_checkpoint`.
        out: A folder that does not exist, or is empty. It appears whole or not at all.
        weights: Averaged or training weights; by default averaged ones where there are any.
        dtype: Precision of the files.

    Returns:
        Which weights were written.

    Raises:
        ValueError: `out` holds something, or the checkpoint can't be read.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f'--out: {out} is not empty; remove it or give another folder')
    precision = encoder_precision(dtype)
    checkpoint = find_checkpoint(place)
    recipe = load(recipe_beside(checkpoint))
    recipe.checkpoint = str(checkpoint)
    model, which = trained_model(recipe, weights)
    unfinished = out.with_name(f'.{out.name}.unfinished-{os.getpid()}')
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        if isinstance(model, Autoencoder):
            _cast(model.finished(), precision).save_pretrained(unfinished)
        else:
            assert isinstance(model, LatentDiffusion)
            pipeline = pipeline_of(model)
            for part in (pipeline.vae, pipeline.text_encoder, pipeline.unet):
                _cast(part, precision)
            pipeline.save_pretrained(unfinished)
        if out.exists():
            out.rmdir()
        os.replace(unfinished, out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return which


def pipeline_of(model: LatentDiffusion) -> StableDiffusionPipeline:
    """The stock pipeline that draws what the model draws."""
    if len(model.text.encoders) != 1:
        raise ValueError(f'export: {len(model.text.encoders)} text encoders; a StableDiffusionPipeline has one')
    if model.mask_padding:
        log.warning('export: trained with mask_padding, which the stock pipeline does not do; its pictures will differ')
    if model.caption_dropout_mode == 'zeros':
        log.warning(
            'export: trained with zeros for dropped captions; the stock pipeline uses the empty caption instead'
        )
    scheduler = inference_scheduler('ddim', model.objective)
    assert isinstance(scheduler, DDIMScheduler)
    return StableDiffusionPipeline(
        vae=with_folded_statistics(model.vae),
        text_encoder=model.text.encoders[0],  # type: ignore[arg-type]
        tokenizer=model.text.tokenizers[0],  # type: ignore[arg-type]
        unet=model.denoiser,
        scheduler=scheduler,  # type: ignore[arg-type]
        safety_checker=None,  # type: ignore[arg-type]
        feature_extractor=None,  # type: ignore[arg-type]
        requires_safety_checker=False,
    )


@torch.no_grad()
def with_folded_statistics(vae: AutoencoderKL) -> AutoencoderKL:
    """A copy of a VAE whose means and standard deviations a channel are part of its weights.

    Stock pipelines know `scaling_factor` alone. The 1x1 convolutions next to the latents take the rest: with latents
    z = (m - mean) / std, `quant_conv` gives z's moments and `post_quant_conv` undoes it. A VAE that says nothing of
    means and standard deviations is copied as it is.
    """
    config = vae.config
    vae = copy.deepcopy(vae).float()
    if not config.get('latents_mean') and not config.get('latents_std') and not config.get('shift_factor'):
        return vae
    if vae.quant_conv is None or vae.post_quant_conv is None:
        raise ValueError(
            'export: this VAE has latent statistics a channel but no quant_conv and post_quant_conv to fold them into; '
            'the stock pipeline cannot represent it'
        )
    mean, std = latent_statistics(vae)
    into, back = vae.quant_conv, vae.post_quant_conv
    assert into.bias is not None and back.bias is not None
    back.bias += back.weight[:, :, 0, 0] @ mean
    back.weight *= std[None, :, None, None]
    channels = len(std)
    into.bias[:channels] -= mean
    into.bias[:channels] /= std
    into.bias[channels:] -= 2 * std.log()
    into.weight[:channels] /= std[:, None, None, None]
    vae.register_to_config(latents_mean=None, latents_std=None, shift_factor=None, scaling_factor=1.0)
    return vae


def _cast(part: Part, dtype: torch.dtype) -> Part:
    """The part in a precision; diffusers' own `to` warns about modules that these parts do not have."""
    nn.Module.to(part, dtype)
    return part


def main_from_args(args: argparse.Namespace) -> int:
    """`diffusion export`."""
    which = export(args.checkpoint, args.out, weights=args.weights, dtype=args.dtype)
    kind = 'StableDiffusionPipeline' if (Path(args.out) / 'model_index.json').exists() else 'AutoencoderKL'
    print(f"{args.out}: {which} weights; {kind}.from_pretrained('{args.out}') loads it")
    return 0
