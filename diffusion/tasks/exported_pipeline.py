"""Generate images with an exported diffusers pipeline, equal to the run's images up to rounding."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers.utils.logging
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor

from diffusion.compatibility.diffusers_versions import without_own_deprecations
from diffusion.config.families import pipeline_of
from diffusion.models.families.adapter import adapter_of
from diffusion.models.randomness import Purpose, draws_for
from diffusion.models.sampler import scheduler_class
from diffusion.tasks.argument_checks import check_pipeline, is_flow_scheduler, lora_file, missing_parts


class ExportedPipeline:
    """Exported diffusers pipeline that generates the same images as a `LatentDiffusion`, up to rounding.

    Args:
        lora: Exported LoRA to add (a file or a folder).

    Raises:
        UserError: The pipeline has classes that `check_pipeline` does not allow.
    """

    def __init__(self, folder: Path, *, lora: Path | None = None) -> None:
        own_code = {'trust_remote_code': True} if pipeline_of(check_pipeline(folder)).module else {}
        diffusers.utils.logging.disable_progress_bar()
        with without_own_deprecations():
            # Turn off low_cpu_mem_usage, which needs accelerate (not a dependency); otherwise diffusers warns.
            self._pipeline: Any = DiffusionPipeline.from_pretrained(
                folder,
                local_files_only=True,
                low_cpu_mem_usage=False,
                use_safetensors=True,  # unpickling a foreign file could run any code
                **dict.fromkeys(missing_parts(folder)),
                **own_code,  # `check_pipeline` compared it with this package's
            )
        if lora is not None:
            file = lora_file(lora)
            self._pipeline.load_lora_weights(file.parent, weight_name=file.name)
        self._device = 'cuda' if torch.cuda.is_available() else 'cpu'
        self._pipeline.to(self._device)
        self._pipeline.set_progress_bar_config(disable=True)

    @property
    def noise_scheduler(self) -> str:
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
        snr_shift: float | None = None,
        noise_scheduler: str,
    ) -> Tensor:
        """Generate one image per prompt, float32 [B, 3, height, width] in [0, 1].

        The arguments are those of `LatentDiffusion.generate`, but an export supports neither `size` nor `snr_shift`,
        and only some pipelines `guidance_rescale`. A seed gives the same initial noise as with a checkpoint.
        """
        pipeline, prompts = self._pipeline, list(prompts)
        rescales = pipeline_of(type(pipeline).__name__).takes_guidance_rescale
        assert size is None and snr_shift is None and (rescales or guidance_rescale == 0)
        if noise_scheduler != self.noise_scheduler:
            pipeline.scheduler = scheduler_like(pipeline.scheduler, noise_scheduler)
        denoiser = pipeline.unet if hasattr(pipeline, 'unet') else pipeline.transformer
        adapter = adapter_of(denoiser)
        # Pass one generator per image to schedulers that draw noise in every step, so that an image does not depend on
        # its batch.
        return adapter.draw(
            pipeline,
            prompts,
            noise=draws_for(seeds, seed=0, device=self._device).normal(Purpose.SAMPLING, adapter.noise_shape(pipeline)),
            generators=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=num_inference_steps,
            **({'guidance_rescale': guidance_rescale} if rescales else {}),
            **adapter.call_arguments(pipeline, negative=negative_prompt, guidance=guidance_scale),
        )


def scheduler_like(scheduler: Any, name: str) -> Any:
    """Return a noise scheduler of the class `name` with the same noise schedule as a pipeline's `scheduler`."""
    config = dict(scheduler.config) | {'_class_name': type(scheduler).__name__}
    if not is_flow_scheduler(config):
        return scheduler_class(name).from_config(scheduler.config)
    # Schedulers that support only flow matching call this setting `shift`; all others call it `flow_shift`.
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
