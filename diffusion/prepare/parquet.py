"""Source for Parquet files with an image column, as written by img2dataset or Hugging Face; reads Arrow files too."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.prepare.dataset_splits import refuse_mixed_splits
from diffusion.prepare.file_listing import File, is_pattern, list_files, local_copy, single_file_part, with_passed_over
from diffusion.prepare.image_table import (
    URL,
    ColumnNames,
    Columns,
    LocalImages,
    ReadImage,
    StoreImages,
    entry_of,
    find_columns,
    image_path,
    raise_if_io_error,
    row_values,
)
from diffusion.prepare.source import Entry, Part
from diffusion.storage.places import is_url

SUFFIX = '.parquet'
ARROW_SUFFIX = '.arrow'
DOWNLOADS = 16
"""Number of objects to download at the same time if rows refer to images in an object store."""
BATCH_ROWS = 64
"""Number of rows converted at a time; kept low to limit memory, because a row may contain a whole image file."""
PART_BYTES = 512 * 2**20
"""Local files above this size are split into several parts of whole row groups."""
_ARROW_FILE_MAGIC = b'ARROW1'


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files in a folder, a single file, or a pattern with braces; each file is one part, or several if large.

    The image column contains bytes, Hugging Face's struct of bytes and path, or paths. The file at a path without bytes
    is read if it is inside the location, local or in an object store. Unless set, columns are found by common names,
    ignoring case. A row's key is the file's stem plus the `key` column or the row number.
    """

    location: str
    image_column: str | None = None
    caption_column: str | Sequence[str] | None = None
    """Caption column(s), with strings or lists of strings."""
    key_column: str | None = None

    @property
    def _columns(self) -> ColumnNames:
        return ColumnNames(self.image_column, self.caption_column, self.key_column)

    def parts(self) -> list[Part]:
        """Split the input into parts for parallel jobs: files, or ranges of row groups of large files."""
        files, others = list_files(self.location, (SUFFIX,))
        if not is_pattern(self.location):
            refuse_mixed_splits(self.location, [file.name for file in files], 'parquet')
        if not is_url(files[0].url):
            check_columns(files[0].url, self._columns, files[0].url)
        return with_passed_over([part for file in files for part in parquet_parts(file)], others)

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield one entry (image, captions and metadata) per row; see `parquet_entries`."""
        url = part.where['url']
        with local_copy(url, size=part.where['size']) as path:
            yield from parquet_entries(path, part, self._columns, images=images_of(self.location, url))


def images_of(location: str, table: str) -> ReadImage:
    """Return a reader for images to which a table's rows refer by path, in a folder or an object store."""
    folder = os.path.dirname(table)
    if is_url(table):
        location = location.rstrip('/')
        root = location if table.startswith(f'{location}/') else folder
        return StoreImages(root, folder.removeprefix(root).strip('/'))
    location = location.removeprefix('file://')
    root = location if os.path.isdir(location) else folder or '.'
    inside = os.path.relpath(folder or '.', root)
    return LocalImages(root, '' if inside == '.' else inside)


def check_columns(file: str | pa.NativeFile, names: ColumnNames, where: str) -> None:
    """Raise UserError for a wrong column name, before any work is done; `file` is a Parquet file or its last bytes."""
    try:
        schema = pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return  # `read` will report the damaged file as a rejected input
    find_columns(schema, names, where)


