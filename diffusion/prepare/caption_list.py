"""List of captions of the training images, so that a user knows which prompts a model of this dataset can answer."""

from diffusion.prepare.catalog import TRAIN, Catalog

CAPTIONS = 'captions.txt'
MAX_CAPTIONS = 10_000


def caption_list(catalog: Catalog) -> str:
    """Return the first 10,000 distinct captions of the training images, sorted, one per line."""
    # Select before sorting: the first 10,000 of all sorted captions of a large dataset would all begin with A.
    # Repetitions are removed in Arrow first: a dataset of labels has few distinct captions and so is read to its end.
    parts = (part.flatten().unique() for part in catalog.captions(catalog.images(TRAIN)))
    distinct: dict[str, None] = {}
    for caption in (caption for part in parts for caption in part.to_pylist()):
        distinct[caption] = None
        if len(distinct) == MAX_CAPTIONS:
            break
    return ''.join(f'{caption}\n' for caption in sorted(distinct))
