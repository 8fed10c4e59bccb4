"""Read captions from CSV, JSONL or Parquet tables (a row per image), or from .txt and .json files beside images."""

import json
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.extra_columns import json_value, read_columns
from diffusion.prepare.filters import usable_captions
from diffusion.prepare.image_table import row_values
from diffusion.prepare.source import CaptionText, Entry, Unfit, captions_in, captions_of_columns, texts_of
from diffusion.storage.text_tables import csv_rows

FILE_COLUMNS = ('file', 'file_name')
"""Accepted names of the column with image paths; `file_name` is used by Hugging Face's imagefolder format."""
CAPTION_COLUMNS = ('captions', 'caption', 'text')
"""Names of the caption column, in order of precedence; `text` is the name in Hugging Face's imagefolder format."""
_REJECTED_ROWS = ('no_caption', 'caption_not_text', 'caption_not_utf8')
"""Caption problems that reject a row as soon as it is read, so that messages can state the row's position."""
NO_PATH = ('no_file_name', 'not_json', 'outside_folder')
"""Problems of rows that contain no valid path of an image inside the folder."""
_DRIVE = re.compile('[A-Za-z]:[/\\\\]')
TEXT_COLUMN = 'txt'
"""Name in `caption_columns` that selects the text file beside an image; other names are keys of its .json file."""

Wanted = tuple[Sequence[str], Sequence[str]]
"""Required columns: (possible names of the key or path column, caption columns, or none for `CAPTION_COLUMNS`)."""
Rows = Iterator[tuple[str, dict[str, Any] | None]]


@dataclass(frozen=True)
class CaptionRow:
    """Row of a caption file: an image's path relative to the image folder, its captions, and other columns."""

    where: str
    """Position of the row, for messages, such as `captions.csv line 7`."""
    file: str
    """The image's path as written in the caption file; if the value is not text, its `repr`."""
    captions: list[str]
    metadata: dict[str, Any]
    caption_columns: list[str]
    """The source column of each caption if there are several columns; otherwise empty."""
    problem: str | None = None

    @property
    def paths(self) -> list[str]:
        """Normalized paths at which the image may be: as written, and with each backslash read as a separator."""
        return [os.path.normpath(path) for path in dict.fromkeys((self.file, self.file.replace('\\', '/')))]


def read_caption_rows(file: Path, caption_columns: Sequence[str] = ()) -> Iterator[CaptionRow]:
    """Yield rows of a caption file with columns `file` and `captions` or `caption`.

    The imagefolder names `file_name` and `text` are accepted too. A row without a usable caption or path has `problem`
    set. A CSV or Parquet file must have all of `caption_columns`, but rows of a JSONL file may lack some. Without
    `caption_columns`, the common names are used.
    """
    for where, row in _checked_rows(file, (FILE_COLUMNS, caption_columns)):
        unreadable = CaptionRow(where, 'None', [], {}, [], 'not_json')
        yield unreadable if row is None else _caption_row(where, row, caption_columns)


def read_keyed_captions(
    file: Path, key_columns: Sequence[str], caption_columns: Sequence[str]
) -> Iterator[tuple[str, str | None, list[Any], list[str], dict[str, Any]]]:
    """Yield (position, key, captions, column of each caption, row) for each row of a table; the key may be None.

    The key is in the first of `key_columns` that exists. Without `caption_columns`, the common names are used, and no
    columns are returned.
    """
    for where, row in _checked_rows(file, (key_columns, caption_columns)):
        values = row or {}
        key = values.get(_column(values, key_columns) or '')
        captions, names = _captions_of(values, caption_columns)
        yield where, None if key in (None, '') else str(key), [json_value(text) for text in captions], names, values


def _checked_rows(file: Path, wanted: Wanted) -> Rows:
    """Yield the rows of a table; at its end, raise UserError if no row had a key column, or none a caption column."""
    columns: dict[str, None] = {}
    for where, row in _rows(file, wanted):
        columns |= dict.fromkeys(row or ())
        yield where, row
    for names in (wanted[0], wanted[1] or CAPTION_COLUMNS):
        if columns and _column(columns, names) is None:
            raise UserError(f'{file.name}: has no column {_either(names)}, only {list(columns)}; rename one')


def _captions_of(row: dict[str, Any], caption_columns: Sequence[str]) -> tuple[list[Any], list[str]]:
    if caption_columns:
        return captions_of_columns(row, caption_columns)
    caption = _column(row, CAPTION_COLUMNS)
    return [] if caption is None else texts_of(row[caption]), []


def _caption_row(where: str, row: dict[str, Any], caption_columns: Sequence[str]) -> CaptionRow:
    image, caption = (_column(row, names) for names in (FILE_COLUMNS, CAPTION_COLUMNS))
    # If a row has both `caption` and `captions`, the one that is not read does not become metadata.
    used = {image, 'caption', 'captions', *(caption_columns or [caption])}
    others = {name: value for name, value in row.items() if name not in used}
    captions, names = _captions_of(row, caption_columns)
    path = None if image is None else row[image]
    problem = _path_problem(path) or _caption_problem(captions)
    names = names if len(caption_columns) > 1 else []
    names = [name for name, text in zip(names, captions, strict=False) if isinstance(text, str)]
    texts = [text for text in captions if isinstance(text, str)]
    return CaptionRow(where, path if isinstance(path, str) else repr(path), texts, others, names, problem)


