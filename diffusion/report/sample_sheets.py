"""A run's sampled images as small WebP files for a page: image grids over time, and the last evaluation."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from xxhash import xxh3_64_hexdigest

from diffusion.data.image_sheet import FIGURES
from diffusion.storage.places import FileVersion, Place

FOLDER = 'images'
GENERATED = 'samples.png'
"""Image grid from the evaluator `retrieval`: generated and real images."""
MAX_SHEETS = 48
SIDES = (256, 192, 128, 96, 64)
"""Possible sizes in pixels of an image on a page; the largest that fits is used."""
FEW_SHEETS = 12
"""Images are shrunk until this number of image grids fits, or all if fewer; further grids may be left out."""
MAX_FIGURES = 64
_SHEET = re.compile(r'ba(\d{1,15})\.png')
_GENERATED_SHARE = 0.25
"""Fraction of the size limit for a run's images that the image grid of the last evaluation may use."""
DAMAGE = (OSError, ValueError, SyntaxError, TypeError, KeyError, RecursionError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Sheet:
    """Grid of sampled images from one point in a run."""

    batch: int | None
    figures: list[dict[str, Any]]
    """Figures, each with a `caption` and, in `images`, the key and size of each image."""


@dataclass
class SampledImages:
    sheets: list[Sheet] = field(default_factory=list)
    generated: Sheet | None = None
    total: int = 0
    encoded: dict[str, bytes] = field(default_factory=dict)
    """WebP images, by the keys used in figures."""


class SheetReader:
    """Reads a run's image grids, at most `max_bytes` in total; caches encoded images for the next call."""

    def __init__(self, files: Place, max_bytes: int) -> None:
        self.files, self.max_bytes = files, max_bytes
        self._content = ('', '', b'')  # name, version and content of the sheet read last, to encode it in other sizes
        self._known: dict[tuple[str, str, int], tuple[list[dict[str, Any]], dict[str, bytes]]] = {}

    def read(self, root_files: dict[str, FileVersion], notes: list[str], reserved: int = 0) -> SampledImages:
        """Return as many image grids as fit, evenly spaced from first to last; add a note for each unreadable one.

        `reserved`: Number of the bytes that other images use.
        """
        found = SampledImages()
        used = reserved
        if GENERATED in root_files:
            limit = round(self.max_bytes * _GENERATED_SHARE)
            for side in SIDES[2:]:
                figures, images = self._encoded(GENERATED, root_files[GENERATED], side, notes)
                size = _bytes(images)
                if figures and size <= limit:
                    found.generated, used = Sheet(None, figures), used + size
                    found.encoded |= images
                    break
        versions = {
            int(match[1]): (f'{FOLDER}/{name}', version)
            for name, version in self.files.list(FOLDER).files.items()
            if (match := _SHEET.fullmatch(name))
        }
        found.total = len(versions)
        self._add_sheets(found, versions, self.max_bytes - used, notes)
        return found

    def _add_sheets(
        self, found: SampledImages, versions: dict[int, tuple[str, FileVersion]], limit: int, notes: list[str]
    ) -> None:
        batches = sorted(versions)
        if not batches:
            return
        wanted = min(len(batches), FEW_SHEETS)
        side, size = SIDES[-1], 1
        for side in SIDES:
            # The last sheet has the most detail, so its size is an upper estimate for the others.
            size = max(1, _bytes(self._encoded(*versions[batches[-1]], side, notes)[1]))
            if size * wanted <= limit:
                break
        count = max(1, min(MAX_SHEETS, limit // size))
        while count:
            chosen = evenly_chosen(batches, count)
            sheets = {batch: self._encoded(*versions[batch], side, notes) for batch in chosen}
            images = {key: image for _, each in sheets.values() for key, image in each.items()}
            if _bytes(images) <= limit:
                found.encoded |= images
                found.sheets = [Sheet(batch, figures) for batch, (figures, _) in sheets.items() if figures]
                return
            count = count * 4 // 5

    def _encoded(
        self, name: str, version: FileVersion, side: int, notes: list[str]
    ) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """Return an image grid's figures, and its images by key; both are empty if the file is damaged."""
        known = (name, version.tag, side)
        if known not in self._known:
            if self._content[:2] != known[:2]:
                self._content = (name, version.tag, self.files.read(name) or b'')
            try:
                self._known[known] = encode_sheet(self._content[2], side)
            except DAMAGE as error:
                notes.append(f'{name} is not an image that can be shown ({type(error).__name__}).')
                self._known[known] = ([], {})
        return self._known[known]


def encode_sheet(content: bytes, side: int) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Return the figures in a PNG image grid, which refer to images by key, and the WebP images by key."""
    encoded: dict[str, bytes] = {}
    with Image.open(io.BytesIO(content)) as opened:
        text = getattr(opened, 'text', {})[FIGURES]
        sheet = opened.convert('RGB')

    figures = []
    for figure in json.loads(text)[:MAX_FIGURES]:
        images = []
        for (left, top, width, height), (real_width, real_height) in zip(figure['boxes'], figure['sizes'], strict=True):
            image = sheet.crop((left, top, left + width, top + height))
            if 0 < real_width < width and 0 < real_height < height:
                image = image.resize((real_width, real_height), Image.Resampling.NEAREST)  # undo the enlargement
            images.append(webp(image, side, encoded))
        figures.append({'caption': str(figure['caption']), 'images': images})
    return figures, encoded


def webp(image: Image.Image, side: int, encoded: dict[str, bytes]) -> dict[str, Any]:
    """Add an image of up to `side` pixels to `encoded`, and return its key and size."""
    image = image.copy()
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, 'WEBP', quality=80, method=4)
    key = xxh3_64_hexdigest(buffer.getvalue())
    encoded[key] = buffer.getvalue()
    return {'key': key, 'width': image.width, 'height': image.height}


def evenly_chosen(items: Sequence[int], count: int) -> list[int]:
    """Return `count` evenly spaced items including the first and the last; if `count` is 1, return the last."""
    if count >= len(items):
        return [*items]
    if count == 1:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


def _bytes(images: dict[str, bytes]) -> int:
    return sum(map(len, images.values()))
