"""In-memory tables of a preparation: all inputs (rejected, kept or held out), and samples with their positions.

They combine the tables of all parts. Each input takes 34 bytes of memory and each sample 22, so 100 million images in
three buckets take 10 GB; keys and captions stay on disk.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from diffusion.prepare.part_shards import format_of, read_inputs, read_samples, read_stored
from diffusion.prepare.source import NAMES_SHOWN, NamedCount, count_named
from diffusion.storage.atomic import atomic_file

DUPLICATE = 'duplicate'
REJECTED, TRAIN, HELD_OUT = -1, 0, 1
NUMBERS = {
    'width': np.uint32,
    'height': np.uint32,
    'caption_length': np.uint32,
    'exact_hash': np.uint64,
    'perceptual_hash': np.uint64,
    'is_flat': np.bool_,
}


@dataclass(frozen=True)
class Samples:
    """Table with one row per stored sample, one array per column, sorted by input and then by bucket."""

    image: np.ndarray
    """Catalog row of the sample's image, int64."""
    bucket: np.ndarray
    """Index of the sample's bucket among those given to `Catalog.read`, int16."""
    shard: np.ndarray
    """Number of the part's shard that contains the sample, uint32."""
    offset: np.ndarray
    """Offset of the sample in this shard in bytes, counted from the end of the header, uint32."""
    size: np.ndarray
    """Size of the sample in bytes, uint32."""


@dataclass(frozen=True)
class Catalog:
    """Table with one row per input, stored as one array per column, and the table of samples made from them."""

    parts: Sequence[Path]
    part: np.ndarray
    """Index in `parts` of the converted part that each input is in, int32."""
    split: np.ndarray
    """REJECTED, TRAIN or HELD_OUT for each input, int8."""
    columns: dict[str, np.ndarray]
    samples: Samples
    rejected: dict[str, NamedCount]
    """Rejected inputs by reason; after `drop_duplicates`, this includes duplicates."""
    first_row: np.ndarray
    """Row of the first input of each part, int64, followed by the total number of rows."""

    @classmethod
    def read(cls, parts: Sequence[Path], buckets: Sequence[str]) -> 'Catalog':
        """Read and combine the tables written for each part of the input; no image is held out yet."""
        rejected: dict[str, NamedCount] = {}
        split, columns, samples, counts = [], {name: [] for name in NUMBERS}, [], []
        for folder in parts:
            rows = read_inputs(folder, ['key', 'reason', *NUMBERS])
            samples.append(_read_samples(folder, buckets, first_row=sum(counts)))
            counts.append(len(rows))
            split.append(_count_rejected(rows, rejected))
            for name, kind in NUMBERS.items():
                columns[name].append(rows[name].to_numpy().astype(kind, copy=False))
        names = Samples.__dataclass_fields__
        return cls(
            parts,
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            np.concatenate(split),
            {name: np.concatenate(pieces) for name, pieces in columns.items()},
            Samples(**{name: np.concatenate([getattr(piece, name) for piece in samples]) for name in names}),
            rejected,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.part)

    @property
    def kept(self) -> np.ndarray:
        """Row numbers of the images that are not rejected, including held-out ones."""
        return np.flatnonzero(self.split != REJECTED)

    def images(self, split: int) -> np.ndarray:
        return np.flatnonzero(self.split == split)

    def samples_in(self, bucket: int, split: int) -> np.ndarray:
        found = np.flatnonzero(self.samples.bucket == bucket)
        return found[self.split[self.samples.image[found]] == split]

    def first_sample(self, image: int | np.integer) -> int:
        """Return the row in `samples` of an image's first sample (smallest bucket); `image` is a catalog row."""
        return int(np.searchsorted(self.samples.image, image))

    def stored_sample(self, number: int | np.integer) -> dict[str, Any]:
        folder = self.parts[int(self.part[self.samples.image[number]])]
        place = self.samples.shard, self.samples.offset, self.samples.size
        shard, offset, size = (int(column[number]) for column in place)
        (encoded,) = read_stored(folder, shard, [offset], [size])
        return format_of(folder).decode(encoded)

    def key(self, row: int) -> str:
        """Read the key (ID within the source, such as a path) of the input in a row from disk."""
        part = int(self.part[row])
        return read_inputs(self.parts[part], ['key'])['key'][int(row - self.first_row[part])].as_py()

    def captions(self, images: np.ndarray, column: str = 'captions') -> Iterator[pa.ListArray]:
        """Yield an array per part: the lists in `column` for the part's images among `images` (sorted catalog rows)."""
        edges = np.searchsorted(images, self.first_row)
        for number, folder in enumerate(self.parts):
            rows = images[edges[number] : edges[number + 1]]
            found = read_inputs(folder, [column])[column]
            yield found.take(rows - self.first_row[number]).combine_chunks()

    def caption_columns(self, images: np.ndarray) -> Counter[str]:
        """Count captions of `images` (sorted catalog rows) by the column that they come from; empty if not recorded."""
        total: Counter[str] = Counter()
        for found in self.captions(images, 'caption_columns'):
            counts = found.flatten().value_counts()
            total.update({each['values']: each['counts'] for each in counts.to_pylist()})
        return total

    def drop_duplicates(self, mode: str, *, max_distance: int, saved: Path) -> list[tuple[int, str]]:
        """Reject images that duplicate an earlier one; return (row number, key of the original) of the first few.

        With mode `none`, reject none. The search may be slow, so its result is kept in the file `saved` for a resumed
        preparation.
        """
        if mode == 'none':
            return []
        kept = self.kept
        repeats = np.load(saved) if saved.exists() else self._search(kept, mode, max_distance)
        if not saved.exists():
            with atomic_file(saved) as unfinished, unfinished.open('xb') as file:
                np.save(file, repeats)
        dropped = np.flatnonzero(repeats >= 0)
        return self.reject_duplicates(kept[dropped], lambda index: self.key(int(kept[repeats[dropped[index]]])))

    def reject_duplicates(self, rows: np.ndarray, original: Callable[[int], str]) -> list[tuple[int, str]]:
        """Reject the images in `rows` as duplicates; `original(i)` returns the key of the i-th one's original.

        Return (row number, key of the original) for the first `NAMES_SHOWN` duplicates, for the report.
        """
        shown = [(int(row), original(index)) for index, row in enumerate(rows[:NAMES_SHOWN])]
        self.reject(rows, DUPLICATE, [f'{self.key(row)} (duplicate of {name})' for row, name in shown])
        return shown

    def reject(self, rows: np.ndarray, reason: str, names: Sequence[str] | None = None) -> None:
        """Mark images as rejected for a reason; the report shows the first of `names` (default: the images' keys)."""
        self.split[rows] = REJECTED
        if len(rows):
            keys = [self.key(int(row)) for row in rows[:NAMES_SHOWN]] if names is None else names
            count_named(self.rejected, reason, len(rows), keys)

    def hold_out(self, count: int) -> None:
        """Hold out the `count` kept images with the smallest key hashes; call `drop_duplicates` before."""
        if not count:
            return
        kept = self.kept
        keys = self.key_hashes()[kept]
        # Break ties between equal keys by pixel hash, so that the result does not depend on input order.
        order = np.lexsort((self.columns['exact_hash'][kept], keys))
        self.split[kept[order[:count]]] = HELD_OUT

    def key_hashes(self) -> np.ndarray:
        return np.concatenate([key_hashes(read_inputs(folder, ['key'])['key'].to_pylist()) for folder in self.parts])

    def _search(self, kept: np.ndarray, mode: str, max_distance: int) -> np.ndarray:
        from diffusion.prepare.image_hashes import duplicates

        # Perceptual hashes of flat images are determined by noise, so unrelated flat images could seem near-duplicates.
        meaningful = ~self.columns['is_flat'][kept] if mode == 'near' else np.zeros(len(kept), bool)
        exact, perceptual = self.columns['exact_hash'][kept], self.columns['perceptual_hash'][kept]
        return duplicates(exact, perceptual, meaningful, max_distance=max_distance)


