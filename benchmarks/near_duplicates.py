"""Benchmark of the search of `diffusion prepare --append` for near-duplicates of new images in a finished dataset.

    python benchmarks/near_duplicates.py [IMAGES [DELIVERED [DISTANCE [all]]]]

IMAGES (default: 10,000,000) random hashes are those of the dataset, and DELIVERED (default: 10,000) those of the new
images, of which a tenth differ from one of the dataset in two bits. With `all`, it also compares all images of both
with each other, as a first preparation does, in one run.
"""

import resource
import sys
import time
from collections.abc import Callable

import numpy as np
from machine import heading

from diffusion.prepare.image_hashes import duplicates, find_known

Hashes = tuple[np.ndarray, np.ndarray, np.ndarray]


def main(images: int = 10_000_000, delivered: int = 10_000, distance: int = 4, compare: str = '') -> None:
    """Run the benchmark and print its table."""
    rng = np.random.default_rng(0)
    known, new = draw(images, rng), draw(delivered, rng)
    copies = delivered // 10
    new[1][:copies] = known[1][rng.integers(0, images, copies)] ^ np.uint64(0b10100)
    print(f'{heading()}; {images:,} images, {delivered:,} delivered, at most {distance} bits')
    print()
    print('| search | seconds | peak of the process, GB | duplicates |')
    print('|---|---|---|---|')
    row('of the delivery in the dataset', lambda: find_known(known, new, max_distance=distance))
    if compare == 'all':
        exact, perceptual, meaningful = (np.concatenate(pair) for pair in zip(known, new, strict=True))
        row('of all images', lambda: duplicates(exact, perceptual, meaningful, max_distance=distance)[images:])


def draw(count: int, rng: np.random.Generator) -> Hashes:
    """Return the arguments `exact`, `perceptual` and `meaningful` of `duplicates` for unrelated images."""
    exact, perceptual = rng.integers(0, 2**64, (2, count), dtype=np.uint64)
    return exact, perceptual, np.ones(count, bool)


def row(name: str, search: Callable[[], np.ndarray]) -> None:
    """Print the row of a search."""
    started = time.perf_counter()
    found = int((search() >= 0).sum())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f'| {name} | {time.perf_counter() - started:.1f} | {peak:.2f} | {found} |')


if __name__ == '__main__':
    arguments = sys.argv[1:]
    main(*(int(float(word)) for word in arguments[:3]), *arguments[3:4])  # type: ignore[arg-type]
