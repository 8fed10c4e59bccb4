"""Generate the images of one side of `diffusion compare` with a checkpoint or an exported pipeline."""

from collections.abc import Sequence
from pathlib import Path

from composer.utils import get_device

from diffusion.checkpointing.checkpoint_lookup import claimed_checkpoint, recipe_of_checkpoint
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.evaluation.generated_images import GeneratedImages, ImageGenerator, Sampling
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.exported_pipeline import ExportedPipeline
from diffusion.training import components


def generate_images(
    place: Path,
    prompts: Sequence[str],
    folder: Path,
    *,
    source: str,
    guidance_scale: float | None,
    num_inference_steps: int | None,
    seed: int,
    batch_size: int,
    exported: bool,
) -> GeneratedImages:
    """Generate those images of a prompt set that are not yet in a folder.

    Args:
        place: Checkpoint or exported pipeline.
        source: Name of the model for the images and the key; the kind of weights is appended.
        guidance_scale: Guidance scale; None means the recipe's, or 7.5 for an export.
        num_inference_steps: Number of sampling steps; None means the recipe's, or 50 for an export.
        exported: True if `place` is an exported pipeline.

    Raises:
        UserError: The model cannot generate images from prompts.
    """
    if exported:
        pipeline = ExportedPipeline(place)
        sampling = Sampling(
            guidance_scale=7.5 if guidance_scale is None else guidance_scale,
            num_inference_steps=50 if num_inference_steps is None else num_inference_steps,
            noise_scheduler=pipeline.noise_scheduler,
            seed=seed,
            batch_size=batch_size,
        )
        return _complete(GeneratedImages.below(folder, prompts, sampling, f'{source}, exported'), pipeline)
    with claimed_checkpoint(place, 'comparison') as checkpoint:
        recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
        recipe.checkpoint = str(checkpoint)
        recipe.trainer.pop('device', None)  # this machine may have another kind of device
        components.check_device(recipe)
        model, which, _ = trained_model(recipe)
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'{place}: {recipe.model.name} does not generate images from prompts; use sd2, for example')
    settings = recipe.generate
    sampling = Sampling(
        guidance_scale=settings.guidance_scale if guidance_scale is None else guidance_scale,
        num_inference_steps=settings.num_inference_steps if num_inference_steps is None else num_inference_steps,
        noise_scheduler=settings.noise_scheduler,
        negative_prompt=settings.negative_prompt,
        guidance_rescale=settings.guidance_rescale,
        seed=seed,
        batch_size=batch_size,
    )
    model = get_device(recipe.trainer.get('device')).module_to_device(model)
    return _complete(GeneratedImages.below(folder, prompts, sampling, f'{source}, {which} weights'), model)


def _complete(images: GeneratedImages, model: ImageGenerator) -> GeneratedImages:
    """Generate the missing images."""
    for _ in images.own_batches(model):
        pass
    return images
