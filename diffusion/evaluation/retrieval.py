"""Evaluator `retrieval`: fraction of generated images whose nearest real image is the one with the same caption.

Nearest is by pixel difference. Use it to measure how well a model has learned a small dataset.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from diffusion.data.caption_choice import captions_of
from diffusion.data.image_text import ImageTextDataset
from diffusion.errors import UserError
from diffusion.evaluation.image_sheet import Figure, Section, draw_sheet, save_image, to_images
from diffusion.loggers import status_line
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)

SIDE = 128
"""Side in pixels of an image in samples.png."""
SHEET_TITLE = 'Generated image (left) and real image (right) of each caption'


class Retrieval:
    """Evaluator that generates images from a dataset's captions and looks up the nearest real image of each.

    One image is generated per caption, with the caption's index as its seed. The nearest real image is the one with
    the smallest mean squared pixel difference. Top-1 is the fraction of captions whose own image is the nearest. This
    score measures how well the model has learned which training image belongs to which caption, and does not measure
    generalization to new captions.

    The evaluator also writes `samples.png`, a sheet of generated and real images with their captions.

    Args:
        num_captions: Number of captions, evenly spread over the dataset.
        guidance_scale: Scale of classifier-free guidance; 1 turns it off.
        num_inference_steps: Steps of the noise scheduler per image.
        noise_scheduler: Name from `diffusion.config.noise_schedulers.SHORT_NAMES`.
        batch_size: Images generated per batch.
        num_shown: Number of captions on the sheet.
        columns: Captions per row of the sheet.
    """

    def __init__(
        self,
        *,
        num_captions: int = 100,
        guidance_scale: float = 3.0,
        num_inference_steps: int = 25,
        noise_scheduler: str = 'ddim',
        batch_size: int = 50,
        num_shown: int = 40,
        columns: int = 5,
    ) -> None:
        self.num_captions = num_captions
        self.guidance_scale = guidance_scale
        self.num_inference_steps = num_inference_steps
        self.noise_scheduler = noise_scheduler
        self.batch_size = batch_size
        self.num_shown = num_shown
        self.columns = columns

    def __call__(self, model: LatentDiffusion, dataset: ImageTextDataset, folder: Path) -> dict[str, float]:
        """Generate and look up the images: return the top-1 fraction as `retrieval_top1`, and write `samples.png`."""
        count = int(dataset.size)
        if self.num_captions > count:
            raise UserError(
                f'evaluators.retrieval.num_captions: {self.num_captions} is more than the {count} images of the '
                f'dataset; use at most {count}'
            )
        chosen = [index * count // self.num_captions for index in range(self.num_captions)]
        captions = [captions_of(dataset.get_item(index), dataset.where(index))[0] for index in chosen]
        real = torch.stack([dataset[index][batch_keys.IMAGE] for index in range(count)])
        generated = self._generate(model, captions, (real.shape[2], real.shape[3]))
        nearest = nearest_images(generated, real.float() / 255)
        correct = [index == truth for index, truth in zip(nearest.tolist(), chosen, strict=True)]
        pairs = zip(captions, to_images(generated), to_images(real[chosen]), strict=True)
        figures = [Figure(images, caption) for caption, *images in pairs][: self.num_shown]
        sheet = draw_sheet([Section(SHEET_TITLE, figures)], columns=self.columns, side=SIDE)
        save_image(sheet, folder / 'samples.png')
        return {'retrieval_top1': sum(correct) / len(correct)}

    def _generate(self, model: LatentDiffusion, captions: list[str], size: tuple[int, int]) -> Tensor:
        """Generate one image per caption in batches, float [len(captions), 3, H, W] in [0, 1]."""
        images = []
        for start in range(0, len(captions), self.batch_size):
            batch = captions[start : start + self.batch_size]
            status_line.show(f'generated {start} of {len(captions)} images')
            images.append(
                model.generate(
                    batch,
                    seeds=range(start, start + len(batch)),
                    size=size,
                    guidance_scale=self.guidance_scale,
                    num_inference_steps=self.num_inference_steps,
                    noise_scheduler=self.noise_scheduler,
                )
            )
        status_line.show('')
        return torch.cat(images).cpu()


def nearest_images(images: Tensor, references: Tensor) -> Tensor:
    """Return the index of each image's nearest reference by mean squared difference, int64 [B].

    Args:
        images: Float [B, 3, H, W].
        references: Float [R, 3, H, W].
    """
    return torch.cdist(images.flatten(1), references.flatten(1)).argmin(dim=1)
