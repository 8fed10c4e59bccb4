"""Thumbnails for the report: the first images, in input order, of each bucket and rejection reason, and held out."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from diffusion.evaluation.image_sheet import Figure
from diffusion.prepare.catalog import DUPLICATE, HELD_OUT, TRAIN, Catalog
from diffusion.prepare.convert_part import THUMBNAILS_FILE
from diffusion.prepare.process_sample import thumbnail
from diffusion.prepare.work_dir import read_json

THUMBNAILS_PER_BUCKET = 8
THUMBNAILS_PER_REASON = 6
MAX_BUCKET_THUMBNAILS = 300
"""Maximum number of thumbnails of all buckets; one takes 4 to 7 kB of the page."""
MAX_REASONS = 30
"""Maximum number of reasons with thumbnails."""


def of_buckets(catalog: Catalog, buckets: Sequence[str]) -> dict[str, list[Figure]]:
    """Return thumbnails for the report by bucket: its first training images, each with its first caption."""
    each = max(1, min(THUMBNAILS_PER_BUCKET, MAX_BUCKET_THUMBNAILS // len(buckets)))
    first = {name: catalog.samples_in(code, TRAIN)[:each] for code, name in enumerate(buckets)}
    return {name: [_figure(catalog, number) for number in numbers] for name, numbers in first.items() if len(numbers)}


def of_held_out(catalog: Catalog) -> list[Figure]:
    """Return thumbnails for the report: the first held-out images, each with its first caption."""
    images = catalog.images(HELD_OUT)[:THUMBNAILS_PER_BUCKET]
    return [_figure(catalog, catalog.first_sample(image)) for image in images]


def of_reasons(catalog: Catalog, repeats: Sequence[tuple[int, str]]) -> dict[str, list[Figure]]:
    """Return thumbnails for the report by rejection reason: the first rejected images, each with its key.

    Images that cannot be decoded are skipped. A duplicate also names the image that it duplicates.

    Args:
        repeats: (row number, key of the original) of duplicates.
    """
    missing = set(catalog.rejected) - {DUPLICATE}
    shown: dict[str, list[Figure]] = {}
    for folder in catalog.parts:
        for record in read_json(folder / THUMBNAILS_FILE) if missing else ():
            entries = (
                shown.setdefault(record['reason'], []) if len(shown) < MAX_REASONS else shown.get(record['reason'], [])
            )
            if len(entries) < THUMBNAILS_PER_REASON:
                text = f'{record["key"]} ({record["detail"]})' if record['detail'] else record['key']
                entries.append(Figure([base64.b64decode(record['image'])], text))
        missing -= {reason for reason, entries in shown.items() if len(entries) == THUMBNAILS_PER_REASON}
    if repeats:
        first = repeats[:THUMBNAILS_PER_REASON]
        shown[DUPLICATE] = [_figure(catalog, catalog.first_sample(row), original) for row, original in first]
    return shown


def _figure(catalog: Catalog, number: int | np.integer, original: str | None = None) -> Figure:
    """Return a thumbnail of a stored sample with its first caption or, for a duplicate, the key of its original image.

    Args:
        number: Number of the sample.
        original: Key of the image that it duplicates, if any.
    """
    sample = catalog.stored_sample(number)
    text = sample['captions'][0] if original is None else f'{sample["key"]} (duplicate of {original})'
    return Figure([thumbnail(Image.open(io.BytesIO(sample['image'])))], text)
