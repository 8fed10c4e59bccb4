"""Sizes of an image and its crop, inputs of Stable Diffusion XL (Podell et al. 2023, section 2.2)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffusion.config.image_shapes import Shape
from diffusion.data.transforms import CropBox


def image_sizes(
    box: CropBox,
    shape: Shape,
    *,
    image: tuple[int, int],
    original: tuple[int, int] | None = None,
    flipped: bool = False,
) -> Tensor:
    """Return the sizes of a cropped and resized image in pixels, int64 [6].

    They are the original height and width, the top and left of the crop, and the target height and width. The crop is
    in coordinates of the image after resizing, since Podell et al. resize images before they crop them.

    Args:
        box: Crop of the encoded image before resizing.
        image: Width and height of the encoded image, upright.
        original: Width and height before any resizing; None (unknown) for those of the encoded image.
        flipped: The crop is mirrored; the sizes are then those of the same crop from the mirrored image.
    """
    width, height = image if original is None else original
    left = image[0] - box.left - box.width if flipped else box.left
    # The aspect ratio of the box is that of the shape, rounded to whole pixels, so both sides have nearly one scale.
    top, left = round(box.top * shape.height / box.height), round(left * shape.width / box.width)
    return torch.tensor([height, width, top, left, shape.height, shape.width], dtype=torch.int64)


def original_size(sample: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the width and height of a sample's image before `diffusion prepare` resized it; None if not recorded."""
    metadata = sample.get('metadata')
    if not isinstance(metadata, Mapping):
        return None
    size = metadata.get('source_width'), metadata.get('source_height')
    return size if all(isinstance(side, int) and side > 0 for side in size) else None  # type: ignore[return-value]
