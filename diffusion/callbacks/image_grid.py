"""Callback that samples images for fixed prompts and seeds during training."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import Callback, Event, State
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist

from diffusion.algorithms.average import unwrapped
from diffusion.algorithms.ema import averaged_weights
from diffusion.config.language_model import RewriteConfig
from diffusion.data.image_sheet import Figure, Section, draw_sheet, save_image, to_images
from diffusion.errors import UserError
from diffusion.evaluation.rewriting import GivenPrompts, Rewriter
from diffusion.loggers import status_line

log = logging.getLogger(__name__)

SIDE = 256
"""Side length in pixels of each image on the sheet."""


class ImageGrid(Callback):
    """Callback that samples the same prompts from the same noise at intervals, with averaged weights if available.

    The image sheet is saved as `folder/images/ba000500.png` and sent to every logger that supports images, as
    `images/samples`.

    Args:
        prompts: Texts to generate images for, one image each.
        every: Interval as a Composer time string; images are also sampled at the end of training.
        negative_prompt: Negative prompt for guidance.
        guidance_scale: Guidance scale; 1 turns guidance off.
        guidance_rescale: Rescaling of the guided prediction (Lin et al. 2024), in [0, 1]; 0 turns it off.
        guidance: Name and settings of the guidance, such as {name: apg}; null means classifier-free guidance.
        snr_shift: Shift of a flow's sampling times toward noise; None uses the value of the model's objective.
        num_inference_steps: Number of sampling steps.
        noise_scheduler: Name of the sampler, one of `diffusion.config.sampling_checks.SCHEDULERS`.
        size: Height and width in pixels; None uses the model's default.
        seed: Seed of the first prompt; each additional prompt adds 1.
        batch_size: Number of images to sample per batch.
        rewrite: Language model that rewrites the prompts; the sheet shows the original ones. None rewrites none.
        columns: Number of images per row of the sheet.
        folder: The run's folder.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        *,
        every: str = '1000ba',
        negative_prompt: str = '',
        guidance_scale: float = 7.5,
        guidance_rescale: float = 0.0,
        guidance: Mapping[str, Any] | None = None,
        snr_shift: float | None = None,
        num_inference_steps: int = 50,
        noise_scheduler: str = 'ddim',
        size: list[int] | None = None,
        seed: int = 0,
        batch_size: int = 16,
        rewrite: RewriteConfig | None = None,
        columns: int = 8,
        folder: str = 'runs',
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise UserError(f'callbacks.image_grid.prompts: {prompts!r} is not a list of at least one prompt; add one')
        if size is not None and len(size) != 2:
            raise UserError(f'callbacks.image_grid.size: {size} is not a pair; use height and width in pixels')
        self.prompts = list(prompts)
        self.rewriter = None if rewrite is None else Rewriter(rewrite)
        self.given = GivenPrompts(self.prompts, self.prompts)
        final_events = {Event.BATCH_END, Event.EPOCH_END}
        self.is_due = create_interval_scheduler(every, checkpoint_events=False, final_events=final_events)
        self.sampling: dict[str, Any] = {
            'negative_prompt': negative_prompt,
            'guidance_scale': guidance_scale,
            'guidance_rescale': guidance_rescale,
            'guidance': guidance,
            'snr_shift': snr_shift,
            'num_inference_steps': num_inference_steps,
            'noise_scheduler': noise_scheduler,
            'size': tuple(size) if size is not None else None,
        }
        self.seed = seed
        self.batch_size = batch_size
        self.columns = columns
        self.folder = Path(folder)
        self._last_batch = -1

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START and self.rewriter is not None:
            self.given = self.rewriter(self.prompts)
        is_end = event in (Event.BATCH_END, Event.EPOCH_END)
        batch = state.timestamp.batch.value
        if is_end and self.is_due(state, event) and batch != self._last_batch:
            self._last_batch = batch
            self._sample(state, logger)

    def _sample(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        model = unwrapped(state.model)
        images = []
        status_line.show(f'batch {batch}, sampling {len(self.prompts)} images')
        # Every rank samples: each rank has only a shard of the weights under FSDP, so forward passes are collectives.
        with averaged_weights(state) as averaged, get_precision_context(state.precision):
            for start in range(0, len(self.prompts), self.batch_size):
                prompts = self.given.texts[start : start + self.batch_size]
                seeds = range(self.seed + start, self.seed + start + len(prompts))
                images += to_images(model.generate(prompts, seeds=seeds, **self.sampling))  # type: ignore[operator]
        if dist.get_global_rank() != 0:
            return
        figures = [Figure([image], prompt) for prompt, image in zip(self.prompts, images, strict=True)]
        sheet = draw_sheet([Section('', figures)], columns=self.columns, side=SIDE)
        path = self.folder / 'images' / f'ba{batch:06d}.png'
        save_image(sheet, path, **self.given.record())
        log.info('%s: %d images with %s weights', path, len(images), 'averaged' if averaged else 'training')
        logger.log_images(np.asarray(sheet), name='images/samples', channels_last=True, step=batch)
