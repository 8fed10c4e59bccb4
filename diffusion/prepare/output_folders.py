"""Where a dataset appears: a local folder, by renaming, or an object store, by uploading with the indexes last."""

import os
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import UserError
from diffusion.prepare.counts_report import REPORT, PrepareReport
from diffusion.prepare.file_listing import local_copy
from diffusion.prepare.pack_shards import ShardJob
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.work_dir import WorkFolder, read_json
from diffusion.storage import mds
from diffusion.storage.atomic import sync_folder, write_whole
from diffusion.storage.object_store import list_objects, split, upload

UPLOADS = 8
"""Files that are uploaded at once."""


class Output(Protocol):
    """Where the dataset goes."""

    def finished(self, fingerprint: str) -> PrepareReport | None:
        """The report of the dataset that is there, if it was made of the same input by the same settings."""
        ...

    def check(self, work: WorkFolder) -> None:
        """Whether it is free, before any work is done for it.

        Raises:
            UserError: It is not.
        """
        ...

    def has(self, job: ShardJob) -> bool:
        """Whether a shard is where it belongs."""
        ...

    def take(self, job: ShardJob) -> None:
        """See to a shard that was written."""
        ...

    def put_in_place(self, work: WorkFolder) -> None:
        """Make the complete dataset appear; may be called again."""
        ...

    def close(self) -> None:
        """Stop what goes on in the background."""
        ...


def output_of(settings: PrepareSettings) -> Output:
    """The output of a preparation."""
    if settings.is_remote:
        return StoreOutput(settings.out.rstrip('/'))
    return FolderOutput(Path(settings.out).resolve(), overwrite=settings.overwrite)


class FolderOutput:
    """A local folder; its shards wait in the work folder, on the same file system."""

    def __init__(self, out: Path, *, overwrite: bool) -> None:
        self.out = out
        self.overwrite = overwrite

    def finished(self, fingerprint: str) -> PrepareReport | None:
        path = self.out / REPORT
        return _same(path, fingerprint) if path.is_file() and not self.overwrite else None

    def check(self, work: WorkFolder) -> None:
        check_new(self.out, overwrite=self.overwrite)
        above = next(path for path in self.out.parents if path.exists())
        if above.stat().st_dev != work.path.stat().st_dev:
            raise UserError(f'work: {work.path} is on another file system than {self.out}; give a folder beside it')

    def has(self, job: ShardJob) -> bool:
        path = job.work.dataset / job.file
        return path.exists() and path.stat().st_size == job.written_bytes

    def take(self, job: ShardJob) -> None:
        pass

    def put_in_place(self, work: WorkFolder) -> None:
        if not work.dataset.exists():
            return
        check_new(self.out, overwrite=self.overwrite)  # another process may have written it meanwhile
        self.out.parent.mkdir(parents=True, exist_ok=True)
        replaced = work.path / 'replaced'
        if self.out.exists() and any(self.out.iterdir()):
            os.rename(self.out, replaced)
        try:
            os.rename(work.dataset, self.out)
        except BaseException:
            if replaced.exists():
                os.rename(replaced, self.out)
            raise
        sync_folder(self.out.parent)

    def close(self) -> None:
        pass


class StoreOutput:
    """A folder of an object store; shards are uploaded as they are written, and their local copies removed."""

    def __init__(self, out: str) -> None:
        self.out = out
        self._threads = ThreadPoolExecutor(UPLOADS)
        self._uploads: list[Future[None]] = []

    def finished(self, fingerprint: str) -> PrepareReport | None:
        url = f'{self.out}/{REPORT}'
        if not list_objects(url):
            return None
        with local_copy(url) as path:
            return _same(path, fingerprint)

    def check(self, work: WorkFolder) -> None:
        if not work.plan.exists() and list_objects(f'{self.out}/'):
            raise UserError(f'{self.out}: holds objects already; remove them or give another out')

    def has(self, job: ShardJob) -> bool:
        return job.uploaded.exists()

    def take(self, job: ShardJob) -> None:
        waiting = [each for each in self._uploads if not each.done()]
        if len(waiting) >= 2 * UPLOADS:  # else the disk fills up when the network is slower
            wait(waiting, return_when=FIRST_COMPLETED)
        for each in self._uploads:
            if each.done():
                each.result()
        self._uploads = [each for each in self._uploads if not each.done()]
        self._uploads.append(self._threads.submit(self._upload_shard, job))

    def put_in_place(self, work: WorkFolder) -> None:
        for each in self._uploads:
            each.result()
        self._uploads = []
        sizes = {path: path.stat().st_size for path in work.dataset.rglob('*') if path.is_file()}
        for path in sorted(sizes, key=lambda path: (path.name in (mds.INDEX, BUCKETS), str(path))):
            self._upload(work, path.relative_to(work.dataset).as_posix())
        expected = {path.relative_to(work.dataset).as_posix(): size for path, size in sizes.items()}
        for entry in work.packed.rglob('*.mds.json'):
            name = entry.relative_to(work.packed).as_posix().removesuffix('.json')
            expected[name] = read_json(entry)['raw_data']['bytes']
        self._compare(expected, work)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _upload_shard(self, job: ShardJob) -> None:
        self._upload(job.work, job.file)
        write_whole(job.uploaded, '')
        (job.work.dataset / job.file).unlink()

    def _upload(self, work: WorkFolder, name: str) -> None:
        try:
            upload(work.dataset / name, f'{self.out}/{name}'.rpartition('/')[0])
        except (ValueError, OSError) as error:
            raise UserError(f'{error}; put it right and start again: what is done is kept') from error

    def _compare(self, expected: dict[str, int], work: WorkFolder) -> None:
        """Whether all that was uploaded, by any start, is there in full; what is not, the next start makes anew."""
        found = {object.key: object.size for object in list_objects(f'{self.out}/')}
        for name, size in expected.items():
            there = found.get(split(f'{self.out}/{name}')[1])
            if there != size:
                work.complete.unlink()
                (work.packed / f'{name}.uploaded').unlink(missing_ok=True)
                raise UserError(
                    f'{self.out}/{name}: has {there} bytes of {size} after all uploads; '
                    'start again, and it is made anew: what is done is kept'
                )


def _same(path: Path, fingerprint: str) -> PrepareReport | None:
    """A report, if it is that of the same preparation."""
    try:
        report = PrepareReport.read(path)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return report if report.fingerprint == fingerprint else None


def check_new(out: Path, *, overwrite: bool = False) -> None:
    """Whether a dataset may be written at `out`, before any work is done for it.

    Raises:
        UserError: It may not.
    """
    if os.path.ismount(out):
        raise UserError(f'{out}: is a mount point, which cannot be replaced in one step; give a folder inside it')
    if out.exists() and not out.is_dir():
        raise UserError(f'{out}: is a file; give another --out')
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UserError(f'{out}: exists and is not empty; remove it, give another --out or add --overwrite')
    if not (out / REPORT).is_file():
        raise UserError(f'{out}: has no {REPORT}, so it is no prepared dataset to overwrite; give another --out')
