"""Evaluator `retrieval`: fraction of generated images whose nearest real image has the same caption.

The nearest image has the smallest pixel difference. Use this to measure how well a model has learned a small dataset.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffusion.data.image_sheet import Figure, Section, draw_sheet, save_image, to_images
from diffusion.errors import UserError
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint, EvaluationResult, from_rank_zero, gather_rows
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.prompts import caption_prompts
from diffusion.models import batch_keys

SIDE = 128
SAMPLES = 'samples.png'
"""Sheet of generated and real images in the run's folder."""
SHEET_TITLE = 'Generated image (left) and real image (right) of each caption'


class Retrieval:
    """Evaluator that generates images from a dataset's captions and finds the nearest real image of each.

    One image is generated per caption, with the caption's index as its seed. The nearest real image is the one with the
    smallest mean squared pixel difference. Top-1 is the fraction of captions for which the nearest image is the
    caption's own image. This score measures how well the model learned to match training images with captions, not how
    well it generalizes to new captions.

    The evaluator also writes `samples.png`, a sheet of generated and real images with their captions.

    Args:
        num_captions: Number of captions, evenly spaced in the dataset.
        guidance_scale: Guidance scale; 1 turns guidance off.
        guidance_rescale: Strength of rescaling the guided prediction, from 0 to 1.
        guidance: Name and settings of the guidance, such as {name: apg}; null means classifier-free guidance.
        snr_shift: Shift of a flow's sampling times toward noise; null means the objective's.
        num_inference_steps: Steps of the noise scheduler per image.
        noise_scheduler: Name from `diffusion.config.sampling_checks.SCHEDULERS`.
        batch_size: Images generated per batch.
        num_shown: Number of captions on the sheet.
        columns: Captions per row of the sheet.
    """

    def __init__(
        self,
        *,
        num_captions: int = 100,
        guidance_scale: float = 3.0,
        guidance_rescale: float = 0.0,
        guidance: Mapping[str, Any] | None = None,
        snr_shift: float | None = None,
        num_inference_steps: int = 25,
        noise_scheduler: str = 'ddim',
        batch_size: int = 50,
        num_shown: int = 40,
        columns: int = 5,
    ) -> None:
        self.num_captions, self.num_shown, self.columns = num_captions, num_shown, columns
        self.sampling: dict[str, Any] = {
            **{'guidance_scale': guidance_scale, 'num_inference_steps': num_inference_steps},
            **{'guidance_rescale': guidance_rescale, 'guidance': guidance, 'snr_shift': snr_shift},
            **{'noise_scheduler': noise_scheduler, 'batch_size': batch_size},
        }

    def __call__(self, checkpoint: EvaluatedCheckpoint) -> EvaluationResult:
        """Return the top-1 fraction as `retrieval_top1`, and write `samples.png`; a collective call."""
        dataset = checkpoint.dataset
        count = int(dataset.size)
        if self.num_captions > count:
            raise UserError(
                f'evaluators.retrieval.num_captions: {self.num_captions} is more than the {count} images of the '
                f'dataset; use at most {count}'
            )
        chosen = [index * count // self.num_captions for index in range(self.num_captions)]
        captions = [prompt.text for prompt in caption_prompts(dataset, self.num_captions)]
        shape = tuple(dataset[0][batch_keys.IMAGE].shape)
        generated = self._generate(checkpoint, captions, (shape[1], shape[2])).view(-1, *shape)

        def top1() -> float:
            real = torch.stack([dataset[index][batch_keys.IMAGE] for index in range(count)])
            nearest = nearest_images(generated.float() / 255, real.float() / 255)
            correct = [index == truth for index, truth in zip(nearest.tolist(), chosen, strict=True)]
            pairs = zip(captions, to_images(generated), to_images(real[chosen]), strict=True)
            figures = [Figure(images, caption) for caption, *images in pairs][: self.num_shown]
            sheet = draw_sheet([Section(SHEET_TITLE, figures)], columns=self.columns, side=SIDE)
            save_image(sheet, checkpoint.run_dir / SAMPLES)
            return sum(correct) / len(correct)

        return EvaluationResult({'retrieval_top1': from_rank_zero(top1, checkpoint.raise_together)})

    def _generate(self, checkpoint: EvaluatedCheckpoint, captions: list[str], size: tuple[int, int]) -> Tensor:
        """Generate one image per caption on all ranks, uint8 [len(captions), 3 * H * W]; a collective."""
        sampling = Sampling(size=size, **self.sampling)
        generated = GeneratedImages.below(checkpoint.folder, captions, sampling, checkpoint.label, name='retrieval')
        rows, indices = [], []
        with checkpoint.raise_together('retrieval'):
            for own, images in checkpoint.batches_of(generated):
                rows.append(torch.stack(images).flatten(1))
                indices += own
        return gather_rows(rows, indices)


def nearest_images(images: Tensor, references: Tensor) -> Tensor:
    """Return, for images [B, 3, H, W], indices of references [R, 3, H, W] with the least squared error, int64 [B]."""
    return torch.cdist(images.flatten(1), references.flatten(1)).argmin(dim=1)
