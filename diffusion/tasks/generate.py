"""Generate images with a checkpoint or an exported pipeline: `task: generate` and `diffusion generate`."""

import argparse
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
from composer.utils import get_device
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from diffusion.checkpointing.run_folder import find_checkpoint, recipe_of_checkpoint
from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.evaluation.image_sheet import save_image, to_images
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import Purpose, draws_for
from diffusion.models.sampler import scheduler_class
from diffusion.tasks.argument_checks import is_export
from diffusion.tasks.evaluate import trained_model
from diffusion.training import components

log = logging.getLogger(__name__)


def generate(recipe: Recipe) -> list[Path]:
    """Generate images for the prompts of a recipe's `generate` section, and return the files."""
    settings = recipe.generate
    if not settings.prompts:
        raise UserError('generate.prompts: is empty; add at least one prompt')
    components.check_device(recipe)
    model, which = trained_model(recipe, settings.weights)
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'model.name: {recipe.model.name} does not generate images from prompts; use sd2, for example')
    model = get_device(recipe.trainer.get('device')).module_to_device(model)
    prompts = [prompt for prompt in settings.prompts for _ in range(settings.num_images_per_prompt)]
    images = model.generate(
        prompts,
        negative_prompt=settings.negative_prompt,
        seeds=[settings.seed + index for index in range(len(prompts))],
        num_inference_steps=settings.num_inference_steps,
        guidance_scale=settings.guidance_scale,
        guidance_rescale=settings.guidance_rescale,
        noise_scheduler=settings.noise_scheduler,
    )
    files = save_images(images, prompts, Path(settings.out or recipe.run_dir / 'generated'), seed=settings.seed)
    print(f'{len(files)} images with {which} weights in {files[0].parent}')
    return files


def save_images(images: torch.Tensor, prompts: Sequence[str], folder: Path, *, seed: int) -> list[Path]:
    """Write images [B, 3, H, W] as PNGs named by their seed and prompt, and return the files."""
    files = []
    for index, (image, prompt) in enumerate(zip(to_images(images), prompts, strict=True)):
        words = re.sub(r'[^a-z0-9]+', '-', prompt.lower()).strip('-')[:60] or 'empty'
        files.append(folder / f'{seed + index:05d}-{words}.png')
        save_image(image, files[-1])
    return files


def run_generate(args: argparse.Namespace) -> int:
    """Run `diffusion generate` with arguments that `check_generate` has checked; return the exit status."""
    source = Path(args.source)
    if is_export(source):
        files = _from_pipeline(source, args)
        print(f'{len(files)} images in {files[0].parent}')
        return 0
    checkpoint = find_checkpoint(source)
    recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
    recipe.checkpoint = str(checkpoint)
    recipe.trainer.pop('device', None)  # of the machine that trained; this one may have another
    settings = recipe.generate
    settings.prompts, settings.out = list(args.prompts), args.out or 'generated'
    settings.seed, settings.negative_prompt, settings.weights = args.seed, args.negative, args.weights
    settings.num_inference_steps = settings.num_inference_steps if args.steps is None else args.steps
    settings.guidance_scale = settings.guidance_scale if args.guidance is None else args.guidance
    settings.noise_scheduler = args.scheduler or settings.noise_scheduler
    generate(recipe)
    return 0


def _from_pipeline(folder: Path, args: argparse.Namespace) -> list[Path]:
    """Generate images with an exported pipeline; equal seeds start from the same noise as with a checkpoint."""
    diffusers.utils.logging.disable_progress_bar()
    # low_cpu_mem_usage needs accelerate, which is not a dependency; diffusers warns if it is not turned off.
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    pipeline = pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    if args.scheduler is not None:
        config = pipeline.scheduler.config
        flow = bool(config.get('use_flow_sigmas'))
        pipeline.scheduler = scheduler_class(args.scheduler, flow=flow).from_config(config)
    prompts: list[str] = list(args.prompts)
    seeds = range(args.seed, args.seed + len(prompts))
    size = pipeline.unet.config['sample_size']
    noise = draws_for(seeds, seed=0, device=device).normal(
        Purpose.SAMPLING, (pipeline.unet.config['in_channels'], size, size)
    )
    # None instead of an empty prompt: Stable Diffusion XL then uses zeros, if dropped captions were zeros in training.
    negative = [args.negative] * len(prompts) if args.negative else None
    # Schedulers that draw noise in every step use one generator per image, so that an image does not depend on its
    # batch.
    images = pipeline(
        prompts,
        negative_prompt=negative,
        num_inference_steps=50 if args.steps is None else args.steps,
        guidance_scale=7.5 if args.guidance is None else args.guidance,
        latents=noise,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type='pt',
        return_dict=False,
    )[0]
    assert isinstance(images, torch.Tensor)
    return save_images(images, prompts, Path(args.out or 'generated'), seed=args.seed)
