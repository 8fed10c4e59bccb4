"""Images from an exported pipeline of diffusers, equal to those of the run up to rounding.

Shapes: B images, C channels of the noise, H W its size.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from diffusion.compatibility.diffusers_versions import without_own_deprecations
from diffusion.models.denoisers.mmdit import T5_LENGTH
from diffusion.models.randomness import Purpose, draws_for
from diffusion.models.sampler import scheduler_class
from diffusion.tasks.argument_checks import (
    GenerateOptions,
    check_pipeline,
    is_flow_scheduler,
    lora_file,
    missing_parts,
)


class ExportedPipeline:
    """Exported pipeline of diffusers that generates images as a `LatentDiffusion` does, up to rounding.

    Args:
        lora: Exported LoRA to add, a file or a folder.

    Raises:
        UserError: The folder names classes that are not of diffusers or transformers.
    """

    def __init__(self, folder: Path, *, lora: Path | None = None) -> None:
        check_pipeline(folder)
        diffusers.utils.logging.disable_progress_bar()
        with without_own_deprecations():
            # low_cpu_mem_usage needs accelerate, which is not a dependency; diffusers warns if it is not turned off.
            self._pipeline: Any = DiffusionPipeline.from_pretrained(
                folder,
                local_files_only=True,
                low_cpu_mem_usage=False,
                use_safetensors=True,  # unpickling the file of somebody else could run any code
                **dict.fromkeys(missing_parts(folder)),
            )
        if lora is not None:
            file = lora_file(lora)
            self._pipeline.load_lora_weights(file.parent, weight_name=file.name)
        self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self._pipeline.to(self._device)
        self._pipeline.set_progress_bar_config(disable=True)

    @property
    def noise_scheduler(self) -> str:
        """Class of the noise scheduler that the export names."""
        return type(self._pipeline.scheduler).__name__

    def generate(
        self,
        prompts: Sequence[str],
        *,
        negative_prompt: str = '',
        seeds: Sequence[int],
        size: tuple[int, int] | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        noise_scheduler: str,
    ) -> Tensor:
        """Generate one image per prompt, float32 [B, 3, height, width] in [0, 1].

        Equal seeds start from the same noise as with a checkpoint. The arguments are those of
        `LatentDiffusion.generate`; an export takes neither a size nor a guidance rescale.
        """
        assert size is None and guidance_rescale == 0
        pipeline, prompts = self._pipeline, list(prompts)
        if noise_scheduler != self.noise_scheduler:
            pipeline.scheduler = scheduler_like(pipeline.scheduler, noise_scheduler)
        noise = draws_for(seeds, seed=0, device=self._device).normal(Purpose.SAMPLING, noise_shape(pipeline))
        settings = call_settings(pipeline, negative=negative_prompt, guidance=guidance_scale)
        settings['num_inference_steps'] = num_inference_steps
        is_prx, is_pixels = (type(pipeline).__name__ == name for name in ('PRXPipeline', 'PRXPixelPipeline'))
        if is_pixels:
            # The pipeline scales the noise that it draws itself, but not `latents`.
            noise = noise * pipeline.config.noise_scale
        # Guidance fails in diffusers' pipelines of PRX for more than one prompt.
        step = 1 if is_prx or is_pixels else len(prompts)
        groups = [slice(first, first + step) for first in range(0, len(prompts), step)]
        images = torch.cat([_draw(pipeline, prompts[group], seeds[group], noise[group], settings) for group in groups])
        return (images / 2 + 0.5).clamp(0, 1) if is_pixels else images  # this pipeline returns pixels in [-1, 1]


def draw_with_export(folder: Path, options: GenerateOptions) -> Tensor:
    """Generate one image per prompt with an exported pipeline, float32 [B, 3, height, width] in [0, 1].

    Args:
        options: Options of `diffusion generate`, which `check_generate` has checked.
    """
    pipeline = ExportedPipeline(folder, lora=None if options.lora is None else Path(options.lora))
    return pipeline.generate(
        options.prompts,
        negative_prompt=options.negative,
        seeds=range(options.seed, options.seed + len(options.prompts)),
        num_inference_steps=50 if options.steps is None else options.steps,
        guidance_scale=7.5 if options.guidance is None else options.guidance,
        noise_scheduler=options.scheduler or pipeline.noise_scheduler,
    )


def _draw(pipeline: Any, prompts: list[str], seeds: Sequence[int], noise: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the images of one call of a pipeline."""
    # Schedulers that draw noise in every step use one generator per image, so that an image does not depend on its
    # batch.
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    images = pipeline(prompts, latents=noise, generator=generators, output_type='pt', return_dict=False, **settings)[0]
    assert isinstance(images, Tensor)
    return images.float()


def noise_shape(pipeline: Any) -> tuple[int, int, int]:
    """Return the shape [C, H, W] of the noise for the size of images that the model was trained on."""
    denoiser = pipeline.unet if hasattr(pipeline, 'unet') else pipeline.transformer
    if 'default_sample_size' in pipeline.config:  # PRX, in pixels
        side = pipeline.config.default_sample_size // pipeline.vae_scale_factor
    else:
        side = denoiser.config['sample_size']
    return denoiser.config['in_channels'], side, side


def call_settings(pipeline: Any, *, negative: str, guidance: float) -> dict[str, Any]:
    """Return the arguments that make a pipeline generate images as the model was trained to.

    Args:
        negative: Negative prompt; empty for none.
        guidance: Guidance scale; 1 or less is no guidance.
    """
    kind = type(pipeline).__name__
    if kind.startswith('PRX'):
        # These pipelines refuse a scale below 1, and resize images to the sizes of the published models. Their text
        # cleaning changes prompts (lower case, no punctuation), unlike training.
        settings = {'guidance_scale': max(guidance, 1.0), 'use_resolution_binning': False, 'negative_prompt': negative}
        return settings | ({'skip_text_cleaning': True} if kind == 'PRXPipeline' else {})
    # Pass None for an empty prompt: Stable Diffusion XL then uses zeros, if dropped captions were zeros in training.
    settings = {'guidance_scale': guidance, 'negative_prompt': negative or None}
    if kind == 'StableDiffusion3Pipeline':
        _, height, width = noise_shape(pipeline)
        settings |= {'height': height * pipeline.vae_scale_factor, 'width': width * pipeline.vae_scale_factor}
        if pipeline.tokenizer_3 is not None:
            settings['max_sequence_length'] = pipeline.tokenizer_3.model_max_length
        elif T5_LENGTH in pipeline.tokenizer.init_kwargs:
            settings['max_sequence_length'] = pipeline.tokenizer.init_kwargs[T5_LENGTH]
    return settings


def scheduler_like(scheduler: Any, name: str) -> Any:
    """Return another noise scheduler with the noise schedule of a pipeline's."""
    config = dict(scheduler.config) | {'_class_name': type(scheduler).__name__}
    if not is_flow_scheduler(config):
        return scheduler_class(name).from_config(scheduler.config)
    # Schedulers that sample only flows name these settings differently from those that also sample diffusion.
    shift = config.get('flow_shift', config.get('shift', 1.0))
    flow = {
        'num_train_timesteps': config['num_train_timesteps'],
        'prediction_type': config.get('prediction_type', 'flow_prediction'),
        'use_flow_sigmas': True,
        'flow_shift': shift,
        'shift': shift,
        'steps_offset': 1,
    }
    found = scheduler_class(name, flow=True)
    accepted = inspect.signature(found.__init__).parameters
    return found(**{key: value for key, value in flow.items() if key in accepted})
