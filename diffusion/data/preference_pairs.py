"""Dataset of preference pairs, in the format that `diffusion data pairs` writes."""

from collections.abc import Sequence
from typing import Any

import torch

from diffusion.data.image_text import ImageTextDataset
from diffusion.data.transforms import to_planar
from diffusion.models import batch_keys

REJECTED = 'rejected_image'
"""Column with the encoded image that was not preferred; the column `image` has the preferred one."""


class PreferencePairsDataset(ImageTextDataset):
    """Streaming dataset of prompts with a preferred and a rejected image, for `algorithms.diffusion_dpo`.

    Both images of a pair are cropped, resized and flipped by the same random draws. A model conditioned on image sizes
    gets those of the preferred image for both. Evaluation reads only the preferred images, so its streams may have
    images without pairs. The constructor has the same arguments as `ImageTextDataset`.
    """

    def item(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """Return `ImageTextDataset`'s item and, in training, the rejected image; raise BadSample if it is missing."""
        item = super().item(sample, index)
        if self.elastic:
            _, pixels, _ = self.cropped(sample[REJECTED], index)
            item[batch_keys.REJECTED_IMAGE] = to_planar(pixels, torch.empty_like(item[batch_keys.IMAGE]))
        return item

    def _check_columns(self, columns: Sequence[tuple[str, ...]]) -> None:
        super()._check_columns([*columns, (REJECTED,)] if self.elastic else columns)
