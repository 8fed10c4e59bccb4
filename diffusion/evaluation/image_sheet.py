"""Contact sheets: pictures in rows with a line of text, as one PNG."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffusion.storage.atomic import becoming

_MARGIN = 6
_LINE = 13


def to_images(pictures: Tensor) -> list[Image.Image]:
    """Pictures [B, 3, H, W], float in [0, 1] or uint8, as PIL images."""
    if pictures.is_floating_point():
        pictures = (pictures.float() * 255).round().clamp(0, 255)
    return [Image.fromarray(array.astype(np.uint8)) for array in pictures.permute(0, 2, 3, 1).cpu().numpy()]


def contact_sheet(cells: Sequence[tuple[str, Sequence[Image.Image]]], *, columns: int, side: int = 96) -> Image.Image:
    """A sheet of cells, each a few pictures side by side under their caption.

    Args:
        cells: Caption and pictures; every cell has the same number of pictures.
        columns: Cells a row.
        side: Of a picture on the sheet, in pixels; small ones are enlarged without smoothing.
    """
    pictures = len(cells[0][1])
    width, height = pictures * side + _MARGIN, side + 2 * _LINE + _MARGIN
    rows = -(-len(cells) // columns)
    sheet = Image.new('RGB', (columns * width + _MARGIN, rows * height + _MARGIN), 'white')
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for number, (caption, images) in enumerate(cells):
        left, top = _MARGIN + number % columns * width, _MARGIN + number // columns * height
        lines = textwrap.wrap(caption, max(8, int(pictures * side / 6)))[:2]
        draw.multiline_text((left, top), '\n'.join(lines), fill='black', font=font, spacing=1)
        for index, image in enumerate(images):
            method = Image.Resampling.NEAREST if image.width < side else Image.Resampling.LANCZOS
            sheet.paste(image.resize((side, side), method), (left + index * side, top + 2 * _LINE))
    return sheet


def save_image(image: Image.Image, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with becoming(path) as unfinished:
        image.save(unfinished, format='PNG')
