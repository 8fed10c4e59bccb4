"""Generate the images of one side of `diffusion compare` with a checkpoint or an exported pipeline."""

from pathlib import Path
from typing import Any

from composer.utils import get_device

from diffusion.checkpointing.checkpoint_lookup import claimed_checkpoint, recipe_of_checkpoint
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.evaluation.generated_images import GeneratedImages, ImageGenerator, Sampling
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.argument_checks import is_export
from diffusion.tasks.compare_arguments import ComparedModel, CompareSettings
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.exported_pipeline import ExportedPipeline
from diffusion.training import components

BATCH_SIZE = 8
"""Number of images generated at once; an interruption loses at most this number of images."""


def generate_images(side: ComparedModel, settings: CompareSettings, folder: Path) -> GeneratedImages:
    """Generate the images of one side that are missing in a folder; raise UserError if the model takes no prompts."""
    given = {'guidance_scale': settings.guidance_scale, 'num_inference_steps': settings.num_inference_steps}
    chosen: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    chosen |= {'seed': settings.seed, 'batch_size': BATCH_SIZE}
    if is_export(side.place):
        pipeline = ExportedPipeline(side.place)
        sampling, label = Sampling(noise_scheduler=pipeline.noise_scheduler, **chosen), f'{side.source}, exported'
        model: ImageGenerator = pipeline
    else:
        with claimed_checkpoint(side.place, 'comparison') as checkpoint:
            recipe = load(recipe_of_checkpoint(checkpoint), task='generate')
            recipe.checkpoint = str(checkpoint)
            recipe.trainer.pop('device', None)  # drop the recipe's device: this machine may have another kind
            components.check_device(recipe)
            trained, which, _ = trained_model(recipe)
        if not isinstance(trained, LatentDiffusion):
            name = recipe.model.name
            raise UserError(f'{side.place}: {name} does not generate images from prompts; use sd2, for example')
        sampling, label = Sampling(**recipe.generate.sampling | chosen), f'{side.source}, {which} weights'
        model = get_device(recipe.trainer.get('device')).module_to_device(trained)
    images = GeneratedImages.below(folder, settings.prompts, sampling, label)
    for _ in images.own_batches(model):  # each iteration writes a batch of the missing images
        pass
    return images