def _read_samples(folder: Path, buckets: Sequence[str], *, first_row: int) -> Samples:
    """Read a part's table of samples; the part's first input is in row `first_row` of the catalog."""
    rows = read_samples(folder)
    # Map only the few distinct names to numbers, rather than up to 100 million strings in Python.
    names = rows['bucket'].combine_chunks().dictionary_encode()
    codes = np.array([buckets.index(name) for name in names.dictionary.to_pylist()], np.int16)
    return Samples(
        image=rows['row'].to_numpy().astype(np.int64) + first_row,
        bucket=codes[names.indices.to_numpy()],
        **{name: rows[name].to_numpy() for name in ('shard', 'offset', 'size')},
    )


def _count_rejected(rows: pa.Table, rejected: dict[str, NamedCount]) -> np.ndarray:
    """Add a part's rejected inputs to `rejected`, by reason; return REJECTED or TRAIN for each input, int8."""
    reasons = rows['reason'].combine_chunks().dictionary_encode()
    codes = reasons.indices.to_numpy()
    split = np.full(len(rows), TRAIN, np.int8)
    for code, reason in enumerate(reasons.dictionary.to_pylist()):
        if reason:
            found = np.flatnonzero(codes == code)
            split[found] = REJECTED
            names = rows['key'].take(found[:NAMES_SHOWN]).to_pylist()
            count_named(rejected, reason, len(found), names)
    return split


def key_hashes(keys: Iterable[str]) -> np.ndarray:
    """Return hashes, uint64, by which keys are compared: XXH3 of each key's UTF-8 bytes."""
    return np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in keys], np.uint64)
