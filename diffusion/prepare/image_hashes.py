"""Exact and perceptual image hashes, and search for duplicates and near-duplicates."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb, log2
from typing import NamedTuple

import numpy as np
import xxhash
from PIL import Image

from diffusion.errors import UserError

THUMBNAIL_SIDE = 32
LOW_FREQUENCIES = 8
"""Number of DCT frequencies per direction in the perceptual hash: 8 x 8 = 64 bits."""
FLAT_LEVELS = 4.0
"""Minimum standard deviation of a thumbnail's 8-bit values; below it, noise determines the perceptual hash."""
MAX_DISTANCE = 8
ALL_PAIRS_LIMIT = 2048
MAX_COMPARISONS_PER_HASH = 1000
"""Maximum average number of comparisons per hash; above it, the search restarts with more and smaller groups."""
MAX_PAIRS_PER_HASH = 16
MAX_TABLES = 1000
"""Maximum number of times that a repeated search sorts the hashes; only the first search may sort more often."""
CHUNK = 2**18
"""Number of hashes to compare with a sorted table at a time; with intermediate results, they fit in the CPU cache."""


def exact_hash(image: Image.Image, pixels: np.ndarray | None = None, size: tuple[int, int] | None = None) -> int:
    """Return a 64-bit XXH3 hash of an image's size and RGB pixels.

    Args:
        pixels: The image's pixels, uint8 [H, W, 3], to avoid a copy; None means to take them from the image.
        size: (width, height) in the file, if the image was decoded at a reduced size; None means the image's size.
    """
    # Include the size: single-color images with the same number of pixels have the same bytes.
    width, height = size or image.size
    state = xxhash.xxh3_64(f'{width}x{height}:'.encode())
    if pixels is None:
        pixels = np.asarray(image if image.mode == 'RGB' else image.convert('RGB'))
    state.update(np.ascontiguousarray(pixels).data)
    return state.intdigest()


class PerceptualHash(NamedTuple):
    bits: int
    is_flat: bool
    """True if the image has too little contrast for the hash to be meaningful."""


def perceptual_hash(image: Image.Image) -> PerceptualHash:
    """Return a 64-bit hash that changes in only a few bits if the image is resized, recompressed or slightly edited.

    pHash (Zauner 2010, Implementation and Benchmarking of Perceptual Image Hash Functions): take the DCT of a 32 x 32
    thumbnail, keep the lowest 8 x 8 frequencies, and set a bit for each value above their median.
    """
    pixels = np.asarray(image.convert('L').resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BOX))
    # Use integer arithmetic, so that the hash is the same on every machine.
    low = _cosines() @ pixels.astype(np.int64) @ _cosines().T
    bits = (low > np.sort(low, axis=None)[31]).ravel()  # 32 of 64 values are above the median, unless there are ties
    return PerceptualHash(int.from_bytes(np.packbits(bits).tobytes(), 'big'), float(pixels.std()) < FLAT_LEVELS)


def duplicates(exact: np.ndarray, perceptual: np.ndarray, meaningful: np.ndarray, *, max_distance: int) -> np.ndarray:
    """Return -1 for each image that is kept, and for each other one the index of the first kept image it duplicates.

    An image is a duplicate of an earlier kept one if their exact hashes are equal, or if their perceptual hashes differ
    in at most `max_distance` bits (0 to 8). Images with equal exact hashes must have equal perceptual hashes.

    Args:
        exact: Exact hashes, uint64 [N], in order of precedence.
        perceptual: Perceptual hashes, uint64 [N].
        meaningful: Bool [N]; False means that the image's perceptual hash is ignored.
    """
    # Compare only distinct perceptual hashes: first replace each image with the first image that has the same exact
    # hash, then with the first one that has the same perceptual hash.
    check_distance(max_distance)
    first = _first_of_equal(exact)
    unique = np.flatnonzero(first == np.arange(len(exact)))
    comparable = unique[meaningful[unique]]
    first[comparable] = comparable[_first_of_equal(perceptual[comparable])]
    distinct = comparable[first[comparable] == comparable]
    repeated = np.full(len(exact), -1)
    found = _greedy(perceptual[distinct], max_distance)
    repeated[distinct[found >= 0]] = distinct[found[found >= 0]]
    # A replaced image is a duplicate of its replacement or, if the replacement is itself a duplicate, of the
    # replacement's original.
    root = first[first]
    return np.where(repeated[root] >= 0, repeated[root], np.where(root == np.arange(len(exact)), -1, root))