def parquet_entries(path: Path, part: Part, names: ColumnNames, *, images: ReadImage | None) -> Iterator[Entry]:
    """Yield the rows of a part of a Parquet file; at damage to the file, yield an entry that reports it, and stop."""
    where = part.where
    with path.open('rb') as opened:
        try:
            file = pq.ParquetFile(opened, memory_map=False, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise_if_io_error(error)
            yield Entry(where['stem'], problem='part_unreadable')
            return
        columns = find_columns(file.schema_arrow, names, where['url'])
        groups = range(*where.get('groups', (0, file.num_row_groups)))
        row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
        batches = file.iter_batches(BATCH_ROWS, list(groups), columns.all, use_threads=False)
        yield from _entries(batches, columns, where['stem'], row, images)


def arrow_entries(path: Path, part: Part, names: ColumnNames, *, images: ReadImage | None) -> Iterator[Entry]:
    """Yield the rows of an Arrow file (stream or file format); otherwise like `parquet_entries`."""
    where = part.where
    try:
        # Memory-map the file: `datasets` writes files of 500 MB, but only one batch is needed at a time.
        opened = pa.memory_map(str(path))
        schema, batches = _open_arrow(opened)
    except (pa.ArrowException, OSError) as error:
        raise_if_io_error(error)
        yield Entry(f'{where["stem"]} at row 0', problem='part_unreadable')
        return
    with opened:
        columns = find_columns(schema, names, where['url'], suffix=ARROW_SUFFIX)
        groups = (
            batch.select(columns.all).slice(start, BATCH_ROWS)
            for batch in batches
            for start in range(0, batch.num_rows, BATCH_ROWS)
        )
        yield from _entries(groups, columns, where['stem'], 0, images)


def _open_arrow(file: pa.NativeFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    is_stream = file.read(len(_ARROW_FILE_MAGIC)) != _ARROW_FILE_MAGIC
    file.seek(0)
    if is_stream:
        stream = pa.ipc.open_stream(file)
        return stream.schema, iter(stream)
    table = pa.ipc.open_file(file)
    return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))


def parquet_parts(file: File) -> list[Part]:
    """Return a file's parts: the whole file or, if it is local and large, several ranges of row groups."""
    # A remote file stays one part, because each part would download the whole file.
    whole = single_file_part(file, SUFFIX)
    if is_url(file.url) or file.size <= PART_BYTES:
        return [whole]
    try:
        metadata = pq.read_metadata(file.url)
    except (pa.ArrowException, OSError):
        return [whole]  # `read` will report why the file cannot be read
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    parts, start = [], 0
    for stop in range(1, len(sizes) + 1):
        if stop == len(sizes) or sum(sizes[start : stop + 1]) > PART_BYTES:
            name = f'{whole.name}-groups-{start:05}'
            parts.append(Part(name, whole.where | {'groups': [start, stop]}, sum(sizes[start:stop]), whole.stamp))
            start = stop
    return parts or [whole]


def _entries(
    batches: Iterator[pa.RecordBatch], columns: Columns, stem: str, row: int, images: ReadImage | None
) -> Iterator[Entry]:
    """Yield the rows of batches, numbered starting from `row`; see `parquet_entries`."""
    seen: set[str] = set()
    while True:
        # Errors from reading the file count as damage; errors from `images` do not, and propagate.
        try:
            rows = row_values(next(batches))
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise_if_io_error(error)
            yield Entry(f'{stem} at row {row}', problem='part_damaged')
            return
        for values, read_image in _with_readers(rows, columns, images):
            yield entry_of(values, columns, stem, row, seen, read_image)
            row += 1


def _with_readers(
    rows: Sequence[dict[str, Any]], columns: Columns, images: ReadImage | None
) -> Iterator[tuple[dict[str, Any], ReadImage | None]]:
    """Yield each row with a function that reads its image; images in an object store are downloaded in groups."""
    if not isinstance(images, StoreImages):
        yield from ((values, images) for values in rows)
        return
    with ThreadPoolExecutor(DOWNLOADS) as threads:
        for start in range(0, len(rows), DOWNLOADS):
            group = rows[start : start + DOWNLOADS]
            paths = [image_path(values[columns.image]) for values in group]
            reads = [None if not path or URL.match(path) else threads.submit(images, path) for path in paths]
            for values, read in zip(group, reads, strict=True):
                yield values, None if read is None else lambda _, read=read: read.result()
