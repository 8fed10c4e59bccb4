"""Reader for a CSV or JSONL file with the captions of a folder of images."""

import csv
import json
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.source import captions_of_columns

FILE_COLUMNS = ('file', 'file_name')
"""Names of the column with the path of an image; the second is that of Hugging Face's imagefolder."""
CAPTION_COLUMNS = ('captions', 'caption', 'text')
"""Names of the column with the captions, in order of precedence; the last is that of Hugging Face's imagefolder."""


@dataclass(frozen=True)
class CaptionRow:
    """Row of a captions file: path of an image relative to the image folder, its captions and the other columns."""

    where: str
    """Position for messages, such as `captions.csv line 7`."""
    path: Path
    captions: list[Any]
    metadata: dict[str, Any]
    caption_columns: list[str]
    """The column of each caption, if they are from several; otherwise empty."""


def read_caption_rows(file: Path, caption_columns: Sequence[str] = ()) -> Iterator[CaptionRow]:
    """Yield the rows of a CSV with columns `file` and `caption`, or of a JSONL with `file` and `caption` or `captions`.

    The `file_name` and `text` of Hugging Face's imagefolder are accepted too.

    Args:
        file: The file.
        caption_columns: Columns with captions, of which a row of a JSONL may lack some; empty for the common names.

    Raises:
        UserError: The file does not exist or cannot be parsed, or a row has a missing or invalid column.
    """
    for where, row in _rows(file, caption_columns):
        image, caption = (_column(row, names) for names in (FILE_COLUMNS, CAPTION_COLUMNS))
        # A row may have both `caption` and `captions`; the one that is not read is no metadata.
        used = {None, image, 'caption', 'captions', *(caption_columns or [caption])}
        others = {name: value for name, value in row.items() if name not in used}
        if caption_columns:
            captions, names = _named_captions(row, caption_columns, where)
        else:
            captions, names = _captions_of(row, caption, where), []
        yield CaptionRow(where, _file_of(row, image, where), captions, others, names)


def _column(row: Container[str], names: Sequence[str]) -> str | None:
    """Return the first of the names that a row has as a column."""
    return next((name for name in names if name in row), None)


def _rows(file: Path, caption_columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position, columns) of each row; a position is text such as 'captions.csv line 7'."""
    readers = {'.csv': _csv_rows, '.jsonl': _jsonl_rows, '.parquet': _parquet_rows}
    if file.suffix.lower() not in readers:
        raise UserError(f'--captions: {file} is neither .csv nor .jsonl nor .parquet')
    if not file.is_file():
        raise UserError(f'--captions: {file} does not exist')
    try:
        yield from readers[file.suffix.lower()](file, caption_columns)
    except UnicodeDecodeError as error:
        raise UserError(f'--captions: {file} is not UTF-8 ({error}); save it as UTF-8') from error


def _csv_rows(file: Path, caption_columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding='utf-8-sig', newline='') as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            columns = list(reader.fieldnames or [])
            named = [((name,), name) for name in caption_columns] or [(CAPTION_COLUMNS[1:], 'caption')]
            for names, wanted in ((FILE_COLUMNS, 'file'), *named):
                if _column(columns, names) is None:
                    raise UserError(
                        f'{file.name} line 1: has no column {wanted!r}, only {columns}; rename the matching column'
                    )
            for row in reader:
                yield f'{file.name} line {reader.line_num}', row
        except csv.Error as error:
            raise UserError(
                f'{file.name} line {reader.reader.line_num}: is not valid CSV ({error}); correct it'
            ) from error


def _jsonl_rows(file: Path, _: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding='utf-8-sig') as lines:
        for number, line in enumerate(lines, start=1):
            where = f'{file.name} line {number}'
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4300 digits
                raise UserError(f'{where}: is not JSON ({error}); write one object per line') from error
            if not isinstance(row, dict):
                raise UserError(f'{where}: is {type(row).__name__}, not an object with `file` and `caption`')
            yield where, row


def _parquet_rows(file: Path, caption_columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        missing = [name for name in caption_columns if name not in table.schema_arrow.names]
        if missing:
            raise UserError(f'{file}: has no column {missing[0]!r}, only {table.schema_arrow.names}; correct it')
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f'{file.name} row {number}', row
    except pa.ArrowException as error:
        raise UserError(f'{file}: is not valid Parquet ({" ".join(str(error).split())}); write it again') from error


def _file_of(row: dict[str, Any], column: str | None, where: str) -> Path:
    """Return the path of a row's image, which is in this column."""
    name = column or FILE_COLUMNS[0]
    file = row.get(name)
    if not isinstance(file, str) or not file:
        raise UserError(f'{where}: `{name}` is {file!r}; give a path relative to the image folder')
    path = Path(os.path.normpath(file))
    if path.is_absolute() or '..' in path.parts:
        raise UserError(f'{where}: `{name}` is {file!r}, outside the image folder; give a path relative to it')
    return path


def _captions_of(row: dict[str, Any], column: str | None, where: str) -> list[str]:
    """Return the captions of a row, which are in this column."""
    if column is None:
        raise UserError(f'{where}: has neither `caption` nor `captions` nor `text`; it has {sorted(row)}')
    captions = row[column] if column == 'captions' else [row[column]]
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise UserError(f'{where}: the caption is {row[column]!r}; it must be text')
    return captions


def _named_captions(row: dict[str, Any], columns: Sequence[str], where: str) -> tuple[list[Any], list[str]]:
    """Return the captions in the columns that the user named, and the column of each if they are several."""
    if not any(column in row for column in columns):
        raise UserError(f'{where}: has no column {" or ".join(columns)}, only {sorted(row)}; correct --caption-column')
    captions, names = captions_of_columns(row, columns)
    for caption, name in zip(captions, names, strict=True):
        if not isinstance(caption, str | None):
            raise UserError(f'{where}: the caption in {name} is {caption!r}; it must be text')
    return captions, names if len(columns) > 1 else []
