"""Contact sheets of captioned images, drawn as one PNG or written as HTML.

This module does not import torch, so that data preparation can use it too.
"""

import base64
import html
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from diffusion.storage.atomic import atomic_file

if TYPE_CHECKING:
    from torch import Tensor

SHEET_WIDTH = 1500
"""Width in pixels of a PNG sheet if the number of columns is not set."""
MARGIN, LINE_HEIGHT = 8, 13
GAP = 4
"""Width in pixels of the white gap between two images of a figure in a PNG sheet."""
FIGURES = 'figures'
"""Key of a text chunk in a PNG sheet: JSON with each figure's caption, and the boxes on the sheet (left, top, width,
height) and sizes before drawing (width, height) of its images, so that a report can cut the images out."""
CAPTION_LINES = 3
"""Maximum number of lines per caption in a PNG; HTML shows captions in full."""
GRAY, LIGHT_GRAY = (110, 110, 110), (220, 220, 220)
STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 16px; color: #222 } h2 { font-size: 1.15em }
.figures { display: flex; flex-wrap: wrap; gap: .8em }
figure { margin: 0; min-width: 96px } figure img { border: 1px solid #ddd; vertical-align: bottom }
figcaption { color: #555; font-size: 11px; width: 0; min-width: 100%; overflow-wrap: anywhere; white-space: pre-line }
"""


@dataclass(frozen=True)
class Figure:
    """Images side by side above one caption; encoded images (JPEG or PNG) are embedded in HTML without re-encoding."""

    images: Sequence[Image.Image | bytes]
    caption: str


@dataclass(frozen=True)
class Section:
    """Section of a sheet: figures of equal size under a title; the title may be empty."""

    title: str
    figures: Sequence[Figure]


def to_images(pixels: 'Tensor') -> list[Image.Image]:
    """Convert pixels [B, 3, H, W], float in [0, 1] or uint8, to PIL images."""
    if pixels.is_floating_point():
        pixels = (pixels.float() * 255).round().clamp(0, 255)
    return [Image.fromarray(array.astype(np.uint8)) for array in pixels.permute(0, 2, 3, 1).cpu().numpy()]


def png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, 'PNG')
    return buffer.getvalue()


def save_image(image: Image.Image, path: Path, **texts: str) -> None:
    """Write an image to a PNG file atomically, with texts in its metadata.

    For a sheet, the PNG's metadata also contains the captions and positions of its figures (see `FIGURES`).
    """
    info = PngImagePlugin.PngInfo()
    for key, text in ({key: image.info[key] for key in (FIGURES,) if key in image.info} | texts).items():
        info.add_itxt(key, text)
    with atomic_file(path) as unfinished:
        image.save(unfinished, format='PNG', pnginfo=info)


def size_on_sheet(image: Image.Image, side: int) -> tuple[int, int]:
    """Return the size of an image scaled to an area of about side x side pixels, but at most to a sheet's width."""
    aspect = image.width / image.height
    width = min(SHEET_WIDTH - 2 * MARGIN, round(side * math.sqrt(aspect)))
    return width, max(1, round(width / aspect))


def enlarged_size(image: Image.Image, side: int) -> tuple[int, int]:
    """Return the size of an image scaled to about side x side pixels; smaller images grow by an integer factor."""
    # Use an integer factor, so that all pixels of a small image are drawn at the same size.
    natural = math.sqrt(image.width * image.height)
    if natural >= side:
        return size_on_sheet(image, side)
    factor = max(1, round(side / natural))
    return image.width * factor, image.height * factor


def draw_sheet(sections: Sequence[Section], *, columns: int | None = None, side: int = 96) -> Image.Image:
    """Draw sections one below the other in a single image, with the first lines of each caption below its figure.

    Args:
        columns: Maximum number of figures per row; None means as many as fit into SHEET_WIDTH.
        side: Side in pixels of a square image on the sheet; other images have the same area. Smaller images are
            enlarged without smoothing, by the integer factor that comes nearest to this area.
    """
    strips = [_strip(section, columns, side) for section in sections]
    height = sum(strip.height for strip in strips) + MARGIN
    sheet = Image.new('RGB', (max(strip.width for strip in strips), height), 'white')
    top, places = 0, []
    for strip in strips:
        sheet.paste(strip, (0, top))
        for figure in strip.info[FIGURES]:
            figure['boxes'] = [[left, top + y, *size] for left, y, *size in figure['boxes']]
            places.append(figure)
        top += strip.height
    sheet.info[FIGURES] = json.dumps(places)
    return sheet


def _strip(section: Section, columns: int | None, side: int) -> Image.Image:
    font, bold = ImageFont.load_default(size=11), ImageFont.load_default(size=15)
    first = section.figures[0].images
    width, height = enlarged_size(_decoded(first[0]), side)
    figure_width = len(first) * (width + GAP) - GAP
    fitting = columns or max(1, (SHEET_WIDTH - MARGIN) // (figure_width + MARGIN))
    title_height = 2 * LINE_HEIGHT + MARGIN if section.title else MARGIN
    row_height = height + CAPTION_LINES * LINE_HEIGHT + MARGIN
    filled = min(fitting, len(section.figures)) * (figure_width + MARGIN)
    strip_width = max(MARGIN + filled, 2 * MARGIN + round(bold.getlength(section.title))) if columns else SHEET_WIDTH
    strip = Image.new('RGB', (strip_width, title_height + -(-len(section.figures) // fitting) * row_height), 'white')
    draw = ImageDraw.Draw(strip)
    strip.info[FIGURES] = places = []
    draw.text((MARGIN, MARGIN), section.title, fill='black', font=bold)
    for number, figure in enumerate(section.figures):
        left = MARGIN + number % fitting * (figure_width + MARGIN)
        top = title_height + number // fitting * row_height
        images = [_decoded(image) for image in figure.images]
        boxes = [[left + index * (width + GAP), top, width, height] for index in range(len(images))]
        places.append({'caption': figure.caption, 'boxes': boxes, 'sizes': [image.size for image in images]})
        for image, box in zip(images, boxes, strict=True):
            method = Image.Resampling.LANCZOS if image.width > width else Image.Resampling.NEAREST
            strip.paste(image.resize((width, height), method), (box[0], top))
        draw.rectangle((left - 1, top - 1, left + figure_width, top + height), outline=LIGHT_GRAY)
        for line, text in enumerate(wrap_caption(figure.caption, figure_width, font)):
            draw.text((left, top + height + 2 + line * LINE_HEIGHT), text, fill=GRAY, font=font)
    return strip


def wrap_caption(text: str, width: int, font: Any) -> list[str]:
    """Wrap text into at most CAPTION_LINES lines of at most `width` pixels; truncated text ends in three dots."""
    lines, words = [''], text.split()
    while words:
        joined = f'{lines[-1]} {words[0]}'.strip()
        if font.getlength(joined) <= width or not lines[-1]:
            lines[-1] = joined
            words.pop(0)
        elif len(lines) == CAPTION_LINES:
            break
        else:
            lines.append('')
    if words:
        lines[-1] += ' ...'
    return [_shortened(line, width, font) for line in lines]


def _shortened(line: str, width: int, font: Any) -> str:
    if font.getlength(line) <= width:
        return line
    stem = line.removesuffix(' ...')
    while stem and font.getlength(f'{stem} ...') > width:
        stem = stem[:-1]
    return f'{stem.rstrip()} ...'


def html_figures(figures: Iterable[Figure], *, side: int | None = None) -> str:
    """Return figures as HTML with embedded images at `size_on_sheet` or, if `side` is None, their own resolution."""
    blocks = []
    for figure in figures:
        images = ''.join(_html_image(image, side) for image in figure.images)
        blocks.append(f'<figure>{images}<figcaption>{html.escape(figure.caption)}</figcaption></figure>')
    return f'<div class="figures">{"".join(blocks)}</div>'


def html_page(title: str, body: str, *, style: str = '') -> str:
    """Return a self-contained HTML page; `body` is HTML, and `style` is CSS appended after the figure styles."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n'
    )


def _html_image(image: Image.Image | bytes, side: int | None) -> str:
    encoded = image if isinstance(image, bytes) else png_bytes(image)
    kind = 'jpeg' if encoded.startswith(b'\xff\xd8') else 'png'
    width = '' if side is None else f' width="{size_on_sheet(_decoded(image), side)[0]}"'
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(encoded).decode()}"{width}>'


def _decoded(image: Image.Image | bytes) -> Image.Image:
    return Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
