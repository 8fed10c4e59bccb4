"""Histograms of the images of a dataset for its report."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from diffusion.prepare.caption_tokens import CLIP_TOKENS, clip_token_counts
from diffusion.prepare.catalog import Catalog

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
SIDES = [0, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192]
ASPECTS = [0.0, 0.25, 0.33, 0.4, 0.5, 0.57, 0.67, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.33, 1.5, 1.78, 2.0, 2.5, 3.0, 4.0]
NUMBERS = [1, 2, 3, 4, 5, 6, 10, 20, 50, 100]
TOKENS = [0, 10, 20, 30, 40, 50, 60, 70, CLIP_TOKENS + 1, 100, 150, 200, 256, 512, 1024]
COUNTED_CAPTIONS = 10_000
"""Maximum number of captions whose tokens are counted, which takes about a second."""
LENGTHS = [0, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000, 2000]


def statistics_of(catalog: Catalog, images: np.ndarray) -> dict[str, Any]:
    """Return histograms over the images in these rows, for the report of a preparation.

    One each of shorter side and aspect ratio before resizing, of the number of captions of an image, of the length of
    its longest caption, and of the number of CLIP tokens of a caption.
    """
    width, height, length = (catalog.columns[name][images] for name in ('width', 'height', 'caption_length'))
    tokens = clip_token_counts(some_captions(catalog, images))
    return {
        'shorter side, pixels': _histogram(np.minimum(width, height), SIDES),
        'aspect, width over height': _histogram(width / height, ASPECTS),
        'captions per image': _histogram(caption_numbers(catalog, images), NUMBERS),
        'longest caption, characters': _histogram(length, LENGTHS),
        'captions, CLIP tokens': _histogram(tokens, TOKENS),
    }


def long_captions_note(statistics: Mapping[str, Any]) -> str | None:
    """Return a message about the captions that are longer than CLIP's text encoders read, or None if there are none."""
    found = statistics['captions, CLIP tokens']
    counts = np.array(found['counts'])
    share = counts[np.array(found['edges']) > CLIP_TOKENS].sum() / max(1, counts.sum())
    if not share:
        return None
    return (
        f'{share:.1%} of the captions have more than the {CLIP_TOKENS} tokens that CLIP reads, and a model with CLIP '
        'ignores the rest of each'
    )


def some_captions(catalog: Catalog, images: np.ndarray) -> list[str]:
    """Return at most COUNTED_CAPTIONS captions of the images in these rows, from images at equal distances."""
    chosen = _at_equal_distances(images)
    found = [caption for part in catalog.captions(chosen) for caption in part.flatten().to_pylist()]
    return list(_at_equal_distances(found))


def caption_numbers(catalog: Catalog, images: np.ndarray) -> np.ndarray:
    """Return the number of captions of each of the images in these rows, which are sorted."""
    found = [part.value_lengths().to_numpy() for part in catalog.captions(images)]
    return np.concatenate([np.zeros(0, np.int32), *found])


def _at_equal_distances(values: Any) -> Any:
    """Return at most COUNTED_CAPTIONS of some values."""
    return values[:: max(1, -(-len(values) // COUNTED_CAPTIONS))]


def _histogram(values: np.ndarray, edges: list[Any]) -> dict[str, Any]:
    """Return bin edges, counts and quantiles; the last bin has no upper edge."""
    counts, _ = np.histogram(values, [*edges, np.inf])
    if not len(values):  # an added delivery of which no image was kept
        return {'edges': edges, 'counts': counts.tolist(), 'quantiles': {}}
    quantiles = np.quantile(values, QUANTILES)
    return {
        'edges': edges,
        'counts': counts.tolist(),
        'quantiles': {
            f'{share:.0%}': round(float(value), 3) for share, value in zip(QUANTILES, quantiles, strict=True)
        },
    }