def _path_problem(path: Any) -> str | None:
    if not isinstance(path, str) or not path.strip() or '\0' in path:
        return 'no_file_name'
    forms = (path, path.replace('\\', '/'))
    if _DRIVE.match(path) or any(os.path.isabs(form) or '..' in Path(os.path.normpath(form)).parts for form in forms):
        return 'outside_folder'
    return None


def _caption_problem(captions: Sequence[Any]) -> str | None:
    """Return why no caption of a row is usable, if the reason is in `_REJECTED_ROWS`; otherwise None."""
    try:
        usable_captions(captions)
    except Unfit as unfit:
        return str(unfit) if str(unfit) in _REJECTED_ROWS else None
    return None


def _either(names: Sequence[str]) -> str:
    return ' or '.join(map(repr, names))


def _column(row: Container[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def _check(wanted: Wanted, where: str) -> Callable[[Sequence[str]], None]:
    """Return a function that takes a table's column names, and raises UserError if a required column is missing."""

    def check(columns: Sequence[str]) -> None:
        for names in (wanted[0], *([(name,) for name in wanted[1]] or [CAPTION_COLUMNS])):
            if _column(columns, names) is None:
                other = len(columns) == 1 and next((each for each in ';\t|' if each in columns[0]), None)
                way_out = f'separate its cells with commas, not with {other!r}' if other else 'rename the right one'
                raise UserError(f'{where}: has no column {_either(names)}, only {list(columns)}; {way_out}')

    return check


def _rows(file: Path, wanted: Wanted) -> Rows:
    """Yield (position, values by column) for each row; the values are None for a JSONL line that is not an object."""
    readers: dict[str, Callable[[Path, Wanted], Rows]] = {
        '.csv': _csv_rows,
        '.jsonl': _jsonl_rows,
        '.parquet': _parquet_rows,
    }
    if not file.is_file():
        raise UserError(f'--captions: {file} does not exist')
    if file.suffix.lower() not in readers:
        raise UserError(f'--captions: {file} is neither .csv nor .jsonl nor .parquet')
    return readers[file.suffix.lower()](file, wanted)


def _csv_rows(file: Path, wanted: Wanted) -> Rows:
    # Keep bytes that are not UTF-8 as surrogates; `_caption_problem` rejects such rows.
    check = _check(wanted, f'{file.name} line 1')
    return csv_rows(file, file.name, check=check, errors='surrogateescape')


def _jsonl_rows(file: Path, wanted: Wanted) -> Rows:
    found = False
    with file.open(encoding='utf-8-sig', errors='surrogateescape') as lines:
        for number, line in enumerate(lines, start=1):
            where = f'{file.name} line {number}'
            if not line.strip():
                continue
            if number == 1 and '\0' in line:
                raise UserError(f'{where}: is not UTF-8 text, but UTF-16 or another encoding; save the file as UTF-8')
            try:
                row = json.loads(line)
                problem = '' if isinstance(row, dict) else f'is {type(row).__name__}'
            except (ValueError, RecursionError) as error:  # ValueError also covers numbers above 4300 digits
                row, problem = None, f'is not JSON ({error})'
            # If the first line is not valid, the file is not a JSONL file at all; a later line is rejected alone.
            if problem and not found:
                raise UserError(f'{where}: {problem}; write one object with `{wanted[0][0]}` and `caption` per line')
            found = True
            yield where, None if problem else row


def _parquet_rows(file: Path, wanted: Wanted) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        _check(wanted, file.name)(table.schema_arrow.names)
        number = 0
        for batch in table.iter_batches():
            for row in row_values(batch):
                number += 1
                yield f'{file.name} row {number}', row
    except pa.ArrowException as error:
        raise UserError(f'{file}: is not valid Parquet ({" ".join(str(error).split())}); write it again') from error


def read_sidecars(
    entry: Entry, text: bytes | None, columns: bytes | None, *, rule: CaptionText, caption_columns: Sequence[str]
) -> None:
    """Set the captions and the metadata of an entry, or its problem if they cannot be read.

    `text` and `columns` are the contents of the image's .txt and .json files; None means that the file does not exist.
    The captions are those of `caption_columns` (keys of the .json file, and `txt` for the .txt file). If this is empty:
    `captions` in the .json file if that is a list; otherwise the .txt file's; otherwise `caption` in the .json file,
    which may be a string or a list of strings. The other keys of the .json file become metadata.
    """
    entry.metadata = {} if columns is None else read_columns(columns)
    captions, caption = (entry.metadata.get(name) for name in ('captions', 'caption'))
    try:
        if caption_columns:
            lines = [] if text is None or TEXT_COLUMN not in caption_columns else captions_in(text, rule)
            values = entry.metadata | {TEXT_COLUMN: lines}
            entry.captions, names = captions_of_columns(values, caption_columns)
            entry.caption_columns = names if len(caption_columns) > 1 else []
        elif isinstance(captions, list):
            entry.captions = captions
        elif text is not None:
            entry.captions = captions_in(text, rule)
        else:
            value = captions if caption is None else caption
            entry.captions = [] if value is None else texts_of(value)
            if 'bad_metadata' in entry.metadata:
                entry.problem = entry.problem or 'bad_json'
    except UnicodeDecodeError:
        entry.problem = entry.problem or 'caption_not_utf8'
    for name in ('captions', 'caption', *caption_columns):
        entry.metadata.pop(name, None)
