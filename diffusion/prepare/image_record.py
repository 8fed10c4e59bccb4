"""Table of one delivery's images: their keys, their hashes, and the shards with their samples.

A prepared dataset keeps one such table per delivery, to compare later deliveries with its images and to find images by
key. Another table has the hashes of removed images, including the hashes of their keys, but not the keys.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.prepare.catalog import HELD_OUT, REJECTED, Catalog, key_hashes
from diffusion.prepare.part_shards import read_inputs
from diffusion.storage.atomic import atomic_file

HASHES = {'key_hash': pa.uint64(), 'exact_hash': pa.uint64(), 'perceptual_hash': pa.uint64(), 'is_flat': pa.bool_()}
"""Columns for comparing images. `key_hash` is the key's XXH3 hash; for the others, see `image_hashes`."""
REMOVED_SCHEMA = pa.schema(HASHES)
IMAGE_SCHEMA = pa.schema(
    {
        'key': pa.string(),
        **HASHES,
        'held_out': pa.bool_(),
        'buckets': pa.list_(pa.string()),
        'shards': pa.list_(pa.uint32()),
    }
)
"""`held_out` marks images in the held-out dataset, which have no samples here. `buckets` and `shards` are parallel
lists: bucket and shard number of each of the image's samples."""


def write_images(
    path: Path, catalog: Catalog, shard_of_sample: np.ndarray, buckets: Sequence[str], *, split: int
) -> None:
    """Write the table of images of one split (training set or held-out dataset).

    `shard_of_sample` is each sample's final shard number. The table of a training set also lists held-out images.
    """
    names = pa.array(list(buckets), pa.string())
    with atomic_file(path) as unfinished, pq.ParquetWriter(unfinished, IMAGE_SCHEMA, compression='zstd') as writer:
        for number, folder in enumerate(catalog.parts):
            first = int(catalog.first_row[number])
            rows = np.arange(first, int(catalog.first_row[number + 1]))
            of_rows = catalog.split[rows]
            rows = rows[of_rows == HELD_OUT if split == HELD_OUT else of_rows != REJECTED]
            if not len(rows):
                continue
            keys = read_inputs(folder, ['key'])['key'].take(rows - first).combine_chunks()
            # An image's samples are adjacent in the catalog. Concatenate the ranges of all rows in `samples`: row i has
            # samples[ends[i] : ends[i + 1]], which is empty if the image is in the other split.
            starts, stops = (np.searchsorted(catalog.samples.image, rows, side=side) for side in ('left', 'right'))
            counts = np.where(catalog.split[rows] == split, stops - starts, 0)
            ends = np.concatenate([[0], np.cumsum(counts)])
            samples = np.repeat(starts - ends[:-1], counts) + np.arange(ends[-1])
            offsets = pa.array(ends, pa.int32())
            columns = {name: catalog.columns[name][rows] for name in ('exact_hash', 'perceptual_hash', 'is_flat')}
            columns |= {
                'key': keys,
                'key_hash': key_hashes(keys.to_pylist()),
                'held_out': (catalog.split[rows] == HELD_OUT) & (split != HELD_OUT),
                'buckets': pa.ListArray.from_arrays(offsets, names.take(catalog.samples.bucket[samples])),
                'shards': pa.ListArray.from_arrays(offsets, pa.array(shard_of_sample[samples], pa.uint32())),
            }
            writer.write_table(pa.table(columns).select(IMAGE_SCHEMA.names).cast(IMAGE_SCHEMA))


def read_images(path: Path, columns: Sequence[str] = tuple(IMAGE_SCHEMA.names)) -> pa.Table:
    return pq.read_table(path, columns=list(columns))


def read_rows(path: Path, rows: np.ndarray) -> pa.Table:
    """Read the rows with these ascending numbers from an image table, without loading all of it."""
    with pq.ParquetFile(path) as file:
        found = [IMAGE_SCHEMA.empty_table()]
        for group, first, stop in _row_groups(file):
            chosen = rows[(rows >= first) & (rows < stop)]
            if len(chosen):
                found.append(file.read_row_group(group).take(pa.array(chosen - first)))
    return pa.concat_tables(found)


def copy_without_rows(path: Path, rows: np.ndarray, target: Path) -> None:
    with (
        pq.ParquetFile(path) as file,
        atomic_file(target) as unfinished,
        pq.ParquetWriter(unfinished, IMAGE_SCHEMA, compression='zstd') as writer,
    ):
        for group, first, stop in _row_groups(file):
            kept = np.ones(stop - first, bool)
            kept[rows[(rows >= first) & (rows < stop)] - first] = False
            if kept.any():
                writer.write_table(file.read_row_group(group).filter(pa.array(kept)).cast(IMAGE_SCHEMA))


def _row_groups(file: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first row, end row) of each row group, the unit in which a Parquet file is read."""
    first = 0
    for group in range(file.num_row_groups):
        stop = first + file.metadata.row_group(group).num_rows
        yield group, first, stop
        first = stop


def write_removed(path: Path, table: pa.Table) -> None:
    with atomic_file(path) as unfinished:
        pq.write_table(table.select(REMOVED_SCHEMA.names).cast(REMOVED_SCHEMA), unfinished, compression='zstd')


@dataclass(frozen=True)
class EarlierImages:
    """Hashes (25 bytes per image) of all images that a dataset has or had before a delivery; removed ones come last."""

    hashes: Mapping[str, np.ndarray]
    tables: Sequence[tuple[int, Path]]
    """Number of images and path of the table, for each delivery."""
    removed_count: int

    @classmethod
    def read(cls, images: Sequence[Path], removed: Path | None) -> 'EarlierImages':
        tables = [read_images(path, list(HASHES)) for path in images]
        gone = [] if removed is None else [pq.read_table(removed)]
        joined = pa.concat_tables([*tables, *gone, REMOVED_SCHEMA.empty_table()])
        hashes = {name: joined[name].to_numpy() for name in HASHES}
        counts = [(len(table), path) for table, path in zip(tables, images, strict=True)]
        return cls(hashes, counts, sum(map(len, gone)))

    def __len__(self) -> int:
        return len(self.hashes['key_hash'])

    def is_removed(self, index: int | np.ndarray) -> np.ndarray:
        return np.asarray(index) >= len(self) - self.removed_count

    def name(self, index: int) -> str:
        """Return an image's key, for the report; keys of removed images are not known."""
        for count, path in self.tables:
            if index < count:
                return read_images(path, ['key'])['key'][index].as_py()
            index -= count
        return 'a removed image'

    def find_keys(self, hashes: np.ndarray) -> np.ndarray:
        """Return for each key hash the index of the last image that has it, int64, or -1 if there is none."""
        known = self.hashes['key_hash']
        order = np.argsort(known, kind='stable')
        at = np.searchsorted(known[order], hashes, side='right') - 1
        found = order[np.maximum(at, 0)] if len(order) else np.zeros(len(hashes), np.int64)
        matches = known[found] == hashes if len(order) else np.zeros(len(hashes), bool)
        return np.where(matches, found, -1)
