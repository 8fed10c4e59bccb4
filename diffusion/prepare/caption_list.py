"""List of captions of the training images, so that a user knows which prompts a model of this dataset can answer."""

from collections.abc import Iterator

import numpy as np

from diffusion.prepare.catalog import TRAIN, Catalog
from diffusion.prepare.sample_table import read_captions

CAPTIONS = 'captions.txt'
MAX_CAPTIONS = 10_000


def caption_list(catalog: Catalog) -> str:
    """Return the first 10,000 distinct captions of the training images, sorted, one per line."""
    # Select before sorting: the first 10,000 of all sorted captions of a large dataset would all begin with A.
    distinct: dict[str, None] = {}
    for caption in _captions(catalog):
        distinct[caption] = None
        if len(distinct) == MAX_CAPTIONS:
            break
    return ''.join(f'{caption}\n' for caption in sorted(distinct))


def _captions(catalog: Catalog) -> Iterator[str]:
    """Yield the captions of the training images in input order; those of one part without repetitions."""
    images = catalog.images(TRAIN)
    edges = np.searchsorted(images, catalog.first_row)
    for number, folder in enumerate(catalog.parts):
        chosen = images[edges[number] : edges[number + 1]]
        captions = read_captions(folder)
        if captions is None:  # a part of an earlier version; its captions are only in its samples
            for image in chosen:
                yield from catalog.stored_sample(catalog.first_sample(image))['captions']
        elif len(chosen):
            # In Arrow, since a dataset of labels has few distinct captions and so is read to its end.
            of_each = captions.take(chosen - catalog.first_row[number]).combine_chunks()
            yield from of_each.flatten().unique().to_pylist()
