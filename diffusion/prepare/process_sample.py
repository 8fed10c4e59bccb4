"""Convert a source entry into dataset samples, one for each resolution that it is large enough for, or reject it.

A bucket is a folder of shards for images of one resolution, or of one resolution and shape. At each resolution, an
image is stored only in the shape that is closest in aspect ratio.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from diffusion.config.image_shapes import STEP, Shape, parse_shape, sdxl_shapes, shape_for, square
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.filters import usable_captions
from diffusion.prepare.image_decoding import DecodedImage, covering_size, decode_image, encode, shrink
from diffusion.prepare.image_hashes import exact_hash, perceptual_hash
from diffusion.prepare.part_shards import InputRow
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Entry, Unfit


class Buckets:
    """All buckets of a dataset, with names such as `512px` or, with aspect ratio buckets, `512px/640x384`.

    Args:
        sizes: Resolutions in pixels.
        aspects: `none` for squares only, `sdxl` for the shapes in SDXL's table, or a list of shapes at the largest
            size, which are scaled for the other sizes.
        step: The sides of all shapes are multiples of this, in pixels.
        every: True puts an image in every resolution that needs no upscaling, False only in the largest of them.
    """

    def __init__(
        self, sizes: Sequence[int], aspects: str | Sequence[str], *, every: bool = True, step: int = STEP
    ) -> None:
        self.squares = aspects == 'none'
        self.every = every
        self.shapes = {size: _shapes(size, max(sizes), aspects, step) for size in sorted(sizes)}

    @property
    def names(self) -> list[str]:
        """Names of all buckets, sorted by resolution, then by aspect ratio from tall to wide."""
        return [self.name(size, shape) for size, shapes in self.shapes.items() for shape in shapes]

    def name(self, size: int, shape: Shape) -> str:
        return f'{size}px' if self.squares else f'{size}px/{shape}'

    def choose(self, width: int, height: int) -> list[tuple[int, Shape]]:
        """Choose the buckets for an image of this size in pixels, as (resolution, shape) from small to large.

        These are all resolutions that need no upscaling (only the largest of them unless `every`), each with the shape
        that is closest in aspect ratio; none if the image is smaller than every bucket.
        """
        filled = []
        for size, shapes in self.shapes.items():
            fitting = [shape for shape in shapes if shape.width <= width and shape.height <= height]
            if size <= min(width, height) and fitting:
                filled.append((size, shape_for(width, height, fitting)))
        return filled if self.every else filled[-1:]


def _shapes(size: int, largest: int, aspects: str | Sequence[str], step: int) -> list[Shape]:
    if aspects == 'none':
        return [square(size)]
    if aspects == 'sdxl':
        return sdxl_shapes(size, step)
    scaled = {_scaled(parse_shape(text), size, largest, step) for text in aspects}
    return sorted(scaled, key=lambda shape: (shape.aspect, shape.width))


def _scaled(shape: Shape, size: int, largest: int, step: int) -> Shape:
    return Shape(*(max(step, round(side * size / largest / step) * step) for side in (shape.width, shape.height)))


COLUMNS = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str', 'metadata': 'json'}
"""MDS encodings by column; `width` and `height` are the stored image's, in pixels."""
CAPTION_COLUMNS = 'caption_columns'
"""Column with the source column of each caption; only in datasets with captions from several columns."""
LANGUAGE_COLUMNS = ('language', 'LANGUAGE', 'lang')
"""Metadata columns that may contain the captions' language, in order of precedence."""
PRIVATE_COLUMNS = frozenset({'exif', 'EXIF'})
"""Metadata columns to remove: img2dataset copies location, camera and owner from image files to them."""
MAX_JPEG_SIDE = 65_500
"""Maximum side length of a JPEG in pixels (libjpeg's limit)."""
MAX_WEBP_SIDE = 16_383
THUMBNAIL_SIDE = 96
MEASURED_IMAGES = 4
"""Maximum number of images per part of the input for which the quality loss of JPEG or WebP is measured."""


def sample_columns(settings: PrepareSettings) -> dict[str, str]:
    return COLUMNS | ({CAPTION_COLUMNS: 'json'} if settings.source.caption_columns else {})


@dataclass(frozen=True)
class Candidate:
    """A decoded image with its captions; column filters and buckets may still reject it."""

    entry: Entry
    row: InputRow
    decoded: DecodedImage


def decode_entry(entry: Entry, row: InputRow, settings: PrepareSettings, buckets: Buckets) -> Candidate:
    """Decode an entry and check its captions and size; raise Unfit to reject it. In both cases, `row` is filled."""
    # Check captions before the image, because decoding takes most of the time.
    if entry.problem is not None:
        raise Unfit(entry.problem)
    filters = settings.filters
    usable = usable_captions(entry.captions, min_length=filters.min_caption, max_length=filters.max_caption)
    captions = list(usable)
    row.captions, row.caption_length = captions, max(map(len, captions))
    row.caption_columns = [entry.caption_columns[number] for number in usable.values()] if entry.caption_columns else []
    if entry.image is None:
        raise Unfit('no_image')
    decoded = decode_image(
        entry.image,
        background=settings.background,
        max_pixels=settings.max_pixels,
        formats=settings.formats,
        svg_side=max(max(shape.width, shape.height) for shapes in buckets.shapes.values() for shape in shapes),
        resized_to=resized_to(buckets) if settings.fast_jpeg else None,
    )
    row.width, row.height = decoded.width, decoded.height
    if (problem := filters.size_problem(decoded.width, decoded.height)) is not None:
        raise Unfit(problem)
    row.exact_hash = exact_hash(decoded.image, decoded.pixels, (decoded.width, decoded.height))
    # Free the pixels: many images may be waiting for the function that computes columns.
    return Candidate(entry, row, replace(decoded, pixels=None))


