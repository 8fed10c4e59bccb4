"""Convert one part of the input into one folder of shards, which gets its final name when complete."""

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.errors import DataError, UserError
from diffusion.prepare.extra_columns import BATCH_IMAGES, BATCH_PIXELS, compute_columns
from diffusion.prepare.image_decoding import decode_image
from diffusion.prepare.part_shards import InputRow, SampleRow, ShardPlace, fetch_tables, store_tables, write_tables
from diffusion.prepare.process_sample import (
    THUMBNAIL_SIDE,
    Buckets,
    Candidate,
    Measured,
    decode_entry,
    make_samples,
    sample_columns,
    thumbnail,
)
from diffusion.prepare.settings import PrepareSettings
from diffusion.prepare.source import (
    NAMES_SHOWN,
    Entry,
    NamedCount,
    Part,
    PassedOver,
    Source,
    Unfit,
    count_details,
    count_named,
)
from diffusion.prepare.work_dir import read_json
from diffusion.prepare.worker_pool import Note
from diffusion.storage import mds
from diffusion.storage.atomic import atomic_folder

SHARD_BYTES = 64 * 10**6
"""Maximum size in bytes of the samples in one shard of a part, which are held in memory until it is full."""
THUMBNAILS_FILE = 'thumbnails.json'
COUNTS_FILE = 'part.json'
THUMBNAILS_PER_REASON = 6
DECODER_REASONS = ('undecodable', 'truncated')
MAX_DETAIL = 200
ATTEMPTS = 4
BACKOFF_SECONDS = 1.0
"""Delay before the second attempt to read a part; it doubles with each further attempt."""


