"""Reader for a CSV or JSONL file with the captions of a folder of images."""

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError


@dataclass(frozen=True)
class CaptionRow:
    """Row of a captions file: path of an image relative to the image folder, its captions and the other columns."""

    where: str
    """Position for messages, such as `captions.csv line 7`."""
    path: Path
    captions: list[str]
    metadata: dict[str, Any]


def read_caption_rows(file: Path) -> Iterator[CaptionRow]:
    """Yield the rows of a CSV with columns `file` and `caption`, or of a JSONL with `file` and `caption` or `captions`.

    Raises:
        UserError: The file does not exist or cannot be parsed, or a row has a missing or invalid column.
    """
    for where, row in _rows(file):
        others = {name: value for name, value in row.items() if name not in (None, 'file', 'caption', 'captions')}
        yield CaptionRow(where, _file_of(row, where), _captions_of(row, where), others)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (position, columns) of each row; a position is text such as 'captions.csv line 7'."""
    readers = {'.csv': _csv_rows, '.jsonl': _jsonl_rows}
    if file.suffix.lower() not in readers:
        raise UserError(f'--captions: {file} is neither .csv nor .jsonl')
    if not file.is_file():
        raise UserError(f'--captions: {file} does not exist')
    try:
        yield from readers[file.suffix.lower()](file)
    except UnicodeDecodeError as error:
        raise UserError(f'--captions: {file} is not UTF-8 ({error}); save it as UTF-8') from error


def _csv_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding='utf-8-sig', newline='') as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            columns = list(reader.fieldnames or [])
            missing = [column for column in ('file', 'caption') if column not in columns]
            if missing:
                raise UserError(
                    f'{file.name} line 1: has no column {missing[0]!r}, only {columns}; rename the matching column'
                )
            for row in reader:
                yield f'{file.name} line {reader.line_num}', row
        except csv.Error as error:
            raise UserError(
                f'{file.name} line {reader.reader.line_num}: is not valid CSV ({error}); correct it'
            ) from error


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _file_of(row: dict[str, Any], where: str) -> Path:
    file = row.get('file')
    if not isinstance(file, str) or not file:
        raise UserError(f'{where}: `file` is {file!r}; give a path relative to the image folder')
    path = Path(os.path.normpath(file))
    if path.is_absolute() or '..' in path.parts:
        raise UserError(f'{where}: `file` is {file!r}, outside the image folder; give a path relative to it')
    return path


def _captions_of(row: dict[str, Any], where: str) -> list[str]:
    if 'caption' not in row and 'captions' not in row:
        raise UserError(f'{where}: has neither `caption` nor `captions`; it has {sorted(row)}')
    captions = row['captions'] if 'captions' in row else [row['caption']]
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise UserError(f'{where}: the caption is {row.get("captions", row.get("caption"))!r}; it must be text')
    return captions