def find_known(
    known: tuple[np.ndarray, np.ndarray, np.ndarray],
    images: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    max_distance: int,
) -> np.ndarray:
    """Return, for each of M images, the index of the first of N known images that it duplicates, or -1 if it is new.

    Both are given as the arrays (exact, perceptual, meaningful) described in `duplicates`. This is fast for few
    images and many known ones, because it does not sort the known hashes. Unlike in `duplicates`, a known image counts
    even if it duplicates another one.
    """
    check_distance(max_distance)
    found = _first_near(known[0], images[0], 0)
    known_rows, rows = np.flatnonzero(known[2]), np.flatnonzero(images[2])
    if not len(known_rows) or not len(rows):
        return found
    near = _first_near(known[1][known_rows], images[1][rows], max_distance)
    near = np.where(near < 0, len(known[0]), known_rows[near])
    found[found < 0] = len(known[0])
    found[rows] = np.minimum(found[rows], near)
    return np.where(found == len(known[0]), -1, found)


def check_distance(max_distance: int) -> None:
    """Raise UserError if a maximum Hamming distance for near-duplicates is not supported."""
    if not 0 <= max_distance <= MAX_DISTANCE:
        raise UserError(f'max_distance={max_distance} is out of range; give 0 to {MAX_DISTANCE} bits')


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """Return the DCT matrix's rows for the lowest frequencies as integers, [LOW_FREQUENCIES, THUMBNAIL_SIDE]."""
    # Values have 14 bits, so that no sum overflows int64.
    frequencies, samples = np.arange(LOW_FREQUENCIES)[:, None], np.arange(THUMBNAIL_SIDE) + 0.5
    cosines = np.cos(np.pi / THUMBNAIL_SIDE * frequencies * samples)
    cosines[0] /= np.sqrt(2)
    return (cosines * 2**14).round().astype(np.int64)


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """Return for each value the index of the first equal value."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]


def _greedy(hashes: np.ndarray, distance: int) -> np.ndarray:
    """Return -1 for each of the distinct hashes that is kept, else the index of a kept one within `distance` bits."""
    if distance == 0:
        return np.full(len(hashes), -1)
    if (pairs := _near_pairs(hashes, distance)) is not None:
        return _resolve(len(hashes), *pairs)
    # There are too many near pairs for memory, so most images are duplicates and few are kept. Split the hashes in
    # halves: compare the second half with the kept hashes of the first half, then its remaining hashes with each other.
    middle = len(hashes) // 2
    found = np.concatenate([_greedy(hashes[:middle], distance), np.full(len(hashes) - middle, -1)])
    kept = np.flatnonzero(found[:middle] < 0)
    nearest = _first_near(hashes[kept], hashes[middle:], distance)
    found[middle:] = np.where(nearest < 0, -1, kept[nearest])
    rest = middle + np.flatnonzero(nearest < 0)
    inner = _greedy(hashes[rest], distance)
    found[rest] = np.where(inner < 0, -1, rest[inner])
    return found


def _resolve(count: int, later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Return the same as `_greedy`, given the (later, earlier) indices of all pairs of near hashes."""
    # Reject an image only if it is near a kept image: being near is not transitive.
    found = np.full(count, -1)
    order = np.lexsort((earlier, later))
    for image, original in zip(later[order].tolist(), earlier[order].tolist(), strict=True):
        if found[original] < 0 and found[image] < 0:
            found[image] = original
    return found