@dataclass
class PartCounts:
    """Counts for one converted part of the input, used by the progress bar and the report."""

    size: int
    """Size of the part for the progress bar, in the unit of `Part.size`."""
    inputs: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    columns: set[str] = field(default_factory=set)
    passed_over: dict[str, NamedCount] = field(default_factory=dict)
    """Skipped files by suffix or by another reason, such as `hidden`; they are not in `inputs`."""
    details: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of images by decoder message, under the keys `undecodable` and `truncated`."""
    repaired: NamedCount = field(default_factory=NamedCount)
    recoded: list[Measured] = field(default_factory=list)
    """File sizes and PSNR of some lossless images that are stored in a lossy format."""


@dataclass(frozen=True)
class PartJob:
    """Job that converts one part of the input into a folder of shards, tables, and thumbnails of rejected inputs."""

    number: int
    part: Part
    source: Source
    settings: PrepareSettings
    folder: Path
    """Output folder of the part; exists only when complete."""
    url: str | None = None
    """Object store URL to which the part's shards, then its tables, are uploaded; if None, they stay in `folder`."""
    stored: Mapping[str, int] | None = None
    """Sizes of the objects at `url` by name, if an earlier start or another machine converted the part."""

    @property
    def name(self) -> str:
        return f'part {self.number} ({self.part.name})'

    def __call__(self, note: Note) -> PartCounts:
        """Convert the part, unless an earlier start has done so; return its counts. Reading is retried."""
        for attempt in range(ATTEMPTS):
            if self.folder.is_dir():
                return read_counts(self.folder, self.part)
            try:
                return self._prepare(note)
            except _Unreadable as error:
                # Retries do not help if a file or a permission is missing; other errors may be temporary.
                permanent = isinstance(error.__cause__, FileNotFoundError | NotADirectoryError | PermissionError)
                if permanent or attempt == ATTEMPTS - 1:
                    raise (UserError if permanent else DataError)(
                        f'{self.name}: cannot be read ({error.__cause__}); fix the cause and run the same command '
                        'again; finished work is kept'
                    ) from error
                time.sleep(BACKOFF_SECONDS * 2**attempt)
        raise AssertionError

    def _prepare(self, note: Note) -> PartCounts:
        try:
            with atomic_folder(self.folder) as unfinished:
                if self.url is None:
                    return self._write(unfinished, note)
                if self.stored is not None and fetch_tables(self.url, unfinished, self.stored):
                    return read_counts(unfinished, self.part)
                counts = self._write(unfinished, note)
                store_tables(unfinished, self.url)
                return counts
        except OSError:
            # Renaming fails if another machine converted the same part and finished first; its folder has the same
            # content.
            if not self.folder.is_dir():
                raise
            return read_counts(self.folder, self.part)

    def _write(self, folder: Path, note: Note) -> PartCounts:
        counts = PartCounts(self.part.size)
        format_ = mds.ShardFormat(sample_columns(self.settings), SHARD_BYTES)
        shards = ShardBuffer(ShardPlace(folder, self.url), format_)
        inputs: list[InputRow] = []
        stored: list[SampleRow] = []
        thumbnails: list[dict[str, str]] = []
        every = self.settings.fills_every_bucket
        buckets = Buckets(self.settings.sizes, self.settings.aspects, every=every, step=self.settings.step)
        for kind, files in self.part.passed_over.items():
            count_named(counts.passed_over, kind, files.count, files.names)
        pending: list[tuple[int, Candidate]] = []
        repaired: dict[str, None] = {}

        def reject(entry: Entry, row: InputRow, unfit: Unfit) -> None:
            row.reason = str(unfit)
            counts.rejected[row.reason] += 1
            if row.reason in DECODER_REASONS and unfit.detail:
                count_details(counts.details, row.reason, {unfit.detail[:MAX_DETAIL]: 1})
            if counts.rejected[row.reason] <= THUMBNAILS_PER_REASON:
                thumbnails.extend(_thumbnails(entry, unfit, self.settings))

        def store_pending() -> None:
            for (number, candidate), computed in zip(pending, self._compute(pending), strict=True):
                entry, row = candidate.entry, candidate.row
                counts.columns.update(computed)
                with self._naming(entry):
                    try:
                        shared = {'settings': self.settings, 'buckets': buckets, 'recoded': counts.recoded}
                        samples = make_samples(candidate, computed, **shared)
                    except Unfit as unfit:
                        reject(entry, row, unfit)
                        continue
                if candidate.decoded.is_repaired:
                    repaired[row.key] = None
                stored.extend(
                    SampleRow(number, bucket, *shards.add(shards.format.encode(sample))) for bucket, sample in samples
                )
            pending.clear()

        for entry in self._entries(note):
            if isinstance(entry, PassedOver):
                count_named(counts.passed_over, entry.kind, 1, [entry.key])
                continue
            number, row = len(inputs), InputRow(self.settings.key_prefix + entry.key)
            inputs.append(row)
            counts.columns |= entry.metadata.keys()
            with self._naming(entry):
                try:
                    pending.append((number, decode_entry(entry, row, self.settings, buckets)))
                except Unfit as unfit:
                    reject(entry, row, unfit)
            if self._is_full(pending):
                store_pending()
        store_pending()
        counts.inputs = len(inputs)
        counts.repaired = NamedCount(len(repaired), list(repaired)[:NAMES_SHOWN])
        shards.flush()
        # no need to flush each file: the folder is flushed and renamed as a whole
        write_tables(folder, inputs, stored)
        (folder / THUMBNAILS_FILE).write_text(json.dumps(thumbnails), encoding='utf-8')
        sorted_counts = {'columns': sorted(counts.columns), 'passed_over': dict(sorted(counts.passed_over.items()))}
        content = {name: value for name, value in vars(counts).items() if name != 'size'} | sorted_counts
        (folder / COUNTS_FILE).write_text(json.dumps(content, default=vars), encoding='utf-8')
        (folder / mds.INDEX).write_text(mds.index_text(shards.entries), encoding='utf-8')
        return counts

    def _is_full(self, pending: Sequence[tuple[int, Candidate]]) -> bool:
        """Return True if the pending images fill a batch: of one image without the user's column function."""
        if self.settings.columns_from is None:
            return bool(pending)
        pixels = sum(each.decoded.width * each.decoded.height for _, each in pending)
        return len(pending) >= BATCH_IMAGES or pixels >= BATCH_PIXELS

    def _compute(self, pending: Sequence[tuple[int, Candidate]]) -> list[dict[str, Any]]:
        """Return for each image the columns that the user's function computes, by name; {} without a function."""
        path, images = self.settings.columns_from, [each for _, each in pending]
        if path is None or not images:
            return [{} for _ in images]
        try:
            found = compute_columns(
                path, [each.decoded.image for each in images], [each.row.captions for each in images]
            )
        except UserError:
            raise
        except Exception as error:  # a bug in the user's function; keep the traceback
            keys = f'{images[0].entry.key!r} to {images[-1].entry.key!r}'
            raise RuntimeError(f'{self.name}, images {keys}: {path}: {error!r}') from error
        for each, columns in zip(images, found, strict=True):
            if taken := columns.keys() & each.entry.metadata.keys():
                raise UserError(
                    f'{path}: image {each.entry.key!r} has a column {min(taken)!r} already; use another name for the '
                    'computed one'
                )
        return found

    @contextmanager
    def _naming(self, entry: Entry) -> Iterator[None]:
        """Convert exceptions in the `with` block, except `Unfit`, to a RuntimeError that names the image.

        `Unfit` rejects the image; any other exception is a bug.
        """
        try:
            yield
        except Unfit:
            raise
        except Exception as error:
            raise RuntimeError(f'{self.name}, image {entry.key!r}: {error!r}') from error

    def _entries(self, note: Note) -> Iterator[Entry | PassedOver]:
        """Yield the part's entries and skipped files; pass keys to `note` first: an image may kill the process."""
        # `_write` reads and writes in one loop. This wrapper marks an OSError from the source, which is retried, so
        # that it differs from an OSError in the work folder (such as a full disk), which is not retried.
        try:
            for entry in self.source.read(self.part):
                note(f'image {entry.key!r}')
                yield entry
                note(f'the entry after image {entry.key!r}')
        except OSError as error:
            raise _Unreadable from error


