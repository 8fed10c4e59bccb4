"""Thumbnails for the report: the first pictures of every bucket and of every reason, by the order of the input."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from diffusion.evaluation.image_sheet import Figure
from diffusion.prepare.catalog import DUPLICATE, Catalog
from diffusion.prepare.convert_part import FORMAT, THUMBNAILS, samples_begin
from diffusion.prepare.process_sample import thumbnail
from diffusion.prepare.work_dir import read_json
from diffusion.storage import mds

A_BUCKET = 8
A_REASON = 6
MOST = 300
"""Thumbnails of buckets on a page; one takes 4 to 7 kB there."""
REASONS = 30
"""Reasons with thumbnails."""


def of_buckets(catalog: Catalog, buckets: Sequence[str]) -> dict[str, list[Figure]]:
    """Stored pictures with their first captions, by bucket."""
    each = max(1, min(A_BUCKET, MOST // len(buckets)))
    first = {name: catalog.of_bucket(code)[:each] for code, name in enumerate(buckets)}
    return {name: [_stored(catalog, at) for at in rows] for name, rows in first.items() if len(rows)}


def of_reasons(catalog: Catalog, repeats: Sequence[tuple[int, int]]) -> dict[str, list[Figure]]:
    """Pictures that are left out, where they can be seen, with their keys, by reason.

    Args:
        catalog: With the parts.
        repeats: Pictures that repeat others, each with that one.
    """
    missing = set(catalog.rejected) - {DUPLICATE}
    shown: dict[str, list[Figure]] = {}
    for folder in catalog.parts:
        for each in read_json(folder / THUMBNAILS) if missing else ():
            entries = shown.setdefault(each['reason'], []) if len(shown) < REASONS else shown.get(each['reason'], [])
            if len(entries) < A_REASON:
                text = f'{each["key"]} ({each["detail"]})' if each['detail'] else each['key']
                entries.append(Figure([base64.b64decode(each['image'])], text))
        missing -= {reason for reason, entries in shown.items() if len(entries) == A_REASON}
    if repeats:
        shown[DUPLICATE] = [_stored(catalog, at, of) for at, of in repeats[:A_REASON]]
    return shown


def _stored(catalog: Catalog, at: int | np.integer, of: int | None = None) -> Figure:
    """A picture that has a sample in its part's shards."""
    folder = catalog.parts[int(catalog.part[at])]
    shard, offset, size = (int(catalog.columns[name][at]) for name in ('shard', 'offset', 'size'))
    with (folder / mds.shard_name(shard)).open('rb') as file:
        file.seek(samples_begin(folder)[shard] + offset)
        sample = FORMAT.decode(file.read(size))
    text = sample['captions'][0] if of is None else f'{sample["key"]} (duplicate of {catalog.key(of)})'
    return Figure([thumbnail(Image.open(io.BytesIO(sample['image'])))], text)