def _near_pairs(hashes: np.ndarray, distance: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (later, earlier) indices of pairs that differ in at most `distance` bits; None if there are too many."""
    if len(hashes) <= ALL_PAIRS_LIMIT:
        later, earlier = np.tril_indices(len(hashes), -1)
        near = _within(hashes[later] ^ hashes[earlier], distance)
        return later[near], earlier[near]
    least = _fastest_blocks(distance, 10 * log2(len(hashes)), 10 * len(hashes))
    for blocks in range(least, least + 3):
        if blocks == least or comb(blocks, distance) <= MAX_TABLES:
            pairs = _pairs_by_blocks(hashes, distance, blocks)
            if pairs is not None:
                return pairs
    return None


def _pairs_by_blocks(hashes: np.ndarray, distance: int, blocks: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the same as `_near_pairs`; compare only hashes with at least `blocks - distance` equal blocks of bits."""
    # Near hashes are equal under at least one mask. For each mask, sort by the masked bits, so that candidates are
    # adjacent, and compare each hash with earlier hashes in its group.
    found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    compared = near = 0
    positions = np.arange(len(hashes))
    for mask in _masks(distance, blocks):
        order = np.argsort(hashes & mask)
        ordered = hashes[order]
        keys = ordered & mask
        first = np.maximum.accumulate(np.where(np.r_[True, keys[1:] != keys[:-1]], positions, 0))
        counts = positions - first
        compared += int(counts.sum())
        if compared > MAX_COMPARISONS_PER_HASH * len(hashes):
            return None
        for hash_index, match_index in _matches(ordered, first, counts, ordered, distance):
            found.append((order[hash_index], order[match_index]))
            near += len(hash_index)
            if near > MAX_PAIRS_PER_HASH * len(hashes):
                return None
    left, right = (np.concatenate([pair[side] for pair in found]) for side in (0, 1))
    return np.maximum(left, right), np.minimum(left, right)


def _first_near(kept: np.ndarray, hashes: np.ndarray, distance: int) -> np.ndarray:
    """Return, for each hash, the index of the first hash in `kept` that differs in at most `distance` bits, or -1."""
    # Sort the smaller array, and iterate over the larger one. Most hashes in the larger array are not near any in the
    # smaller one: a table with one byte per entry excludes them ten times as fast as a binary search.
    swapped = len(hashes) < len(kept)
    few, many = (hashes, kept) if swapped else (kept, hashes)
    found = np.full(len(hashes), len(kept))
    per_mask = 10 * len(few) * log2(len(few) + 2) + 10 * len(many)
    for mask in _masks(distance, _fastest_blocks(distance, per_mask, 20 * len(few) * len(many))):
        order = np.argsort(few & mask)
        ordered = few[order]
        keys = ordered & mask
        table = KeyTable(keys)
        for start in range(0, len(many), CHUNK):
            chunk = many[start : start + CHUNK]
            possible = np.flatnonzero(table.may_contain(chunk & mask))
            values = chunk[possible]
            first = np.searchsorted(keys, values & mask, 'left')
            counts = np.searchsorted(keys, values & mask, 'right') - first
            for value, match in _matches(ordered, first, counts, values, distance):
                pair = start + possible[value], order[match]
                of_hash, of_kept = pair[::-1] if swapped else pair
                np.minimum.at(found, of_hash, of_kept)
    return np.where(found == len(kept), -1, found)


class KeyTable:
    """Table for fast membership tests, similar to a Bloom filter: no false negatives, few false positives."""

    def __init__(self, keys: np.ndarray) -> None:
        self._bits = min(26, max(8, len(keys).bit_length() + 4))
        self._table = np.zeros(1 << self._bits, bool)
        self._table[self._entry(keys)] = True

    def may_contain(self, keys: np.ndarray) -> np.ndarray:
        """Return True for all keys in the table and for about 1 in 16 others; False for the rest."""
        return self._table[self._entry(keys)]

    def _entry(self, keys: np.ndarray) -> np.ndarray:
        # Multiplicative hashing by 2**64 divided by the golden ratio (Knuth, The Art of Computer Programming 3, 6.4).
        return keys * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - self._bits)


def _fastest_blocks(distance: int, per_mask: float, per_collision: float) -> int:
    """Return the number of blocks for the fastest search; `per_mask` and `per_collision` are estimated times in ns."""

    # More blocks mean more masks (each needs a sort), but smaller groups and thus fewer comparisons.
    def nanoseconds(blocks: int) -> float:
        bits = 64 * (blocks - distance) / blocks
        return comb(blocks, distance) * (per_mask + per_collision / 2**bits)

    return min(range(distance + 1, distance + 7), key=nanoseconds)


def _matches(
    ordered: np.ndarray, first: np.ndarray, counts: np.ndarray, hashes: np.ndarray, distance: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield near pairs (i, j) of `hashes[i]` and `ordered[j]`, with j in [first[i], first[i] + counts[i])."""
    # Step k compares every hash with its k-th candidate in one vector operation, so the number of steps is the size of
    # the largest group.
    active, offset = np.flatnonzero(counts), 0
    while len(active):
        candidates = first[active] + offset
        near = _within(ordered[candidates] ^ hashes[active], distance)
        yield active[near], candidates[near]
        offset += 1
        active = active[counts[active] > offset]


def _within(differences: np.ndarray, distance: int) -> np.ndarray:
    """Return True for each value with at most `distance` bits set."""
    for _ in range(distance):
        differences = differences & (differences - np.uint64(1))  # clears the lowest set bit of each value
    return differences == 0


def _masks(distance: int, blocks: int) -> list[np.uint64]:
    """Return a bit mask for each choice of `blocks - distance` out of `blocks` blocks of the 64 bits.

    Near hashes are equal under at least one mask (Manku et al. 2007, Detecting near-duplicates for web crawling).
    """
    edges = [round(64 * block / blocks) for block in range(blocks + 1)]
    of_block = [(1 << stop) - (1 << start) for start, stop in pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in combinations(of_block, blocks - distance)]
