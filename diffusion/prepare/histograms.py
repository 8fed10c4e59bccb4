"""Histograms of the images of a dataset for its report."""

from typing import Any

import numpy as np

from diffusion.prepare.catalog import Catalog

QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
SIDES = [0, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192]
ASPECTS = [0.0, 0.25, 0.33, 0.4, 0.5, 0.57, 0.67, 0.75, 0.8, 0.9, 1.0, 1.1, 1.25, 1.33, 1.5, 1.78, 2.0, 2.5, 3.0, 4.0]
LENGTHS = [0, 10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 500, 1000, 2000]


def statistics_of(catalog: Catalog, images: np.ndarray) -> dict[str, Any]:
    """Return histograms of images, given their rows: shorter side and aspect ratio before resizing, longest caption."""
    width, height, length = (catalog.columns[name][images] for name in ('width', 'height', 'caption_length'))
    return {
        'shorter side, pixels': _histogram(np.minimum(width, height), SIDES),
        'aspect, width over height': _histogram(width / height, ASPECTS),
        'longest caption, characters': _histogram(length, LENGTHS),
    }


def _histogram(values: np.ndarray, edges: list[Any]) -> dict[str, Any]:
    """Return bin edges, counts and quantiles; the last bin has no upper edge."""
    counts, _ = np.histogram(values, [*edges, np.inf])
    quantiles = np.quantile(values, QUANTILES)
    return {
        'edges': edges,
        'counts': counts.tolist(),
        'quantiles': {
            f'{share:.0%}': round(float(value), 3) for share, value in zip(QUANTILES, quantiles, strict=True)
        },
    }
