"""Thumbnails for the report: the first images of each bucket and of each rejection reason, in input order."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from diffusion.evaluation.image_sheet import Figure
from diffusion.prepare.catalog import DUPLICATE, Catalog
from diffusion.prepare.convert_part import FORMAT, THUMBNAILS_FILE, header_sizes
from diffusion.prepare.process_sample import thumbnail
from diffusion.prepare.work_dir import read_json
from diffusion.storage import mds

THUMBNAILS_PER_BUCKET = 8
THUMBNAILS_PER_REASON = 6
MAX_BUCKET_THUMBNAILS = 300
"""Maximum number of thumbnails of all buckets; one takes 4 to 7 kB of the page."""
MAX_REASONS = 30
"""Maximum number of reasons with thumbnails."""


def of_buckets(catalog: Catalog, buckets: Sequence[str]) -> dict[str, list[Figure]]:
    """Return thumbnails for the report by bucket: its first images, each with its first caption."""
    each = max(1, min(THUMBNAILS_PER_BUCKET, MAX_BUCKET_THUMBNAILS // len(buckets)))
    first = {name: catalog.rows_of_bucket(code)[:each] for code, name in enumerate(buckets)}
    return {name: [_stored(catalog, row) for row in rows] for name, rows in first.items() if len(rows)}


def of_reasons(catalog: Catalog, repeats: Sequence[tuple[int, int]]) -> dict[str, list[Figure]]:
    """Return thumbnails for the report by rejection reason: the first rejected images, each with its key.

    Images that cannot be decoded are skipped. A duplicate also names the image that it duplicates.

    Args:
        catalog: Table of all inputs.
        repeats: (duplicate, original) row numbers of duplicates.
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
        shown[DUPLICATE] = [_stored(catalog, row, original) for row, original in repeats[:THUMBNAILS_PER_REASON]]
    return shown


def _stored(catalog: Catalog, row: int | np.integer, original: int | None = None) -> Figure:
    """Return a thumbnail of the image in `row` with its caption or, for a duplicate, the key of its original image."""
    folder = catalog.parts[int(catalog.part[row])]
    shard, offset, size = (int(catalog.columns[name][row]) for name in ('shard', 'offset', 'size'))
    with (folder / mds.shard_name(shard)).open('rb') as file:
        file.seek(header_sizes(folder)[shard] + offset)
        sample = FORMAT.decode(file.read(size))
    text = sample['captions'][0] if original is None else f'{sample["key"]} (duplicate of {catalog.key(original)})'
    return Figure([thumbnail(Image.open(io.BytesIO(sample['image'])))], text)
