"""From the parts' shards to the final ones: which sample goes where is planned exactly, then any process may write."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from diffusion.config.image_shapes import parse_shape, write_buckets
from diffusion.errors import UserError
from diffusion.prepare.catalog import Catalogue
from diffusion.prepare.convert_part import samples_begin
from diffusion.prepare.work_dir import WorkFolder, read_json
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import becoming, write_whole


@dataclass(frozen=True)
class ShardJob:
    """Write a final shard by copying samples of parts."""

    work: WorkFolder
    bucket: str
    number: int
    size_limit: int
    part: np.ndarray
    """Of each sample, in order: the number of its part, its shard there, where it begins after the header, bytes."""
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray

    @property
    def name(self) -> str:
        return f'shard {self.file}'

    @property
    def file(self) -> str:
        """Path inside the dataset."""
        return f'{self.bucket}/{mds.shard_name(self.number)}'

    @property
    def entry(self) -> Path:
        """The marker that it is done, which holds its entry of the index."""
        return self.work.packed / f'{self.file}.json'

    @property
    def uploaded(self) -> Path:
        """The marker that an object store has it."""
        return self.work.packed / f'{self.file}.uploaded'

    @property
    def written_bytes(self) -> int | None:
        """Bytes of the file, as its entry says; None while there is none."""
        return read_json(self.entry)['raw_data']['bytes'] if self.entry.exists() else None

    def make_folders(self) -> None:
        """Make the folders of its file and its entry."""
        for path in (self.entry, self.work.dataset / self.file):
            path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, note: Note) -> 'ShardJob':
        """Do it."""
        path = self.work.dataset / self.file
        with becoming(path) as unfinished:
            entry = mds.write_shard(
                unfinished, self._samples(note), self.size.tolist(), name=path.name, size_limit=self.size_limit
            )
        write_whole(self.entry, json.dumps(entry))
        return self

    def _samples(self, note: Note) -> Iterator[bytes]:
        """The samples, read from the parts; those of one part's shard lie together and in order."""
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
                        raise UserError(f'{file.name}: was cut short after it was written; remove {folder}')
                    yield sample


def plan_shards(
    catalogue: Catalogue, buckets: Sequence[str], *, work: WorkFolder, size_limit: int
) -> Iterator[ShardJob]:
    """The final shards: of each bucket its kept pictures in the order of the parts, as many a shard as fit."""
    columns = catalogue.columns
    for code, bucket in enumerate(buckets):
        rows = catalogue.of_bucket(code)
        for number, span in enumerate(mds.cut(columns['size'][rows], size_limit=size_limit)):
            chosen = rows[span.start : span.stop]
            yield ShardJob(
                work,
                bucket,
                number,
                size_limit,
                catalogue.part[chosen],
                columns['shard'][chosen],
                columns['offset'][chosen],
                columns['size'][chosen],
            )


def read_entries(work: WorkFolder, buckets: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The entries of the index of every bucket's shards, in order."""
    paths = {bucket: sorted((work.packed / bucket).glob('*.mds.json'), key=_number) for bucket in buckets}
    return {bucket: [read_json(path) for path in found] for bucket, found in paths.items()}


def _number(entry: Path) -> int:
    return int(entry.name.split('.')[1])


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