class _Unreadable(Exception):
    """Raised when the source raised an OSError while reading a part; `__cause__` is the OSError."""


class ShardBuffer:
    """Writes a part's shards; buffers one shard in memory, and writes it when full."""

    def __init__(self, place: ShardPlace, format_: mds.ShardFormat) -> None:
        self.place = place
        self.format = format_
        self.entries: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._bytes = 0

    def add(self, sample: bytes) -> tuple[int, int, int]:
        """Add a sample; return its shard number, its offset after the shard's header, and its size, both in bytes."""
        if self._samples and self._bytes + len(sample) > SHARD_BYTES:
            self.flush()
        self._samples.append(sample)
        self._bytes += len(sample)
        return len(self.entries), self._bytes - len(sample), len(sample)

    def flush(self) -> None:
        if self._samples:
            name = mds.shard_name(len(self.entries))
            sizes = [len(sample) for sample in self._samples]
            with self.place.writing(name) as path:
                self.entries.append(self.format.write_shard(path, self._samples, sizes, name=name))
        self._samples, self._bytes = [], 0


def read_counts(folder: Path, part: Part) -> PartCounts:
    content = read_json(folder / COUNTS_FILE)
    content['rejected'], content['columns'] = Counter(content['rejected']), set(content['columns'])
    content['passed_over'] = {kind: NamedCount(**files) for kind, files in content['passed_over'].items()}
    return PartCounts(part.size, **content | {'repaired': NamedCount(**content['repaired'])})


def _thumbnails(entry: Entry, unfit: Unfit, settings: PrepareSettings) -> list[dict[str, str]]:
    """Return a list with a rejected image's reason, key, detail and base64 JPEG; empty if it cannot be decoded."""
    try:
        image = decode_image(
            entry.image or b'',
            background=settings.background,
            max_pixels=settings.max_pixels,
            formats=settings.formats,
            svg_side=THUMBNAIL_SIDE,
        ).image
    except Unfit:
        return []
    encoded = base64.b64encode(thumbnail(image)).decode()
    return [{'reason': str(unfit), 'key': entry.key, 'detail': unfit.detail, 'image': encoded}]
