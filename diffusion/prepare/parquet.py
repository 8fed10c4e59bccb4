"""Source for Parquet files with an image column, as written by img2dataset and Hugging Face."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.errors import UserError
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.file_listing import (
    File,
    is_remote,
    list_files,
    local_copy,
    single_file_part,
    with_passed_over,
)
from diffusion.prepare.source import Entry, Part

SUFFIX = '.parquet'
IMAGE_COLUMNS = ('image', 'jpg', 'jpeg', 'png', 'webp', 'image_bytes', 'img')
CAPTION_COLUMNS = ('captions', 'caption', 'txt', 'text')
KEY_COLUMN = 'key'
BATCH_ROWS = 64
"""Rows decoded at a time, which bounds memory: a row holds a whole image file."""
PART_BYTES = 512 * 2**20
"""Size above which a local file is split into several parts, each with whole row groups."""


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files in a folder, a single file, or a pattern with braces; each file is one part, or several if large.

    The image column holds bytes, or Hugging Face's struct of bytes and path. Columns that are not named are detected by
    common names, ignoring case. The key of a row is the stem of the file plus its `key` column or its row number.
    """

    location: str
    image_column: str | None = None
    caption_column: str | None = None
    """Caption column: strings or lists of strings."""

    def parts(self) -> list[Part]:
        """Split the input into parts, which jobs convert in parallel: files, or ranges of row groups of large files.

        Raises:
            UserError: There is no file, the location cannot be listed, or the first file lacks a column.
        """
        files, others = list_files(self.location, (SUFFIX,))
        if not is_remote(files[0].url):  # report a wrong column name before any work is done
            self._check(Path(files[0].url))
        return with_passed_over([part for file in files for part in _parts_of(file)], others)

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield one image with captions and metadata per row of a part.

        For a damaged file, the rows before the damage, then an entry that reports it.

        Raises:
            UserError: The file lacks a column, or the store denies access.
            OSError: The file cannot be read at the moment.
        """
        where = part.where
        with local_copy(where['url'], size=where['size']) as path, path.open('rb') as opened:
            try:
                file = pq.ParquetFile(opened, memory_map=False, pre_buffer=False)
            except (pa.ArrowException, OSError) as error:
                _raise_if_io_error(error)
                yield Entry(where['stem'], problem='part_unreadable')
                return
            columns = self._columns(file.schema_arrow, where['url'])
            groups = range(*where.get('groups', (0, file.num_row_groups)))
            yield from _rows(file, groups, columns, where['stem'])

    def _check(self, path: Path) -> None:
        try:
            schema = pq.read_schema(path)
        except (pa.ArrowException, OSError):
            return  # `read` will report the damaged file as a rejected input
        self._columns(schema, str(path))

    def _columns(self, schema: pa.Schema, where: str) -> '_Columns':
        image = _resolve_column(schema, self.image_column, IMAGE_COLUMNS, where, 'image_column')
        kind = schema.field(image).type
        if not _is_bytes(kind) and not (pa.types.is_struct(kind) and kind.get_field_index('bytes') >= 0):
            raise UserError(
                f'{where}: column {image!r} has type {kind}; set image_column to a column of encoded images'
            )
        caption = _resolve_column(schema, self.caption_column, CAPTION_COLUMNS, where, 'caption_column')
        key = _find_column(schema, (KEY_COLUMN,))
        taken = {image, caption, key, *(name for name in schema.names if name.lower() in CAPTION_COLUMNS)}
        others = [field.name for field in schema if field.name not in taken and not _is_bytes(field.type)]
        return _Columns(image, caption, key, others)


@dataclass(frozen=True)
class _Columns:
    image: str
    caption: str
    key: str | None
    others: list[str]
    """Names of the metadata columns."""

    @property
    def all(self) -> list[str]:
        return [self.image, self.caption, *([self.key] if self.key else []), *self.others]


def _resolve_column(schema: pa.Schema, given: str | None, common_names: Sequence[str], where: str, option: str) -> str:
    found = _find_column(schema, common_names) if given is None else given if given in schema.names else None
    if found is None:
        tried = ', '.join(common_names) if given is None else repr(given)
        raise UserError(f'{where}: has no column {tried}, only {schema.names}; set {option}')
    return found


def _find_column(schema: pa.Schema, common_names: Sequence[str]) -> str | None:
    """Return the schema's column that has the first matching common name, ignoring case, or None if none matches."""
    spelled = {name.lower(): name for name in reversed(schema.names)}
    return next((spelled[name] for name in common_names if name in spelled), None)


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _parts_of(file: File) -> list[Part]:
    """Return the parts of a file: the whole file, or several ranges of row groups if it is local and large."""
    # A remote file stays one part: each part would download the whole file.
    whole = single_file_part(file, SUFFIX)
    if is_remote(file.url) or file.size <= PART_BYTES:
        return [whole]
    try:
        metadata = pq.read_metadata(file.url)
    except (pa.ArrowException, OSError):
        return [whole]  # `read` will report why
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    parts, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > PART_BYTES:
            name = f'{whole.name}-groups-{start:05}'
            parts.append(Part(name, whole.where | {'groups': [start, stop]}, sum(sizes[start:stop]), whole.stamp))
            start = stop
    return parts or [whole]


def _rows(file: pq.ParquetFile, groups: range, columns: _Columns, stem: str) -> Iterator[Entry]:
    row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
    seen: set[str] = set()
    try:
        for batch in file.iter_batches(BATCH_ROWS, list(groups), columns.all, use_threads=False):
            for values in _times_to_text(batch).to_pylist():
                yield _entry(values, columns, stem, row, seen)
                row += 1
    except (pa.ArrowException, OSError) as error:
        _raise_if_io_error(error)
        yield Entry(f'{stem} at row {row}', problem='part_damaged')


def _times_to_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert the date and time columns of a batch to strings, because Python's datetime cannot hold nanoseconds."""
    # Parquet has nanoseconds and Python's datetime does not, so `to_pylist` cannot convert every value.
    arrays = [
        array.cast(pa.string()) if pa.types.is_temporal(array.type) and not pa.types.is_duration(array.type) else array
        for array in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _entry(values: dict[str, Any], columns: _Columns, stem: str, row: int, seen: set[str]) -> Entry:
    key = values[columns.key] if columns.key else None
    entry = Entry(f'{stem}/row-{row}' if key is None else f'{stem}/{json_value(key)}')
    image, caption = values[columns.image], values[columns.caption]
    entry.image = image['bytes'] if isinstance(image, dict) else image
    entry.captions = caption if isinstance(caption, list) else [caption]
    entry.metadata = {name: json_value(values[name]) for name in columns.others}
    if entry.key in seen:
        entry.problem = 'duplicate_key'
    elif entry.image is None:
        entry.problem = 'no_image'
    seen.add(entry.key)
    return entry


def _raise_if_io_error(error: BaseException) -> None:
    # pyarrow raises OSError for damaged files as well, but without an errno. A real I/O error must propagate, since it
    # is retried, while damage is reported.
    if isinstance(error, OSError) and error.errno is not None:
        raise error
