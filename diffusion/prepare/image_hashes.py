"""Hashes of images, and the search for equal and nearly equal images among many."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, pairwise
from math import comb, log2

import numpy as np
import xxhash
from PIL import Image

from diffusion.errors import UserError

THUMBNAIL = 32
LOW = 8
"""Frequencies in each direction that the perceptual hash keeps: 64 bits."""
FLAT_LEVELS = 4.0
"""Standard deviation of a thumbnail, in levels of 255, under which noise decides the perceptual hash."""
MAX_DISTANCE = 8
FEW = 2048
"""Hashes of which all pairs are compared."""
COMPARED_EACH = 1000
"""Pairs compared for each hash before more blocks are tried."""
NEAR_EACH = 16
"""Near pairs held for each hash."""
MOST_TABLES = 1000


def exact_hash(image: Image.Image) -> int:
    """Return 64 bits (XXH3) of an RGB image's size and pixels."""
    state = xxhash.xxh3_64(f'{image.width}x{image.height}:'.encode())
    state.update(np.ascontiguousarray(image if image.mode == 'RGB' else image.convert('RGB')).data)
    return state.intdigest()


def perceptual_hash(image: Image.Image) -> int:
    """Return 64 bits that change little when an image is scaled, compressed again or lightly changed.

    pHash (Zauner 2010, Implementation and Benchmarking of Perceptual Image Hash Functions): the lowest 8x8 frequencies
    of a 32x32 thumbnail's DCT, a bit for each that is above their median. In whole numbers, so that it is the same on
    every machine.
    """
    low = _cosines() @ _thumbnail(image).astype(np.int64) @ _cosines().T
    bits = (low > np.sort(low, axis=None)[31]).ravel()  # 32 are above, unless some are equal
    return int.from_bytes(np.packbits(bits).tobytes(), 'big')


def is_flat(image: Image.Image) -> bool:
    """Return True if an image shows too little for its perceptual hash to mean anything."""
    return float(_thumbnail(image).std()) < FLAT_LEVELS


def duplicates(exact: np.ndarray, perceptual: np.ndarray, meaningful: np.ndarray, *, max_distance: int) -> np.ndarray:
    """Return, for each image, the first kept one before it that it repeats, or -1 where it is kept itself.

    An image repeats one whose exact hash is equal, or whose perceptual hash differs by at most `max_distance` bits.
    Images of one exact hash are taken to have one perceptual hash.

    Args:
        exact, perceptual: uint64, in the order in which images are kept.
        meaningful: Whether the perceptual hash counts.
        max_distance: 0 to 8 bits.

    Returns:
        int64, as long as the others.
    """
    if not 0 <= max_distance <= MAX_DISTANCE:
        raise UserError(f'max_distance={max_distance} is out of range; give 0 to {MAX_DISTANCE} bits')
    first = _first_of_equal(exact)
    alone = np.flatnonzero(first == np.arange(len(exact)))
    near = alone[meaningful[alone]]
    first[near] = near[_first_of_equal(perceptual[near])]
    distinct = near[first[near] == near]
    repeated = np.full(len(exact), -1)
    found = _greedy(perceptual[distinct], max_distance)
    repeated[distinct[found >= 0]] = distinct[found[found >= 0]]
    # Equal ones follow the first of them: they repeat it, or what it repeats.
    leader = first[first]
    return np.where(repeated[leader] >= 0, repeated[leader], np.where(leader == np.arange(len(exact)), -1, leader))


@lru_cache(maxsize=1)
def _cosines() -> np.ndarray:
    """Return the DCT's lowest rows in whole numbers: 14 bits each, so that no sum leaves 64."""
    frequencies, samples = np.arange(LOW)[:, None], np.arange(THUMBNAIL) + 0.5
    cosines = np.cos(np.pi / THUMBNAIL * frequencies * samples)
    cosines[0] /= np.sqrt(2)
    return (cosines * 2**14).round().astype(np.int64)


