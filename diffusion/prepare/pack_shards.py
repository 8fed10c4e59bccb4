"""Write the final shards of each bucket, by copying samples from the shards of the converted parts.

A part is the unit of input that one job converted, such as a tar; its shards have all buckets mixed. The final shards
are planned in advance and written in parallel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.config.image_shapes import BUCKETS, Shape, buckets_text, parse_shape
from diffusion.prepare.catalog import Catalog
from diffusion.prepare.part_shards import read_stored
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import write_atomically
from diffusion.storage.shard_writer import ShardWriter


@dataclass(frozen=True)
class ShardJob:
    """Job that writes one final shard of a bucket by copying its samples, in input order, from converted parts.

    A part is the unit of input that one job converted, such as a tar.
    """

    folders: Mapping[int, Path]
    """Folders of the parts by number."""
    bucket: str
    shards: ShardWriter
    number: int
    part: np.ndarray
    """Part number of each sample."""
    shard: np.ndarray
    """Shard number of each sample within its part."""
    offset: np.ndarray
    """Offset of each sample after the header of that shard, in bytes."""
    size: np.ndarray
    """Size of each sample in bytes."""

    @property
    def name(self) -> str:
        return f'shard {self.bucket}/{self.shards.name(self.number)}'

    def __call__(self, note: Note) -> int:
        """Write the final shard; return the total size of its samples in bytes, for the progress bar."""
        self.shards.write(self.number, self._samples(note), self.size.tolist())
        return int(self.size.sum())

    def _samples(self, note: Note) -> Iterator[bytes]:
        """Yield the encoded samples of this final shard, read from the shards of converted parts.

        Raises:
            DataError: A shard of a part is too short.
        """
        # Samples of one source shard are adjacent and in order, so that each source shard is opened once.
        where = np.stack([self.part, self.shard.astype(np.int64)], axis=1)
        starts = [0, *(np.flatnonzero(np.any(where[1:] != where[:-1], axis=1)) + 1).tolist(), len(where)]
        for start, stop in pairwise(starts):
            part, shard = where[start].tolist()
            folder = self.folders[part]
            note(str(folder))
            yield from read_stored(folder, shard, self.offset[start:stop].tolist(), self.size[start:stop].tolist())


def plan_shards(
    catalog: Catalog, numbers: np.ndarray, bucket: str, *, shards: ShardWriter, first: int = 0
) -> Iterator[ShardJob]:
    """Yield the jobs that write a bucket's final shards: the given samples in order, as many per shard as fit.

    Args:
        numbers: Numbers of the samples, in order.
        bucket: Unique name of the bucket for messages.
        first: Number of the first shard.
    """
    samples = catalog.samples
    for number, span in enumerate(shards.format.cut(samples.size[numbers]), first):
        chosen = numbers[span.start : span.stop]
        places = (samples.shard[chosen], samples.offset[chosen], samples.size[chosen])
        parts = catalog.part[samples.image[chosen]]
        folders = {int(part): catalog.parts[part] for part in np.unique(parts)}
        yield ShardJob(folders, bucket, shards, number, parts, *places)


def write_indexes(entries: Mapping[str, list[dict[str, Any]]], dataset: Path) -> None:
    """Write index.json for each bucket, and buckets.json for each resolution with aspect-ratio buckets."""
    for name, content in index_files(entries).items():
        write_atomically(dataset / name, content)


def index_files(entries: Mapping[str, list[dict[str, Any]]]) -> dict[str, str]:
    """Return the contents of the files that `write_indexes` writes, by name."""
    files = {f'{bucket}/{mds.INDEX}': mds.index_text(shards) for bucket, shards in entries.items()}
    by_size: dict[str, dict[Shape, dict[str, int]]] = {}
    for bucket, shards in entries.items():
        size, _, shape = bucket.partition('/')
        if shape:
            counts = {
                'samples': sum(shard['samples'] for shard in shards),
                'bytes': sum(shard['raw_data']['bytes'] for shard in shards),
            }
            by_size.setdefault(size, {})[parse_shape(shape)] = counts
    for size, shapes in by_size.items():
        files[f'{size}/{BUCKETS}'] = buckets_text(int(size.removesuffix('px')), shapes)
    return files
