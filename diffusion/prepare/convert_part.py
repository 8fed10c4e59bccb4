"""One part of the input into one folder of shards, which appears when it is whole."""

import base64
import functools
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.errors import DataError, UserError
from diffusion.prepare.bucket_choice import Buckets
from diffusion.prepare.image_decoding import Unfit, clean
from diffusion.prepare.process_sample import take, thumbnail
from diffusion.prepare.sample_table import SampleRow, write_sample_rows
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Entry, Part, Source
from diffusion.prepare.work_dir import read_json, remove_work_folder
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import new_unfinished, sync_folder, write_whole

SHARD_BYTES = 64 * 10**6
"""Of a part's shards, which are held in memory until they are full."""
THUMBNAILS = 'thumbnails.json'
SUMMARY = 'part.json'
THUMBNAILS_A_REASON = 6
ATTEMPTS = 4
BACKOFF_SECONDS = 1.0
"""Before the second attempt at a part that cannot be read; doubles with each."""


@dataclass
class PartDone:
    """A part's numbers."""

    size: int
    """What progress counts of it."""
    inputs: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """By reason."""
    columns: set[str] = field(default_factory=set)
    """Names of what the source says of its pictures."""


@dataclass(frozen=True)
class PartJob:
    """Prepare a part: its pictures in shards of all buckets together, a row for each input, thumbnails."""

    number: int
    part: Part
    source: Source
    settings: PrepareSettings
    folder: Path
    """What becomes of it, when it is whole."""

    @property
    def name(self) -> str:
        return f'part {self.number} ({self.part.name})'

    def __call__(self, note: Note) -> PartDone:
        """Do it, or return what was done before.

        Raises:
            UserError: The part is not there, or not ours to read.
            DataError: The part cannot be read now.
        """
        for attempt in range(ATTEMPTS):
            if self.folder.is_dir():
                return read_done(self.folder, self.part)
            try:
                return self._prepare(note)
            except _Unreadable as error:
                # What is not there, or not ours to read, will not come with waiting.
                lasting = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | PermissionError)
                if lasting or attempt == ATTEMPTS - 1:
                    raise (UserError if lasting else DataError)(
                        f'{self.name}: cannot be read ({error.__cause__}); put it right and start again: '
                        'what is done is kept'
                    ) from error
                time.sleep(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError

    def _prepare(self, note: Note) -> PartDone:
        unfinished = new_unfinished(self.folder)
        unfinished.mkdir()
        try:
            done = self._write(unfinished, note)
            sync_folder(unfinished)
            _rename(unfinished, self.folder)
        except BaseException:
            remove_work_folder(unfinished)
            raise
        return done

    def _write(self, folder: Path, note: Note) -> PartDone:
        done, rows, shards = PartDone(self.part.size), [], _Shards(folder)
        thumbnails: list[dict[str, str]] = []
        buckets = Buckets(self.settings.sizes, self.settings.aspects)
        for entry in self._entries(note):
            row = SampleRow(entry.key)
            rows.append(row)
            done.columns |= entry.metadata.keys()
            try:
                sample = take(entry, row, settings=self.settings, buckets=buckets)
            except Unfit as unfit:
                row.reason, row.bucket = str(unfit), ''
                done.rejected[row.reason] += 1
                if done.rejected[row.reason] <= THUMBNAILS_A_REASON:
                    thumbnails += _thumbnails(entry, unfit, self.settings)
                continue
            except Exception as error:
                raise RuntimeError(f'{self.name}, picture {entry.key!r}: {error!r}') from error
            row.shard, row.offset, row.size = shards.add(mds.encode_sample(sample))
        done.inputs = len(rows)
        shards.finish()
        write_sample_rows(folder, rows)
        write_whole(folder / THUMBNAILS, json.dumps(thumbnails))
        summary = {'inputs': done.inputs, 'rejected': done.rejected, 'columns': sorted(done.columns)}
        write_whole(folder / SUMMARY, json.dumps(summary))
        write_whole(folder / mds.INDEX, mds.index_text(shards.entries))
        return done

    def _entries(self, note: Note) -> Iterator[Entry]:
        """The part's entries; what goes wrong with reading is told from what goes wrong with writing."""
        try:
            for entry in self.source.read(self.part):
                note(f'picture {entry.key!r}')
                yield entry
                note(f'what comes after picture {entry.key!r}')
        except OSError as error:
            raise _Unreadable from error


class _Unreadable(Exception):
    """Reading failed; the cause says how."""


class _Shards:
    """The samples of a part in shards of a size that fits into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._bytes = 0

    def add(self, sample: bytes) -> tuple[int, int, int]:
        """The number of the sample's shard, where its bytes begin after the shard's header, and how many they are."""
        if self._samples and self._bytes + len(sample) > SHARD_BYTES:
            self.finish()
        self._samples.append(sample)
        self._bytes += len(sample)
        return len(self.entries), self._bytes - len(sample), len(sample)

    def finish(self) -> None:
        """Write what there is as a shard."""
        if self._samples:
            name = mds.shard_name(len(self.entries))
            sizes = [len(sample) for sample in self._samples]
            path = self.folder / name
            self.entries.append(mds.write_shard(path, self._samples, sizes, name=name, size_limit=SHARD_BYTES))
        self._samples, self._bytes = [], 0


def read_done(folder: Path, part: Part) -> PartDone:
    """The numbers of a part that is done."""
    content = read_json(folder / SUMMARY)
    return PartDone(part.size, content['inputs'], Counter(content['rejected']), set(content['columns']))


@functools.lru_cache(maxsize=1024)
def samples_begin(folder: Path) -> list[int]:
    """Of each shard of a part that is done, where its samples begin in bytes."""
    shards = read_json(folder / mds.INDEX)['shards']
    return [mds.header_bytes(shard['samples'], size_limit=SHARD_BYTES) for shard in shards]


def _rename(unfinished: Path, done: Path) -> None:
    try:
        unfinished.rename(done)
    except OSError:
        # Another machine may have been lent the same part; what it wrote is what we wrote.
        if not done.is_dir():
            raise
        remove_work_folder(unfinished)
    sync_folder(done.parent)


def _thumbnails(entry: Entry, unfit: Unfit, settings: PrepareSettings) -> list[dict[str, str]]:
    """The picture that was left out, where it can be seen, as exhibits shows it."""
    try:
        image = clean(entry.image or b'', background=settings.background, max_pixels=settings.max_pixels).image
    except Unfit:
        return []
    encoded = base64.b64encode(thumbnail(image)).decode()
    return [{'reason': str(unfit), 'key': entry.key, 'detail': unfit.detail, 'image': encoded}]
