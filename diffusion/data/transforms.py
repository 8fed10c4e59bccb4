"""From an encoded picture to the square the model sees, as uint8; normalisation happens on the device."""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor


@dataclass(frozen=True)
class CropBox:
    """A square of a picture in pixels, before it is resized."""

    left: int
    top: int
    side: int


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
    crop: Literal['center', 'random'],
    draw: tuple[float, float, float],
    min_scale: float = 1.0,
) -> CropBox:
    """Which square of a picture of this size is used.

    Args:
        width, height: Of the picture in pixels.
        crop: The middle, or anywhere.
        draw: Three numbers in [0, 1): size, left and top of a random crop.
        min_scale: Smallest side of a random crop, as a share of the picture's shorter side.
    """
    shorter = min(width, height)
    if crop == 'center':
        return CropBox((width - shorter) // 2, (height - shorter) // 2, shorter)
    smallest = max(1, round(min_scale * shorter))
    side = smallest + int(draw[0] * (shorter - smallest + 1))
    return CropBox(int(draw[1] * (width - side + 1)), int(draw[2] * (height - side + 1)), side)


def to_square(image: Image.Image, box: CropBox, *, resolution: int, flip: bool = False) -> Tensor:
    """The square as uint8 [3, resolution, resolution]."""
    bounds = (box.left, box.top, box.left + box.side, box.top + box.side)
    if box.side != resolution:
        image = image.resize((resolution, resolution), Image.Resampling.BICUBIC, box=bounds, reducing_gap=3.0)
    else:
        image = image.crop(bounds)
    if flip:
        image = ImageOps.mirror(image)
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).contiguous()
