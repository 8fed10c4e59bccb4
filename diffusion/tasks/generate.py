"""Generate images with a checkpoint or an exported pipeline: `task: generate` and `diffusion generate`."""

import logging
import re
import time
from pathlib import Path

import torch
from composer.utils import dist, get_device

from diffusion.checkpointing.checkpoint_lookup import claimed_checkpoint, recipe_of_checkpoint
from diffusion.checkpointing.run_mirror import RunMirror, try_to_push
from diffusion.config.load import Recipe, load
from diffusion.data.image_sheet import save_image, to_images
from diffusion.errors import UserError
from diffusion.evaluation.rewriting import GivenPrompts, Rewriter
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.argument_checks import GenerateOptions, is_export
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.exported_pipeline import ExportedPipeline
from diffusion.training import components

log = logging.getLogger(__name__)


def generate(recipe: Recipe) -> list[Path]:
    """Generate images for the prompts in a recipe's `generate` section, and return the files."""
    settings = recipe.generate
    if not settings.prompts:
        raise UserError('generate.prompts: is empty; add at least one prompt')
    components.check_device(recipe)
    began = time.time()
    prompts = [prompt for prompt in settings.prompts for _ in range(settings.num_images_per_prompt)]
    given = GivenPrompts(prompts, prompts)
    if settings.rewrite is not None:
        dist.initialize_dist(get_device(recipe.trainer.get('device')))
        given = Rewriter(settings.rewrite)(prompts)
    model, which, _ = trained_model(recipe, settings.weights)
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'model.name: {recipe.model.name} does not generate images from prompts; use sd2, for example')
    model = get_device(recipe.trainer.get('device')).module_to_device(model)
    seeds = [settings.seed + index for index in range(len(prompts))]
    images = model.generate(given.texts, seeds=seeds, **settings.sampling)
    files = save_images(images, given, Path(settings.out or recipe.run_dir / 'generated'), seed=settings.seed)
    print(f'{len(files)} image{"s" * (len(files) > 1)} with {which} weights in {files[0].parent}{given.note}')
    if recipe.run_url is not None and not settings.out:
        try_to_push(RunMirror(recipe.run_dir, recipe.run_url), since=began)
    return files


def save_images(images: torch.Tensor, given: GivenPrompts, folder: Path, *, seed: int) -> list[Path]:
    """Write images [B, 3, H, W] as PNG files named by seed and prompt; image i has the seed `seed` + i."""
    files = []
    for index, (image, prompt) in enumerate(zip(to_images(images), given.prompts, strict=True)):
        words = re.sub(r'[^a-z0-9]+', '-', prompt.lower()).strip('-')[:60] or 'empty'
        files.append(folder / f'{seed + index:05d}-{words}.png')
        save_image(image, files[-1], **given.record(index))
    return files


def run_generate(options: GenerateOptions) -> None:
    """Run `diffusion generate` with options already checked by `check_generate`."""
    source = Path(options.source)
    if is_export(source):
        pipeline = ExportedPipeline(source, lora=None if options.lora is None else Path(options.lora))
        images = pipeline.generate(
            options.prompts,
            negative_prompt=options.negative,
            seeds=range(options.seed, options.seed + len(options.prompts)),
            num_inference_steps=50 if options.steps is None else options.steps,
            guidance_scale=7.5 if options.guidance is None else options.guidance,
            guidance_rescale=options.rescale or 0.0,
            noise_scheduler=options.scheduler or pipeline.noise_scheduler,
        )
        given = GivenPrompts(options.prompts, options.prompts)
        files = save_images(images, given, Path(options.out), seed=options.seed)
        print(f'{len(files)} images in {files[0].parent}')
        return
    with claimed_checkpoint(source, 'generate') as checkpoint:
        recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
        recipe.checkpoint = str(checkpoint)
        recipe.trainer.pop('device', None)  # drop the recipe's device: this machine may have another kind
        settings = recipe.generate
        settings.prompts, settings.out = list(options.prompts), options.out
        settings.seed, settings.negative_prompt, settings.weights = options.seed, options.negative, options.weights
        for key, value in options.sampling.items():
            setattr(settings, key, value)
        generate(recipe)