def resized_to(buckets: Buckets) -> Callable[[int, int], tuple[int, int]]:
    """Return a function from an image's (width, height) to its largest stored size, or to itself if none is stored."""

    def largest(width: int, height: int) -> tuple[int, int]:
        sizes = [covering_size(width, height, shape) for _, shape in buckets.choose(width, height)]
        return max(sizes, default=(width, height))

    return largest


Measured = tuple[int, int, float]
"""Sizes in bytes as PNG and as stored, and PSNR in dB, of a lossless image that is stored in a lossy format."""


def measure_recoding(image: Image.Image, stored: bytes) -> Measured:
    before, after = (np.asarray(each.convert('RGB'), np.float32) for each in (image, Image.open(io.BytesIO(stored))))
    # A difference of zero counts as 100 dB.
    psnr_db = -10 * np.log10(max(1e-10, np.square((before - after) / 255).mean()))
    return len(encode(image, kind='png', quality=100)), len(stored), float(psnr_db)


def make_samples(
    candidate: Candidate,
    computed: Mapping[str, Any],
    *,
    settings: PrepareSettings,
    buckets: Buckets,
    recoded: list[Measured],
) -> list[tuple[str, dict[str, Any]]]:
    """Return (bucket name, sample) for each resolution that `buckets` chooses, from small to large.

    Raise Unfit if a column filter or the size rejects the image. Measurements of lossy copies are added to `recoded`.
    """
    entry, row, decoded = candidate.entry, candidate.row, candidate.decoded
    assert entry.image is not None
    metadata = entry.metadata | dict(computed)
    if (problem := settings.filters.column_problem(metadata)) is not None:
        raise Unfit(problem)
    chosen = buckets.choose(decoded.width, decoded.height)
    if not chosen:
        raise Unfit('too_small')
    row.perceptual_hash, row.is_flat = perceptual_hash(decoded.image)
    shared: dict[str, Any] = {'captions': row.captions, 'key': row.key, 'metadata': _metadata(metadata, row)}
    if settings.source.caption_columns:
        shared[CAPTION_COLUMNS] = row.caption_columns
    samples = []
    for size, shape in chosen:
        # Always resize from the original, so that a bucket's bytes do not depend on the other sizes.
        encoded, (width, height) = _stored(entry.image, decoded, shape, settings, recoded)
        samples.append((buckets.name(size, shape), shared | {'image': encoded, 'width': width, 'height': height}))
    return samples


def thumbnail(image: Image.Image) -> bytes:
    small = image.convert('RGB')
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    encoded = io.BytesIO()
    small.save(encoded, 'JPEG', quality=70)
    return encoded.getvalue()


def _stored(
    encoded: bytes, decoded: DecodedImage, shape: Shape, settings: PrepareSettings, recoded: list[Measured]
) -> tuple[bytes, tuple[int, int]]:
    """Return the (file, (width, height)) to store: the original or a new encoding, resized unless `store: original`."""
    keep_original = settings.store == 'original'
    if keep_original and decoded.is_unmodified:
        return encoded, (decoded.width, decoded.height)
    size = covering_size(decoded.width, decoded.height, shape)
    image = decoded.image if keep_original else shrink(decoded.image, size, settings.resize)
    if max(image.size) > (MAX_WEBP_SIDE if decoded.lossless and settings.lossless_format == 'webp' else MAX_JPEG_SIDE):
        raise Unfit('too_long')
    kind = settings.lossless_format if decoded.lossless else 'jpeg'
    stored = encode(image, kind=kind, quality=settings.jpeg_quality)
    if decoded.lossless and kind != 'png' and len(recoded) < MEASURED_IMAGES:
        recoded.append(measure_recoding(image, stored))
    return stored, image.size


def _metadata(columns: Mapping[str, Any], row: InputRow) -> dict[str, Any]:
    """Return the metadata to store, sorted by name: `columns` except private ones, plus measurements and language."""
    kept = {name: json_value(value) for name, value in columns.items() if name not in PRIVATE_COLUMNS}
    measured = {
        'caption_length': row.caption_length,
        'perceptual_hash': f'{row.perceptual_hash:016x}',
        'source_height': row.height,
        'source_width': row.width,
    }
    language = next((str(columns[name]) for name in LANGUAGE_COLUMNS if columns.get(name)), None)
    return dict(sorted((kept | measured | ({'language': language} if language else {})).items()))
