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
from diffusion.prepare.process_sample import COLUMNS, take, thumbnail
from diffusion.prepare.sample_table import SampleRow, write_sample_rows
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import Entry, Part, Source
from diffusion.prepare.work_dir import read_json
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import becoming_folder, write_whole

SHARD_BYTES = 64 * 10**6
"""Size of a part's shards, which are held in memory until they are full."""
FORMAT = mds.ShardFormat(COLUMNS, SHARD_BYTES)
THUMBNAILS = 'thumbnails.json'
SUMMARY = 'part.json'
THUMBNAILS_A_REASON = 6
ATTEMPTS = 4
BACKOFF_SECONDS = 1.0
"""Seconds before the second attempt at a part that cannot be read; doubles with each."""


@dataclass
class PartDone:
    """Counts of a part that is done."""

    size: int
    """The part's size as the progress bar counts it."""
    inputs: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Number of inputs left out, by reason."""
    columns: set[str] = field(default_factory=set)
    """Names of the metadata columns."""


@dataclass(frozen=True)
class PartJob:
    """Prepare a part: its samples in shards of all buckets together, a table of all inputs, thumbnails."""

    number: int
    part: Part
    source: Source
    settings: PrepareSettings
    folder: Path
    """The folder of the part, which appears when it is whole."""

    @property
    def name(self) -> str:
        return f'part {self.number} ({self.part.name})'

    def __call__(self, note: Note) -> PartDone:
        """Prepare the part, unless it is there already.

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
        try:
            with becoming_folder(self.folder) as unfinished:
                return self._write(unfinished, note)
        except OSError:
            # Another machine may have been lent the same part; what it wrote is what we wrote.
            if not self.folder.is_dir():
                raise
            return read_done(self.folder, self.part)

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
                raise RuntimeError(f'{self.name}, image {entry.key!r}: {error!r}') from error
            row.shard, row.offset, row.size = shards.add(FORMAT.encode(sample))
        done.inputs = len(rows)
        shards.finish()
        write_sample_rows(folder, rows)
        write_whole(folder / THUMBNAILS, json.dumps(thumbnails))
        summary = {'inputs': done.inputs, 'rejected': done.rejected, 'columns': sorted(done.columns)}
        write_whole(folder / SUMMARY, json.dumps(summary))
        write_whole(folder / mds.INDEX, mds.index_text(shards.entries))
        return done

    def _entries(self, note: Note) -> Iterator[Entry]:
        """Yield the part's entries; errors of reading become `_Unreadable`, which tells them from errors of writing."""
        try:
            for entry in self.source.read(self.part):
                note(f'image {entry.key!r}')
                yield entry
                note(f'what comes after image {entry.key!r}')
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
        """Add a sample; returns the number of its shard, its offset after the shard's header and its size in bytes."""
        if self._samples and self._bytes + len(sample) > SHARD_BYTES:
            self.finish()
        self._samples.append(sample)
        self._bytes += len(sample)
        return len(self.entries), self._bytes - len(sample), len(sample)

    def finish(self) -> None:
        """Write the samples that are held as a shard."""
        if self._samples:
            name = mds.shard_name(len(self.entries))
            sizes = [len(sample) for sample in self._samples]
            self.entries.append(FORMAT.write_shard(self.folder / name, self._samples, sizes, name=name))
        self._samples, self._bytes = [], 0


def read_done(folder: Path, part: Part) -> PartDone:
    """Return the counts of a part that is done."""
    content = read_json(folder / SUMMARY)
    return PartDone(part.size, content['inputs'], Counter(content['rejected']), set(content['columns']))


@functools.lru_cache(maxsize=1024)
def samples_begin(folder: Path) -> list[int]:
    """Return the size of the header of each shard of a part that is done, in bytes."""
    shards = read_json(folder / mds.INDEX)['shards']
    return [FORMAT.header_bytes(shard['samples']) for shard in shards]


def _thumbnails(entry: Entry, unfit: Unfit, settings: PrepareSettings) -> list[dict[str, str]]:
    """Return a thumbnail of an image that was left out, if it can be decoded, as report_thumbnails reads it."""
    try:
        image = clean(entry.image or b'', background=settings.background, max_pixels=settings.max_pixels).image
    except Unfit:
        return []
    encoded = base64.b64encode(thumbnail(image)).decode()
    return [{'reason': str(unfit), 'key': entry.key, 'detail': unfit.detail, 'image': encoded}]
