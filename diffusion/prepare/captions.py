"""Captions of a folder's pictures: a .txt beside each, or one CSV or JSONL file for all."""

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.prepare.report import Report

SUFFIXES = frozenset({'.jpg', '.jpeg', '.png', '.webp', '.bmp', '.gif'})


@dataclass(frozen=True)
class Captioned:
    """A picture's file, its path in the source folder as text, and its captions."""

    path: Path
    key: str
    captions: list[str]


def find_pictures(source: Path) -> list[Path]:
    """Pictures under a folder by relative path, sorted; hidden files are not among them."""
    if not source.is_dir():
        raise ValueError(f'{source}: is no folder; give the folder of pictures')
    paths = (path for path in source.rglob('*') if path.suffix.lower() in SUFFIXES and not path.name.startswith('.'))
    found = sorted(path.relative_to(source) for path in paths if path.is_file())
    if not found:
        raise ValueError(f'{source}: has no pictures ({", ".join(sorted(SUFFIXES))})')
    return found


def from_text_files(source: Path, report: Report) -> list[Captioned]:
    """Pictures with the lines of the .txt beside them; those without are rejected in the report."""
    captioned = []
    for path in find_pictures(source):
        text = (source / path).with_suffix('.txt')
        try:
            lines = text.read_text(encoding='utf-8-sig').splitlines() if text.is_file() else []
        except UnicodeDecodeError:
            report.reject('caption_not_utf8', key_of(path))
            continue
        _add(captioned, source, path, lines, report)
    return captioned


def from_captions_file(source: Path, file: Path, report: Report) -> list[Captioned]:
    """Pictures named by a CSV with columns `file` and `caption`, or a JSONL with `file` and `caption` or `captions`.

    Rejected in the report: rows whose file is missing or came before, and pictures that no row names.

    Raises:
        ValueError: The file cannot be read as what its suffix says, or a row lacks something or has another type.
    """
    pictures = find_pictures(source)
    seen: set[Path] = set()
    captioned: list[Captioned] = []
    for where, row in _rows(file):
        path, captions = _file_of(row, where), _captions_of(row, where)
        if path in seen:
            report.reject('duplicate_row', f'{key_of(path)} ({where})')
        elif not (source / path).is_file():
            report.reject('missing_file', f'{key_of(path)} ({where})')
        else:
            _add(captioned, source, path, captions, report)
        seen.add(path)
    for path in pictures:
        if path not in seen:
            report.reject('no_caption', key_of(path))
    return captioned


def key_of(path: Path) -> str:
    """A relative path as text that UTF-8 can hold, whatever bytes the file's name is made of."""
    return os.fsencode(path.as_posix()).decode('utf-8', 'backslashreplace')


def _add(captioned: list[Captioned], source: Path, path: Path, captions: list[str], report: Report) -> None:
    stripped = [caption.strip() for caption in captions if caption.strip()]
    if stripped:
        captioned.append(Captioned(source / path, key_of(path), stripped))
    else:
        report.reject('no_caption', key_of(path))


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with where they stand, 'captions.csv line 7'."""
    readers = {'.csv': _csv_rows, '.jsonl': _jsonl_rows}
    if file.suffix.lower() not in readers:
        raise ValueError(f'--captions: {file} is neither .csv nor .jsonl')
    if not file.is_file():
        raise ValueError(f'--captions: {file} does not exist')
    try:
        yield from readers[file.suffix.lower()](file)
    except UnicodeDecodeError as error:
        raise ValueError(f'--captions: {file} is not UTF-8 ({error}); save it as UTF-8') from error


def _csv_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding='utf-8-sig', newline='') as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            columns = list(reader.fieldnames or [])
            missing = [column for column in ('file', 'caption') if column not in columns]
            if missing:
                raise ValueError(f'{file.name} line 1: has no column {missing[0]!r} (it has {columns}); name it so')
            for row in reader:
                yield f'{file.name} line {reader.line_num}', row
        except csv.Error as error:
            raise ValueError(f'{file.name} line {reader.reader.line_num}: is not CSV ({error}); correct it') from error


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open(encoding='utf-8-sig') as lines:
        for number, line in enumerate(lines, start=1):
            where = f'{file.name} line {number}'
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f'{where}: is not JSON ({error}); write one object a line') from error
            if not isinstance(row, dict):
                raise ValueError(f'{where}: is {type(row).__name__}, not an object with `file` and `caption`')
            yield where, row


def _file_of(row: dict[str, Any], where: str) -> Path:
    file = row.get('file')
    if not isinstance(file, str) or not file:
        raise ValueError(f'{where}: `file` is {file!r}; give a path relative to the folder of pictures')
    path = Path(os.path.normpath(file))
    if path.is_absolute() or '..' in path.parts:
        raise ValueError(f'{where}: `file` is {file!r}, outside the folder of pictures; give a path relative to it')
    return path


def _captions_of(row: dict[str, Any], where: str) -> list[str]:
    if 'caption' not in row and 'captions' not in row:
        raise ValueError(f'{where}: has neither `caption` nor `captions`; it has {sorted(row)}')
    captions = row['captions'] if 'captions' in row else [row['caption']]
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f'{where}: the caption is {row.get("captions", row.get("caption"))!r}; it must be text')
    return captions
