"""From an encoded picture to the rectangle the model sees, as uint8; normalisation happens on the device."""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from diffusion.data.buckets import Shape


@dataclass(frozen=True)
class CropBox:
    """A rectangle of a picture in pixels, before it is resized."""

    left: int
    top: int
    width: int
    height: int

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom."""
        return self.left, self.top, self.left + self.width, self.top + self.height


def decode(encoded: bytes | Image.Image) -> Image.Image:
    """The picture in RGB, upright, transparency over white."""
    image = Image.open(io.BytesIO(encoded)) if isinstance(encoded, bytes) else encoded
    image = ImageOps.exif_transpose(image)
    if image.mode in ('RGBA', 'LA', 'PA') or 'transparency' in image.info:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return image.convert('RGB')


def crop_box(
    width: int,
    height: int,
    *,
    shape: Shape,
    crop: Literal['center', 'random'],
    draw: tuple[float, float, float],
    min_scale: float = 1.0,
) -> CropBox:
    """Which rectangle of a picture of this size is used; it has the shape's aspect, to a pixel.

    Args:
        width, height: Of the picture in pixels.
        shape: What the rectangle becomes.
        crop: The middle, or anywhere.
        draw: Three numbers in [0, 1): size, left and top of a random crop.
        min_scale: Smallest size of a random crop, as a share of the largest.
    """
    scale = min(width / shape.width, height / shape.height)
    widest, highest = (
        max(1, min(side, round(scale * of))) for side, of in ((width, shape.width), (height, shape.height))
    )
    if crop == 'center':
        return CropBox((width - widest) // 2, (height - highest) // 2, widest, highest)
    shorter = min(widest, highest)
    smallest = max(1, round(min_scale * shorter))
    side = smallest + int(draw[0] * (shorter - smallest + 1))
    box_width, box_height = (max(1, round(of * side / shorter)) for of in (widest, highest))
    left, top = int(draw[1] * (width - box_width + 1)), int(draw[2] * (height - box_height + 1))
    return CropBox(left, top, box_width, box_height)


def to_shape(image: Image.Image, box: CropBox, *, shape: Shape, flip: bool = False) -> Tensor:
    """The rectangle as uint8 [3, height, width]."""
    if (box.width, box.height) != (shape.width, shape.height):
        size = (shape.width, shape.height)
        image = image.resize(size, Image.Resampling.BICUBIC, box=box.bounds, reducing_gap=3.0)
    else:
        image = image.crop(box.bounds)
    if flip:
        image = ImageOps.mirror(image)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()
