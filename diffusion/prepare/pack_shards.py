"""Packing the parts' samples into final shards, which are planned exactly, so that any process may write each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.config.image_shapes import parse_shape, write_buckets
from diffusion.errors import DataError
from diffusion.prepare.catalog import Catalog
from diffusion.prepare.convert_part import samples_begin
from diffusion.prepare.work_dir import WorkFolder
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import write_whole
from diffusion.storage.shard_writer import ShardWriter


@dataclass(frozen=True)
class ShardJob:
    """Write a final shard by copying samples of parts."""

    work: WorkFolder
    bucket: str
    shards: ShardWriter
    number: int
    part: np.ndarray
    """Each sample's part by number, shard in that part, offset in bytes after the shard's header, and size in bytes."""
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    @property
    def name(self) -> str:
        return f'shard {self.bucket}/{mds.shard_name(self.number)}'

    def __call__(self, note: Note) -> int:
        """Write the shard; returns the bytes of its samples."""
        self.shards.write(self.number, self._samples(note), self.size.tolist())
        return int(self.size.sum())

    def _samples(self, note: Note) -> Iterator[bytes]:
        """Read the samples from the parts; those of one part's shard lie together and in order."""
        where = np.stack([self.part, self.shard.astype(np.int64)], axis=1)
        starts = [0, *(np.flatnonzero(np.any(where[1:] != where[:-1], axis=1)) + 1).tolist(), len(where)]
        for start, stop in pairwise(starts):
            part, shard = where[start].tolist()
            folder = self.work.part(part)
            note(str(folder))
            with (folder / mds.shard_name(shard)).open('rb') as file:
                begin = samples_begin(folder)[shard]
                for offset, size in zip(self.offset[start:stop].tolist(), self.size[start:stop].tolist(), strict=True):
                    file.seek(begin + offset)
                    sample = file.read(size)
                    if len(sample) != size:
                        raise DataError(f'{file.name}: was cut short after it was written; remove {folder}')
                    yield sample


def plan_shards(
    catalog: Catalog, code: int, bucket: str, *, work: WorkFolder, shards: ShardWriter
) -> Iterator[ShardJob]:
    """Yield the final shards of a bucket: its kept images in the order of the parts, as many per shard as fit."""
    columns, rows = catalog.columns, catalog.of_bucket(code)
    for number, span in enumerate(shards.format.cut(columns['size'][rows])):
        chosen = rows[span.start : span.stop]
        places = (columns[name][chosen] for name in ('shard', 'offset', 'size'))
        yield ShardJob(work, bucket, shards, number, catalog.part[chosen], *places)


def write_indexes(entries: Mapping[str, list[dict[str, Any]]], dataset: Path) -> None:
    """Write index.json of every bucket, and buckets.json of every resolution with shapes."""
    by_size: dict[str, dict[Any, dict[str, int]]] = {}
    for bucket, shards in entries.items():
        write_whole(dataset / bucket / mds.INDEX, mds.index_text(shards))
        size, _, shape = bucket.partition('/')
        if shape:
            counts = {
                'samples': sum(shard['samples'] for shard in shards),
                'bytes': sum(shard['raw_data']['bytes'] for shard in shards),
            }
            by_size.setdefault(size, {})[parse_shape(shape)] = counts
    for size, shapes in by_size.items():
        write_buckets(dataset / size, int(size.removesuffix('px')), shapes)
