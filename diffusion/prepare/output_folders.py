"""Destination of a prepared dataset, and jobs that write its final shards by copying samples from converted parts.

The destination is an object store or a local folder, which gets its final name when complete.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import UserError
from diffusion.prepare.catalog import Catalog
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.prepare.input_plan import InputPlan
from diffusion.prepare.part_shards import read_stored
from diffusion.prepare.work_dir import Staging, WorkFolder, read_json
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import replace_folder
from diffusion.storage.places import LocalPlace, Place, StorePlace, is_url
from diffusion.storage.shard_writer import ShardWriter, differences


def output_of(out: str, staging: Staging, work: WorkFolder, *, overwrite: bool) -> 'FolderOutput | StoreOutput':
    """Return the output at a folder or URL, to which the dataset in `staging` is moved once it is complete."""
    if is_url(out):
        return StoreOutput(out.rstrip('/'), staging, work)
    return FolderOutput(Path(out).resolve(), staging, work, overwrite=overwrite)


class FolderOutput:
    """Output in a local folder; a rename moves the complete dataset there from the work folder."""

    def __init__(self, out: Path, staging: Staging, work: WorkFolder, *, overwrite: bool) -> None:
        self.out = out
        self.staging = staging
        self.work = work
        self.overwrite = overwrite

    def report(self) -> PrepareReport | None:
        """Return the report of the dataset already at the destination, or None if it is missing or cannot be parsed."""
        path = self.out / REPORT
        return _parsed_report(path) if path.is_file() else None

    def check(self, plan: InputPlan) -> None:
        """Raise UserError if the output may not be replaced, or is on another file system than the work folder."""
        self._check_free(plan)
        # The dataset is moved by a rename, which is possible only within one file system.
        parent = next(path for path in self.out.parents if path.exists())
        if parent.stat().st_dev != self.work.path.stat().st_dev:
            raise UserError(
                f'--work: {self.work.path} is on another file system than {self.out}; give a folder on the same one'
            )

    def bucket(self, name: str) -> Place:
        return LocalPlace(self.staging.dataset / name)

    def set_aside(self) -> None:
        """Move the existing dataset, which `put_in_place` will replace, into the work folder; idempotent."""
        if self.staging.dataset.exists() and self.out.exists():
            self._check_free()
            self.out.rename(self.staging.replaced)

    def put_in_place(self) -> None:
        """Move the complete dataset to its destination; idempotent."""
        # The staging folder is missing if an earlier start was killed after moving the dataset.
        if self.staging.dataset.exists():
            self._check_free()  # check again: another process may have written to the folder since
            replace_folder(self.staging.dataset, self.out, aside=self.staging.replaced)

    def _check_free(self, plan: InputPlan | None = None) -> None:
        """Raise UserError unless the output folder is missing, empty, or a dataset that `overwrite` may replace."""
        out = self.out
        if os.path.ismount(out):
            raise UserError(f'{out}: is a mount point, which cannot be replaced atomically; give a folder inside it')
        if out.exists() and not out.is_dir():
            raise UserError(f'{out}: is a file; give another --out')
        if not out.is_dir() or not any(out.iterdir()):
            return
        if not self.overwrite:
            raise not_empty(out, self.report(), plan, 'add --overwrite to replace the dataset')
        if not (out / REPORT).is_file():
            raise UserError(f'{out}: has no {REPORT}, so it is not a prepared dataset; give another --out')


class StoreOutput:
    """Dataset in an object store folder; the process that writes a shard also uploads it and removes the local copy."""

    def __init__(self, out: str, staging: Staging, work: WorkFolder) -> None:
        self.staging = staging
        self.work = work
        self.folder = StorePlace(out, staging.uploading)

    def report(self) -> PrepareReport | None:
        return _parsed_report(self.folder.fetch(REPORT, again=True)) if REPORT in self.folder.sizes() else None

    def check(self, plan: InputPlan) -> None:
        # Accept existing objects if a plan exists: they are shards uploaded by an earlier start.
        if not self.work.plan.exists() and self.folder.sizes():
            raise not_empty(self.folder, self.report(), plan, 'remove its objects')

    def bucket(self, name: str) -> Place:
        return StorePlace(self.folder.locate(name), self.staging.uploading / name)

    def set_aside(self) -> None:
        pass  # nothing to move: a dataset in an object store is never replaced

    def put_in_place(self) -> None:
        """Upload all files except the shards, indexes last; raise OSError if an object then has a wrong size."""
        # Readers consider a folder with an index a complete dataset, so upload indexes last.
        dataset, packed = self.staging.dataset, self.staging.packed
        files = {path.relative_to(dataset).as_posix(): path for path in dataset.rglob('*') if path.is_file()}
        for name in sorted(files, key=lambda name: (files[name].name in (mds.INDEX, BUCKETS), name)):
            with self.folder.writing(name) as path:
                shutil.copyfile(files[name], path)
        expected = {name: path.stat().st_size for name, path in files.items()}
        entries = {path.relative_to(packed).as_posix().removesuffix('.json'): path for path in packed.rglob('*.json')}
        expected |= {name: read_json(path)['raw_data']['bytes'] for name, path in entries.items()}
        found = self.folder.sizes()
        for name, size in expected.items():
            if found.get(name) != size:
                # Delete these markers of completion, so that the next start writes this object, and only it, again.
                self.work.complete.unlink()
                if name in entries:
                    entries[name].unlink()
                raise OSError(
                    f'{self.folder}/{name}: has {found.get(name)} of {size} bytes after all uploads; '
                    'run the same command again to write only this file again'
                )


def not_empty(out: object, report: PrepareReport | None, plan: InputPlan | None, remedy: str) -> UserError:
    """Return the error for an output that is not empty; it lists differences from the plan, and fixes (`remedy`)."""
    lines: list[str] = []
    ways = ['give another --out', remedy, 'add --append to add the images to it']
    if report is not None and plan is not None and report.fingerprint != plan.content_fingerprint:
        saved = {name: value for name, value in report.arguments.items() if name != 'out'}
        lines = differences(saved, plan.settings, saved_in='there')
        ways = ways if all(line.startswith('source.') for line in lines) else ways[:-1]
        lines = lines or differences(report.versions, plan.versions, saved_in='there') or ['the files of the input']
    changed = '\n  '.join(['; its dataset differs in:', *lines]) + '\n' if lines else '; '
    return UserError(f'{out}: exists and is not empty{changed}{", ".join(ways[:-1])} or {ways[-1]}')


def _parsed_report(path: Path) -> PrepareReport | None:
    try:
        return PrepareReport.read(path)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@dataclass(frozen=True)
class ShardJob:
    """Job that writes one final shard of a bucket by copying its samples, in input order, from converted parts."""

    folders: Mapping[int, Path]
    bucket: str
    shards: ShardWriter
    number: int
    part: np.ndarray
    """Number of the converted part that contains each sample, a key of `folders`."""
    shard: np.ndarray
    """Number of the shard that contains each sample, among the shards of its converted part."""
    offset: np.ndarray
    """Offset in bytes of each sample after that shard's header."""
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
        """Yield the encoded samples of this final shard, read from the shards of converted parts."""
        # Samples from the same source shard are adjacent and in order, so each source shard is opened only once.
        where = np.stack([self.part, self.shard.astype(np.int64)], axis=1)
        starts = [0, *(np.flatnonzero(np.any(where[1:] != where[:-1], axis=1)) + 1).tolist(), len(where)]
        for start, stop in pairwise(starts):
            part, shard = where[start].tolist()
            folder = self.folders[part]
            note(str(folder))
            yield from read_stored(folder, shard, self.offset[start:stop].tolist(), self.size[start:stop].tolist())


def plan_shards(
    catalog: Catalog, numbers: np.ndarray, bucket: str, *, shards: ShardWriter, first: int
) -> Iterator[ShardJob]:
    """Yield jobs that write a bucket's final shards, numbered from `first`; `numbers` are rows of catalog.samples."""
    samples = catalog.samples
    for number, span in enumerate(shards.format.cut(samples.size[numbers]), first):
        chosen = numbers[span.start : span.stop]
        places = (samples.shard[chosen], samples.offset[chosen], samples.size[chosen])
        parts = catalog.part[samples.image[chosen]]
        folders = {int(part): catalog.parts[part] for part in np.unique(parts)}
        yield ShardJob(folders, bucket, shards, number, parts, *places)
