"""Reader of Arrow files as `save_to_disk` of Hugging Face's `datasets` writes them, without that package."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffusion.errors import UserError
from diffusion.prepare.image_table import (
    ColumnNames,
    Columns,
    ReadImage,
    entry_of,
    find_columns,
    raise_if_io_error,
)
from diffusion.prepare.source import Entry, Part
from diffusion.prepare.table_values import row_values

SUFFIX = '.arrow'
STATE = 'state.json'
"""File of a saved dataset, with the names of its Arrow files and of its split."""
INFO = 'dataset_info.json'
"""File beside it, with the features."""
SPLITS = 'dataset_dict.json'
"""File of several saved datasets, one folder per split."""
BATCH_ROWS = 64
"""Rows converted at a time, which bounds memory: a row holds a whole image file."""
_FILE_MAGIC = b'ARROW1'


def saved_files(state: bytes, where: str) -> tuple[list[str], str | None]:
    """Return the names of the Arrow files of a saved dataset in order, and its split, from its state.json.

    Raises:
        UserError: The file is damaged, or the dataset has an order that is not that of its files.
    """
    try:
        content: dict[str, Any] = json.loads(state)
        names = [str(each['filename']) for each in content['_data_files']]
        split = content.get('_split')
        indices = content.get('_indices_data_files') or content.get('_indices_files')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f'{where}: is not the state of a dataset ({error!r}); save it again with save_to_disk'
        ) from error
    if indices:
        raise UserError(f'{where}: selects rows by indices; call flatten_indices() before save_to_disk')
    if any('/' in name for name in names):
        raise UserError(f'{where}: names files outside its folder ({", ".join(names[:3])}); save it again')
    return names, None if split is None else str(split).partition('[')[0]


def arrow_entries(path: Path, part: Part, names: ColumnNames, *, images: ReadImage | None) -> Iterator[Entry]:
    """Yield the rows of an Arrow file; for a damaged file, those before the damage, and an entry that reports it.

    Args:
        path: Local file, in Arrow's stream or file format.
        part: The part, whose `where` has the URL of the file and its stem.
        names: Columns that the user named.
        images: Reader of images that the rows only have the paths of.

    Raises:
        UserError: The file lacks a column.
        OSError: The file cannot be read at the moment.
    """
    stem, row, seen = part.where['stem'], 0, set[str]()
    columns: Columns | None = None
    groups = _rows(path, names, part.where['url'])
    while True:
        # Only the errors of reading the file are damage; those of `images` are not.
        try:
            columns, rows = next(groups)
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            raise_if_io_error(error)
            yield Entry(f'{stem} at row {row}', problem='part_unreadable' if columns is None else 'part_damaged')
            return
        for values in rows:
            yield entry_of(values, columns, stem, row, seen, images)
            row += 1


def _rows(path: Path, names: ColumnNames, where: str) -> Iterator[tuple[Columns, list[dict[str, Any]]]]:
    """Yield the columns that are read and the rows of an Arrow file, in groups."""
    # `datasets` writes files of 500 MB, of which only a batch is needed at a time.
    with pa.memory_map(str(path)) as opened:
        schema, batches = _open(opened)
        columns = find_columns(schema, names, where, suffix=SUFFIX)
        for batch in batches:
            chosen = batch.select(columns.all)
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield columns, row_values(chosen.slice(start, BATCH_ROWS))


def _open(file: pa.NativeFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema and the batches of an opened Arrow file, in the stream or the file format."""
    is_stream = file.read(len(_FILE_MAGIC)) != _FILE_MAGIC
    file.seek(0)
    if is_stream:
        stream = pa.ipc.open_stream(file)
        return stream.schema, iter(stream)
    table = pa.ipc.open_file(file)
    return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
