"""From an entry of the source to a sample of the dataset, or the reason why it is left out."""

import io
from collections.abc import Mapping
from typing import Any

from PIL import Image

from diffusion.config.image_shapes import Shape
from diffusion.prepare.bucket_choice import Buckets
from diffusion.prepare.caption_cleaning import clean_captions
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.image_decoding import Clean, Unfit, clean, encode, fitted
from diffusion.prepare.image_hashes import exact_hash, is_flat, perceptual_hash
from diffusion.prepare.sample_table import SampleRow
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Entry

LANGUAGES = ('language', 'LANGUAGE', 'lang')
"""Columns that say what language the captions are in."""
PRIVATE = frozenset({'exif', 'EXIF'})
"""What img2dataset copies out of a picture's file: the place, the camera and its owner's name stay out."""
MAX_JPEG_SIDE = 65_500
THUMBNAIL_SIDE = 96


def take(entry: Entry, row: SampleRow, *, settings: PrepareSettings, buckets: Buckets) -> dict[str, Any]:
    """The sample of an entry; what is learnt on the way goes into its row, also when it is left out.

    Raises:
        Unfit: It is left out.
    """
    if entry.problem is not None:
        raise Unfit(entry.problem)
    filters = settings.filters
    captions = clean_captions(entry.captions, min_length=filters.min_caption, max_length=filters.max_caption)
    row.caption_length = max(map(len, captions))
    if entry.image is None:
        raise Unfit('no_image')
    picture = clean(entry.image, background=settings.background, max_pixels=settings.max_pixels)
    row.width, row.height = picture.width, picture.height
    problem = filters.problem(picture.width, picture.height, captions, entry.metadata)
    if problem is not None:
        raise Unfit(problem)
    bucket = buckets.of(picture.width, picture.height)
    if bucket is None:
        raise Unfit('too_small')
    row.bucket = buckets.name(*bucket)
    row.exact_hash, row.perceptual_hash = exact_hash(picture.image), perceptual_hash(picture.image)
    row.is_flat = is_flat(picture.image)
    encoded, (width, height) = _stored(entry.image, picture, bucket[1], settings)
    return {
        'image': encoded,
        'captions': captions,
        'width': width,
        'height': height,
        'key': row.key,
        'metadata': _metadata(entry.metadata, row),
    }


def thumbnail(image: Image.Image) -> bytes:
    """A small JPEG of a picture."""
    small = image.convert('RGB')
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    encoded = io.BytesIO()
    small.save(encoded, 'JPEG', quality=70)
    return encoded.getvalue()


def _stored(found: bytes, picture: Clean, shape: Shape, settings: PrepareSettings) -> tuple[bytes, tuple[int, int]]:
    """What is stored of a picture, and its width and height."""
    original = settings.store == 'original'
    if original and picture.as_found:
        return found, (picture.width, picture.height)
    image = picture.image if original else fitted(picture.image, shape)
    if max(image.size) > MAX_JPEG_SIDE:
        raise Unfit('too_long')
    return encode(image, lossless=picture.lossless, jpeg_quality=settings.jpeg_quality), image.size


def _metadata(found: Mapping[str, Any], row: SampleRow) -> dict[str, Any]:
    """What the source says of a picture, and what was measured."""
    kept = {name: json_value(value) for name, value in found.items() if name not in PRIVATE}
    measured = {
        'caption_length': row.caption_length,
        'perceptual_hash': f'{row.perceptual_hash:016x}',
        'source_height': row.height,
        'source_width': row.width,
    }
    language = next((str(found[name]) for name in LANGUAGES if found.get(name)), None)
    return dict(sorted((kept | measured | ({'language': language} if language else {})).items()))
