"""Outputs of a preparation: a local folder, which appears by renaming, or an object store, with the indexes last."""

import os
import shutil
from pathlib import Path
from typing import Protocol

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import UserError
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.prepare.process_sample import COLUMNS
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.work_dir import WorkFolder, read_json
from diffusion.storage import mds
from diffusion.storage.atomic import replace_folder
from diffusion.storage.folders import Folder, LocalFolder, StoreFolder
from diffusion.storage.mds import ShardFormat
from diffusion.storage.shard_writer import ShardWriter


class Output(Protocol):
    """The place of the finished dataset."""

    def finished(self, fingerprint: str) -> PrepareReport | None:
        """Return the report of the dataset that is there, if the same settings made it from the same input."""
        ...

    def check(self) -> None:
        """Check that the output is free, before any work is done for it.

        Raises:
            UserError: It is not.
        """
        ...

    def bucket(self, name: str) -> Folder:
        """Return the folder that the shards of a bucket are written into."""
        ...

    def put_in_place(self) -> None:
        """Make the complete dataset appear; may be called again."""
        ...


def output_of(settings: PrepareSettings, work: WorkFolder) -> Output:
    """Return the output of a preparation."""
    if settings.is_remote:
        return StoreOutput(settings.out.rstrip('/'), work)
    return FolderOutput(Path(settings.out).resolve(), work, overwrite=settings.overwrite)


def shard_writer(output: Output, work: WorkFolder, bucket: str, *, size_limit: int) -> ShardWriter:
    """Return the writer of a bucket's final shards."""
    return ShardWriter(output.bucket(bucket), LocalFolder(work.packed / bucket), ShardFormat(COLUMNS, size_limit))


class FolderOutput:
    """A local folder; its shards wait in the work folder, on the same file system."""

    def __init__(self, out: Path, work: WorkFolder, *, overwrite: bool) -> None:
        self.out = out
        self.work = work
        self.overwrite = overwrite

    def finished(self, fingerprint: str) -> PrepareReport | None:
        path = self.out / REPORT
        return _same(path, fingerprint) if path.is_file() and not self.overwrite else None

    def check(self) -> None:
        self._check_free()
        above = next(path for path in self.out.parents if path.exists())
        if above.stat().st_dev != self.work.path.stat().st_dev:
            raise UserError(
                f'work: {self.work.path} is on another file system than {self.out}; give a folder beside it'
            )

    def bucket(self, name: str) -> Folder:
        return LocalFolder(self.work.dataset / name)

    def put_in_place(self) -> None:
        if self.work.dataset.exists():
            self._check_free()  # another process may have written it meanwhile
            replace_folder(self.work.dataset, self.out, aside=self.work.path / 'replaced')

    def _check_free(self) -> None:
        """Check that a dataset may be written, or replaced."""
        out = self.out
        if os.path.ismount(out):
            raise UserError(f'{out}: is a mount point, which cannot be replaced in one step; give a folder inside it')
        if out.exists() and not out.is_dir():
            raise UserError(f'{out}: is a file; give another --out')
        if not out.is_dir() or not any(out.iterdir()):
            return
        if not self.overwrite:
            raise UserError(f'{out}: exists and is not empty; remove it, give another --out or add --overwrite')
        if not (out / REPORT).is_file():
            raise UserError(f'{out}: has no {REPORT}, so it is no prepared dataset to overwrite; give another --out')


class StoreOutput:
    """A folder of an object store; each shard is uploaded by the process that writes it, and its local copy removed."""

    def __init__(self, out: str, work: WorkFolder) -> None:
        self.work = work
        self.folder = StoreFolder(out, work.path / 'uploading')

    def finished(self, fingerprint: str) -> PrepareReport | None:
        return _same(self.folder.fetch(REPORT), fingerprint) if REPORT in self.folder.sizes() else None

    def check(self) -> None:
        if not self.work.plan.exists() and self.folder.sizes():
            raise UserError(f'{self.folder}: holds objects already; remove them or give another out')

    def bucket(self, name: str) -> Folder:
        return StoreFolder(f'{self.folder.url}/{name}', self.folder.scratch / name)

    def put_in_place(self) -> None:
        """Upload the files that are not shards, the indexes last, and compare the sizes of all objects."""
        dataset, packed = self.work.dataset, self.work.packed
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
                self.work.complete.unlink()
                if name in entries:
                    entries[name].unlink()
                raise OSError(
                    f'{self.folder}/{name}: has {found.get(name)} bytes of {size} after all uploads; '
                    'start again, and it is made anew: what is done is kept'
                )


def _same(path: Path, fingerprint: str) -> PrepareReport | None:
    """Return a report, if it is the report of the same preparation."""
    try:
        report = PrepareReport.read(path)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return report if report.fingerprint == fingerprint else None