def _thumbnail(image: Image.Image) -> np.ndarray:
    """Return luma averaged over 32x32 cells, uint8."""
    return np.asarray(image.convert('L').resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX))


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """Return the index of the first equal value for each value."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]


def _greedy(hashes: np.ndarray, distance: int) -> np.ndarray:
    """Return the `duplicates` of distinct hashes that all count."""
    if distance == 0:
        return np.full(len(hashes), -1)
    pairs = _near_pairs(hashes, distance)
    if pairs is not None:
        return _resolve(len(hashes), *pairs)
    # Where very many are near one another few are kept; what those of the first half repeat need not be compared.
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
    """Choose which image of each near pair is left out, from the first image to the last."""
    found = np.full(count, -1)
    order = np.lexsort((earlier, later))
    for one, other in zip(later[order].tolist(), earlier[order].tolist(), strict=True):
        if found[other] < 0 and found[one] < 0:
            found[one] = other
    return found


def _near_pairs(hashes: np.ndarray, distance: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return all pairs of distinct hashes within a distance, later and earlier one; None if too many to hold."""
    if len(hashes) <= FEW:
        later, earlier = np.tril_indices(len(hashes), -1)
        near = _within(hashes[later] ^ hashes[earlier], distance)
        return later[near], earlier[near]
    for blocks in _numbers_of_blocks(len(hashes), distance):
        pairs = _pairs_by_blocks(hashes, distance, blocks)
        if pairs is not None:
            return pairs
    return None


def _pairs_by_blocks(hashes: np.ndarray, distance: int, blocks: int) -> tuple[np.ndarray, np.ndarray] | None:
    """See `_near_pairs`; None also if this many blocks leave too many pairs to compare."""
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
        if compared > COMPARED_EACH * len(hashes):
            return None
        for at, of in _matches(ordered, first, counts, ordered, distance):
            found.append((order[at], order[of]))
            near += len(at)
            if near > NEAR_EACH * len(hashes):
                return None
    one, other = (np.concatenate([pair[side] for pair in found]) for side in (0, 1))
    return np.maximum(one, other), np.minimum(one, other)


def _first_near(kept: np.ndarray, hashes: np.ndarray, distance: int) -> np.ndarray:
    """Return, for each hash, the first of `kept` within a distance, or -1."""
    found = np.full(len(hashes), len(kept))
    for mask in _masks(distance, _numbers_of_blocks(len(kept) + len(hashes), distance)[0]):
        order = np.argsort(kept & mask)
        ordered = kept[order]
        keys = ordered & mask
        first = np.searchsorted(keys, hashes & mask, 'left')
        counts = np.searchsorted(keys, hashes & mask, 'right') - first
        for at, of in _matches(ordered, first, counts, hashes, distance):
            found[at] = np.minimum(found[at], order[of])
    return np.where(found == len(kept), -1, found)


def _matches(
    ordered: np.ndarray, first: np.ndarray, counts: np.ndarray, hashes: np.ndarray, distance: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield positions in `hashes` and `ordered` of near pairs: each hash with the `counts` ones from `first` on."""
    todo, offset = np.flatnonzero(counts), 0
    while len(todo):
        of = first[todo] + offset
        near = _within(ordered[of] ^ hashes[todo], distance)
        yield todo[near], of[near]
        offset += 1
        todo = todo[counts[todo] > offset]


def _within(differences: np.ndarray, distance: int) -> np.ndarray:
    """Return True where at most so many bits are set."""
    for _ in range(distance):
        differences = differences & (differences - np.uint64(1))  # clears the lowest bit that is set
    return differences == 0


def _masks(distance: int, blocks: int) -> list[np.uint64]:
    """Return the choices of all but `distance` blocks; two hashes within the distance are equal in at least one.

    The pigeonhole principle, with blocks to spare as in Manku et al. 2007, Detecting near-duplicates for web crawling.
    """
    edges = [round(64 * block / blocks) for block in range(blocks + 1)]
    of_block = [(1 << stop) - (1 << start) for start, stop in pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in combinations(of_block, blocks - distance)]


def _numbers_of_blocks(count: int, distance: int) -> list[int]:
    """Return numbers of blocks, the one first that should take the least time for so many hashes."""

    def nanoseconds(blocks: int) -> float:
        bits = 64 * (blocks - distance) / blocks
        return comb(blocks, distance) * (10 * log2(count) + 10 * count / 2**bits)

    least = min(range(distance + 1, distance + 7), key=nanoseconds)
    return [
        blocks for blocks in (least, least + 1, least + 2) if comb(blocks, distance) <= MOST_TABLES or blocks == least
    ]
