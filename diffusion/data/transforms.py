"""From an encoded picture to the rectangle the model sees, as uint8; normalisation happens on the device."""

import io
import math
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

from diffusion.config.image_shapes import Shape

Pixels = NDArray[np.uint8]
"""A picture as uint8 [height, width, 3], red first."""
MOST_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Of a picture that is decoded; above it Pillow, too, takes a picture for a decompression bomb."""
SPARE = 2
"""How many times larger than its target a crop still is after a JPEG was decoded at a reduced size.

Measured on photographs and a zone plate: at 2 the result is within 50 dB of the full decode's, and aliasing is about
that of bicubic; at 1, which is 15 % faster, it is 46 dB and it aliases like a box filter, ten times Lanczos.
"""
JPEG_START, SCAN_START, EXIF_START = b'\xff\xd8\xff', b'\xff\xda', b'Exif\0\0'
FAST_COLOURS = ('YCbCr', 'RGB', 'Gray')


class Undecodable(ValueError):
    """The bytes are no picture, or a broken one; the message says what the decoder said."""


@dataclass(frozen=True)
class CropBox:
    """A rectangle of a picture in pixels, before it is resized."""

    left: int
    top: int
    width: int
    height: int


@dataclass(frozen=True)
class Crop:
    """Which part of a picture is seen, as the dataset's settings and a sample's draws say.

    Attributes:
        rule: The middle, or anywhere.
        min_scale: Smallest size of a random crop, as a share of the largest.
        draw: Three numbers in [0, 1): size, left and top of a random crop.
        flip: Mirror it.
    """

    rule: Literal['center', 'random'] = 'center'
    min_scale: float = 1.0
    draw: tuple[float, float, float] = (0.0, 0.0, 0.0)
    flip: bool = False


def picture(encoded: bytes | Image.Image, shape: Shape, crop: Crop = Crop()) -> Tensor:
    """What the model sees of a picture, uint8 [3, height, width]; see `seen`."""
    return planes(seen(encoded, shape, crop), torch.empty((3, shape.height, shape.width), dtype=torch.uint8))


def seen(encoded: bytes | Image.Image, shape: Shape, crop: Crop) -> Pixels:
    """What the model sees of a picture; where the crop is as large as the shape, the pixels of the full decode.

    Raises:
        Undecodable: The bytes are no picture, or a broken one.
    """
    pixels = resized(cut_out(encoded, shape, crop), shape)
    return cv2.flip(pixels, 1) if crop.flip else pixels  # type: ignore[return-value] # cv2 knows no uint8


def cut_out(encoded: bytes | Image.Image, shape: Shape, crop: Crop) -> Pixels:
    """The crop of a picture, decoded; of a JPEG much larger than the shape, at a half, quarter or eighth of its size.

    Raises:
        Undecodable: The bytes are no picture, or a broken one.
    """
    found = _cut_jpeg(encoded, shape, crop) if isinstance(encoded, bytes) else None
    if found is not None:
        return found
    pixels = np.array(decode(encoded))
    return _cut(pixels, crop_box(pixels.shape[1], pixels.shape[0], shape, crop))


def resized(pixels: Pixels, shape: Shape) -> Pixels:
    """Bicubic with antialiasing: Pillow's to two grey levels, at six times its speed.

    OpenCV's `INTER_AREA` aliases like a box filter, its other filters without any bound.
    """
    if pixels.shape[:2] == (shape.height, shape.width):
        return pixels
    # PyTorch has vector code for interleaved pixels; it tells them by strides, also by that of the batch of one.
    image = torch.from_numpy(np.ascontiguousarray(pixels)).unsqueeze(0).permute(0, 3, 1, 2)
    size = [shape.height, shape.width]
    result = torch.nn.functional.interpolate(image, size=size, mode='bicubic', antialias=True)
    return np.ascontiguousarray(result[0].permute(1, 2, 0).numpy())


def decode(encoded: bytes | Image.Image) -> Image.Image:
    """The whole picture in RGB by Pillow, upright, transparency over white.

    Raises:
        Undecodable: The bytes are no picture, or a broken one.
    """
    try:
        return _decode(encoded)
    except Exception as error:  # Pillow's formats raise whatever they meet: OSError, SyntaxError, struct.error, ...
        raise Undecodable(str(error) or type(error).__name__) from error


def _decode(encoded: bytes | Image.Image) -> Image.Image:
    image = Image.open(io.BytesIO(encoded)) if isinstance(encoded, bytes) else encoded
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith('I;16'):  # which convert() would cut off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ('RGBA', 'LA', 'PA') or 'transparency' in image.info:
        image = image.convert('RGBA')
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return image.convert('RGB')


def crop_box(width: int, height: int, shape: Shape, crop: Crop) -> CropBox:
    """Which rectangle of a picture of this size is used; it has the shape's aspect, to a pixel."""
    scale = min(width / shape.width, height / shape.height)
    widest, highest = (
        max(1, min(side, round(scale * of))) for side, of in ((width, shape.width), (height, shape.height))
    )
    if crop.rule == 'center':
        return CropBox((width - widest) // 2, (height - highest) // 2, widest, highest)
    shorter = min(widest, highest)
    smallest = max(1, round(crop.min_scale * shorter))
    side = smallest + int(crop.draw[0] * (shorter - smallest + 1))
    box_width, box_height = (max(1, round(of * side / shorter)) for of in (widest, highest))
    left, top = int(crop.draw[1] * (width - box_width + 1)), int(crop.draw[2] * (height - box_height + 1))
    return CropBox(left, top, box_width, box_height)


def _cut_jpeg(encoded: bytes, shape: Shape, crop: Crop) -> Pixels | None:
    """The crop of a plain JPEG; None for what Pillow has to judge."""
    if not encoded.startswith(JPEG_START) or not _is_upright(encoded):
        return None
    try:
        header: Any = simplejpeg.decode_jpeg_header(encoded)  # its stub calls the sides SupportsInt
        height, width, colours, _ = header
        if colours not in FAST_COLOURS or width * height > MOST_PIXELS:
            return None
        box = crop_box(width, height, shape, crop)
        reduction = reduction_for(box, shape)
        smallest = {'min_width': math.ceil(width / reduction), 'min_height': math.ceil(height / reduction)}
        # Colour at half the resolution need not be smoothed where the result has no more: 6 % faster, 53 dB apart.
        halved = min(box.width / shape.width, box.height / shape.height) >= SPARE
        pixels = simplejpeg.decode_jpeg(encoded, fastupsample=halved, **(smallest if reduction > 1 else {}))
    except ValueError:
        return None
    return _cut(pixels, reduced(box, reduction))


def _is_upright(encoded: bytes) -> bool:
    # Camera data comes before the scan, whose start is near; looking through all of the picture takes 40 us.
    if encoded.find(EXIF_START, 0, encoded.find(SCAN_START)) < 0:
        return True
    try:
        return Image.open(io.BytesIO(encoded)).getexif().get(ExifTags.Base.Orientation, 1) == 1
    except Exception:  # whatever it is, decoding the picture will say it
        return False


def reduction_for(box: CropBox, shape: Shape) -> int:
    """By how much a JPEG may be reduced as it is decoded, 1, 2, 4 or 8, so that its crop stays `SPARE` times larger."""
    spare = min(box.width / shape.width, box.height / shape.height) / SPARE
    return max((factor for factor in (2, 4, 8) if factor <= spare), default=1)


def reduced(box: CropBox, reduction: int) -> CropBox:
    """The box in a reduced picture, to half a pixel there, which is a quarter of a pixel of the result at most."""
    left, top = (round(at / reduction) for at in (box.left, box.top))
    right, bottom = (round(at / reduction) for at in (box.left + box.width, box.top + box.height))
    return CropBox(left, top, right - left, bottom - top)


def _cut(pixels: Pixels, box: CropBox) -> Pixels:
    return pixels[box.top : box.top + box.height, box.left : box.left + box.width]


def planes(pixels: Pixels, out: Tensor) -> Tensor:
    """Copy pixels [H, W, 3] into `out`, uint8 [3, H, W], and return it; OpenCV takes a sixth of PyTorch's time."""
    cv2.split(pixels, list(out.numpy()))
    return out
