"""Do the pictures show what their captions say? Retrieval among the pictures that the model was trained on."""

import logging
from pathlib import Path

import torch
from torch import Tensor

from diffusion.data.caption_choice import captions_of
from diffusion.data.image_text import ImageTextDataset
from diffusion.errors import UserError
from diffusion.evaluation.image_sheet import Figure, Section, draw_sheet, save_image, to_images
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)


class Retrieval:
    """Draw pictures from captions of a data set and look for the nearest picture in it.

    For each of `num_captions` captions a picture is drawn, with the caption's number as its seed. Of all pictures in
    the data set, the nearest is the one with the smallest mean squared difference of pixel values. Top-1 is the share
    of captions whose own picture is the nearest. It says that a model has learned which picture belongs to which
    caption, on data that it was trained on; it says nothing about captions that it has not seen.

    Writes `samples.png`: caption, generated picture, real picture.

    Args:
        num_captions: How many captions, evenly spread over the data set.
        guidance_scale: 1 turns guidance off.
        num_inference_steps: Steps of the scheduler.
        noise_scheduler: A name of `diffusion.models.sampler.SHORT_NAMES`.
        batch_size: Pictures drawn at once.
        num_shown: Captions on the sheet.
        columns: Cells a row of the sheet.
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
        columns: int = 8,
    ) -> None:
        self.num_captions = num_captions
        self.guidance_scale = guidance_scale
        self.num_inference_steps = num_inference_steps
        self.noise_scheduler = noise_scheduler
        self.batch_size = batch_size
        self.num_shown = num_shown
        self.columns = columns

    def __call__(self, model: LatentDiffusion, dataset: ImageTextDataset, folder: Path) -> dict[str, float]:
        """Top-1 share, and the sheet in `folder`."""
        count = int(dataset.size)
        if self.num_captions > count:
            raise UserError(f'evaluators.retrieval.num_captions: {self.num_captions}, but there are {count} pictures')
        chosen = [index * count // self.num_captions for index in range(self.num_captions)]
        captions = [captions_of(dataset.get_item(index), dataset.where(index))[0] for index in chosen]
        real = torch.stack([dataset[index][batch_keys.IMAGE] for index in range(count)])
        drawn = self._draw(model, captions, (real.shape[2], real.shape[3]))
        found = nearest_images(drawn, real.float() / 255)
        right = [index == truth for index, truth in zip(found.tolist(), chosen, strict=True)]
        pairs = zip(captions, to_images(drawn), to_images(real[chosen]), strict=True)
        figures = [Figure(images, caption) for caption, *images in pairs][: self.num_shown]
        save_image(draw_sheet([Section('', figures)], columns=self.columns, side=64), folder / 'samples.png')
        return {'retrieval_top1': sum(right) / len(right)}

    def _draw(self, model: LatentDiffusion, captions: list[str], size: tuple[int, int]) -> Tensor:
        pictures = []
        for start in range(0, len(captions), self.batch_size):
            batch = captions[start : start + self.batch_size]
            pictures.append(
                model.generate(
                    batch,
                    seeds=range(start, start + len(batch)),
                    size=size,
                    guidance_scale=self.guidance_scale,
                    num_inference_steps=self.num_inference_steps,
                    noise_scheduler=self.noise_scheduler,
                )
            )
        return torch.cat(pictures).cpu()


def nearest_images(pictures: Tensor, references: Tensor) -> Tensor:
    """Index of the reference with the smallest mean squared difference, int64 [B]; both are [., 3, H, W] in [0, 1]."""
    return torch.cdist(pictures.flatten(1), references.flatten(1)).argmin(dim=1)
