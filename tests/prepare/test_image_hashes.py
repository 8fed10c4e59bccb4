"""Image hashes, and the search for duplicates."""

import io
import time
import tracemalloc
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from drawn import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from diffusion.prepare import image_hashes
from diffusion.prepare.image_hashes import duplicates, exact_hash, find_known, perceptual_hash


def scene(seed: int, side: int = 256) -> Image.Image:
    """Return an image with photograph-like statistics: structures of all sizes, mostly coarse, and some noise."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((side, side, 3))
    for octave in range(2, 7):
        coarse = Image.fromarray(rng.integers(0, 256, (2**octave, 2**octave, 3), np.uint8))
        pixels += np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), float) / octave
    pixels = (pixels - pixels.mean()) / pixels.std() * 45 + 120 + rng.normal(0, 3, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def distance(one: Image.Image, other: Image.Image) -> int:
    return (perceptual_hash(one).bits ^ perceptual_hash(other).bits).bit_count()


def jpeg(image: Image.Image, quality: int) -> Image.Image:
    return Image.open(io.BytesIO(encode(image, quality=quality))).convert('RGB')


def test_exact_hash_depends_on_pixels_and_size() -> None:
    image = scene(0, 64)
    changed = image.copy()
    changed.putpixel((5, 5), (1, 2, 3))
    blank = Image.new('RGB', (8, 2)), Image.new('RGB', (2, 8)), Image.new('RGB', (4, 4))
    assert exact_hash(image) == exact_hash(scene(0, 64))
    assert len({exact_hash(each) for each in (image, changed, *blank)}) == 5
    assert 0 <= exact_hash(image) < 2**64


def test_perceptual_hash_equals_the_dct_of_the_paper() -> None:
    # Compare with the formula in floating point; skip coefficients near the median, where rounding decides.
    for seed in range(6):
        image = scene(seed)
        luma = np.asarray(image.convert('L').resize((32, 32), Image.Resampling.BOX), np.float64)
        u, x = np.mgrid[0:8, 0:32]
        basis = np.cos(np.pi * u * (2 * x + 1) / 64) * np.where(u == 0, np.sqrt(1 / 32), np.sqrt(2 / 32))
        low = (basis @ luma @ basis.T).ravel()
        bits = [(perceptual_hash(image).bits >> (63 - at)) & 1 for at in range(64)]
        clear = np.abs(low - np.median(low)) > 0.5
        assert clear.sum() > 50
        assert np.array_equal(np.array(bits, bool)[clear], (low > np.median(low))[clear])


def test_perceptual_hashes_are_near_only_for_similar_images() -> None:
    similar, different = [], []
    for seed in range(9):
        image = scene(seed)
        changed = [image.resize((150, 180)), jpeg(image, 40), ImageEnhance.Brightness(image).enhance(1.1)]
        similar += [distance(image, each) for each in changed]
        different += [distance(image, scene(seed + other)) for other in (1, 17)]
    assert np.mean(np.array(similar) <= 4) > 0.95
    assert min(different) > 8


def test_images_without_content_are_flat() -> None:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(120, 136, (256, 256, 3), np.uint8))
    blank = [Image.new('RGB', size, 'navy') for size in ((64, 64), (1, 1), (3, 2000), (2000, 3))]
    assert all(perceptual_hash(image).is_flat and 0 <= exact_hash(image) < 2**64 for image in (*blank, noise))
    assert not any(perceptual_hash(scene(seed)).is_flat for seed in range(10))
    levels = (np.array([[100, 100 + step]], np.uint8) for step in (7, 8, 9))
    halves = [Image.fromarray(np.repeat(each, 16, 1).repeat(32, 0)) for each in levels]
    assert [perceptual_hash(image).is_flat for image in halves] == [True, False, False]


def reference(exact: np.ndarray, perceptual: np.ndarray, meaningful: np.ndarray, limit: int) -> list[int]:
    """Return the result of `duplicates` by comparing each image with all earlier ones."""
    found: list[int] = []
    for at in range(len(exact)):
        kept = [before for before in range(at) if found[before] < 0]
        found.append(first_copy(at, kept, exact, perceptual, meaningful, limit))
    return found


def first_copy(at: int, others: Iterable[int], exact: Any, perceptual: Any, meaningful: Any, limit: int) -> int:
    """Return the first of some images of which an image is a copy; -1 if there is none."""
    for other in others:
        near = (int(perceptual[at]) ^ int(perceptual[other])).bit_count() <= limit
        if exact[at] == exact[other] or (near and meaningful[at] and meaningful[other]):
            return other
    return -1


def find(perceptual: np.ndarray, limit: int) -> np.ndarray:
    count = len(perceptual)
    return duplicates(np.arange(count, dtype=np.uint64), perceptual, np.ones(count, bool), max_distance=limit)


@st.composite
def populations(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draw families of hashes that differ in a few bits; some are equal, and some are not meaningful."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, families, flips = draw(st.integers(0, 90)), draw(st.integers(1, 8)), draw(st.integers(0, 9))
    perceptual = rng.integers(0, 2**64, families, dtype=np.uint64)[rng.integers(0, families, count)]
    for _ in range(flips):
        bits = np.uint64(1) << rng.integers(0, 64, count, dtype=np.uint64)
        perceptual = np.where(rng.random(count) < 0.5, perceptual ^ bits, perceptual)
    # Equal images have equal perceptual hashes and equal values of `meaningful`.
    meaningful = perceptual % np.uint64(4) > 0
    exact = np.where(rng.random(count) < 0.6, perceptual, np.arange(count, dtype=np.uint64))
    return exact, perceptual, meaningful, draw(st.integers(0, 8))


@pytest.mark.parametrize(
    ('all_pairs_limit', 'max_comparisons', 'max_pairs'),
    [(2048, 1000, 16), (8, 1000, 1000), (8, 5, 16), (4, 1000, 1), (2, 0, 0)],
)
def test_duplicates_equal_a_comparison_of_all_pairs(
    monkeypatch: pytest.MonkeyPatch, all_pairs_limit: int, max_comparisons: int, max_pairs: int
) -> None:
    # The limits are so small that every code path that bounds time and memory is taken.
    monkeypatch.setattr(image_hashes, 'ALL_PAIRS_LIMIT', all_pairs_limit)
    monkeypatch.setattr(image_hashes, 'MAX_COMPARISONS_PER_HASH', max_comparisons)
    monkeypatch.setattr(image_hashes, 'MAX_PAIRS_PER_HASH', max_pairs)

    @settings(max_examples=25, deadline=None)
    @given(populations())
    def check(population: tuple[Any, ...]) -> None:
        exact, perceptual, meaningful, limit = population
        found = duplicates(exact, perceptual, meaningful, max_distance=limit)
        assert found.dtype == np.int64
        assert found.tolist() == reference(exact, perceptual, meaningful, limit)

    check()


@pytest.mark.parametrize('chunk', [3, 2**18])
def test_known_images_are_found_as_by_a_comparison_of_all_pairs(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(image_hashes, 'CHUNK', chunk)

    @settings(max_examples=30, deadline=None)
    @given(populations(), st.integers(0, 90))
    def check(population: tuple[Any, ...], known: int) -> None:
        known = min(known, len(population[0]))
        earlier, new = ([column[part] for column in population[:3]] for part in (slice(known), slice(known, None)))
        found = find_known(tuple(earlier), tuple(new), max_distance=population[3])
        assert found.dtype == np.int64
        expected = [first_copy(at, range(known), *population) for at in range(known, len(population[0]))]
        assert found.tolist() == expected

    check()


@pytest.mark.parametrize('kind', ['equal', 'families'])
def test_search_of_100_000_similar_hashes_is_bounded_in_time_and_memory(kind: str) -> None:
    rng = np.random.default_rng(0)
    count = 100_000
    perceptual = np.full(count, 77, np.uint64)
    if kind == 'families':
        perceptual = rng.integers(0, 2**64, count, dtype=np.uint64)
        perceptual[50_000:55_000] = perceptual[:5000] ^ np.uint64(0b1011)
    start = time.monotonic()
    tracemalloc.start()
    found = find(perceptual, 4)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.monotonic() - start < 20
    assert peak_bytes < 300 * 2**20
    kept = perceptual[found < 0]
    assert np.sum(found >= 0) >= {'equal': count - 1, 'families': 5000}[kind]
    distances = np.bitwise_xor.outer(kept[:500], kept[:500])[~np.eye(min(500, len(kept)), dtype=bool)]
    assert all(int(each).bit_count() > 4 for each in np.unique(distances))
    dropped = np.flatnonzero(found >= 0)[:2000]
    assert all((int(perceptual[at]) ^ int(perceptual[found[at]])).bit_count() <= 4 for at in dropped)


def test_distance_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match='max_distance=9 is out of range; give 0 to 8 bits'):
        find(np.zeros(1, np.uint64), 9)
