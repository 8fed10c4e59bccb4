"""Captions with 20 kinds of damage: every image is accounted for, and no kept caption differs from what was written."""

import csv
import io
import json
import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare.drawn import draw as drawn
from prepare.drawn import encode, here, samples

from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of

IMAGE = encode(drawn(1, width=20, height=20), 'PNG')
ROWS = 24


@dataclass
class Row:
    """Row of a captions file: the cells as they are written, None for a cell that is left out."""

    file: Any
    caption: Any
    missing: bool = False
    """True if the row has no caption cell at all."""


def foreign(text: str) -> bytes:
    return text.encode('utf-16-le')


DAMAGE: dict[str, Callable[[Row], None]] = {
    'null': lambda row: setattr(row, 'caption', None),
    'missing cell': lambda row: setattr(row, 'missing', True),
    'empty': lambda row: setattr(row, 'caption', ''),
    'blank': lambda row: setattr(row, 'caption', ' \t\u3000'),
    'zero width': lambda row: setattr(row, 'caption', '\u200b\ufeff'),
    'number': lambda row: setattr(row, 'caption', 7),
    'list of numbers': lambda row: setattr(row, 'caption', [1, 2]),
    'empty list': lambda row: setattr(row, 'caption', []),
    'list of texts': lambda row: setattr(row, 'caption', ['a dog', 'a hound']),
    'JSON list of texts': lambda row: setattr(row, 'caption', '["a dog", "a hound"]'),
    'absolute path': lambda row: setattr(row, 'file', f'/data/{row.file}'),
    'path of Windows': lambda row: setattr(row, 'file', f'C:\\data\\{row.file}'),
    'path above': lambda row: setattr(row, 'file', f'../{row.file}'),
    'missing file': lambda row: setattr(row, 'file', f'gone-{row.file}'),
    'no path': lambda row: setattr(row, 'file', ''),
    'UTF-16': lambda row: setattr(row, 'caption', foreign(row.caption)),
    'UTF-16, Cyrillic': lambda row: setattr(row, 'caption', foreign('красный')),
    'Latin-1': lambda row: setattr(row, 'caption', 'café au lait'.encode('latin-1')),
    'NUL': lambda row: setattr(row, 'caption', f'{row.caption}\0'),
    'too long': lambda row: setattr(row, 'caption', 'x' * 10_001),
}


def usable(value: Any) -> list[str]:
    """Return the captions in a cell, by rules that are written here for a second time."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return []
    if isinstance(value, str) and value.startswith('["'):
        value = json.loads(value)
    kept = []
    for text in value if isinstance(value, list) else [value]:
        if not isinstance(text, str) or any(unicodedata.category(character) == 'Cc' for character in text.strip()):
            continue
        clean = ' '.join(text.replace('\u200b', '').replace('\ufeff', '').split())
        if 0 < len(clean) <= 10_000:
            kept.append(clean)
    return kept


def as_cell(value: Any) -> bytes:
    """Return a value as a cell of a CSV or the content of a text file has it."""
    if isinstance(value, bytes):
        return value
    return b'' if value is None else value.encode() if isinstance(value, str) else json.dumps(value).encode()


def write_csv(rows: list[Row], folder: Path) -> list[Any]:
    lines = [b'file_name,text\n']
    for row in rows:
        line = io.StringIO()
        csv.writer(line, lineterminator='').writerow([row.file])
        cell = b'' if row.missing else b',"' + as_cell(row.caption).replace(b'"', b'""') + b'"'
        lines.append((line.getvalue().encode() or b'""') + cell + b'\n')
    (folder / 'metadata.csv').write_bytes(b''.join(lines))
    return [None if row.missing else as_cell(row.caption) for row in rows]


def write_jsonl(rows: list[Row], folder: Path) -> list[Any]:
    lines, values = [], []
    for row in rows:
        if isinstance(row.caption, bytes):
            cell = (
                b'"' + row.caption.replace(b'"', b'\\"').replace(b'\0', b'\\u0000').replace(b'\x04', b'\\u0004') + b'"'
            )
        else:
            cell = json.dumps(row.caption).encode()
        lines.append(
            b'{"file_name": %s%s}\n' % (json.dumps(row.file).encode(), b'' if row.missing else b', "text": ' + cell)
        )
        values.append(None if row.missing else row.caption)
    (folder / 'metadata.jsonl').write_bytes(b''.join(lines))
    return values


def write_parquet(rows: list[Row], folder: Path) -> list[Any]:
    cells = [None if row.missing or row.caption is None else as_cell(row.caption) for row in rows]
    texts = pa.array(cells, pa.binary())
    # A column of strings is not checked: its bytes may be anything.
    texts = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
    pq.write_table(pa.table({'file_name': [row.file for row in rows], 'text': texts}), folder / 'metadata.parquet')
    return cells


def write_sidecars(rows: list[Row], folder: Path) -> list[Any]:
    values = []
    for number, row in enumerate(rows):
        if row.missing:
            values.append(None)
        elif isinstance(row.caption, bytes) or (isinstance(row.caption, str) and number % 2):
            (folder / f'{number:02}.TXT').write_bytes(as_cell(row.caption))
            values.append(as_cell(row.caption))
        else:
            (folder / f'{number:02}.json').write_text(json.dumps({'caption': row.caption}))
            values.append(row.caption)
    return values


def check(seed: int, write: Callable[[list[Row], Path], list[Any]], tmp_path: Path) -> None:
    """Prepare a folder whose captions are damaged in drawn ways, and compare the result with what was written."""
    choose = random.Random(seed)
    folder = tmp_path / 'in'
    folder.mkdir()
    names = [f'{number:02}.png' for number in range(ROWS)]
    rows = [Row(name, f'image, {number} "ä"') for number, name in enumerate(names)]
    for kind, row in zip(choose.sample(list(DAMAGE), 20), choose.sample(rows[1:], 20), strict=True):
        DAMAGE[kind](row)
    for name in names:
        (folder / name).write_bytes(IMAGE)
    (folder / 'notes.pdf').write_bytes(b'%PDF')
    values = write(rows, folder)
    by_file = write is not write_sidecars
    wanted = {
        name: usable(value)
        for name, row, value in zip(names, rows, values, strict=True)
        if usable(value) and (row.file == name or not by_file)
    }
    settings = settings_of(
        {'source': {'kind': 'folder', 'location': str(folder)}, 'out': str(tmp_path / 'out'), 'sizes': [16]}
    )
    report = prepare(settings, run=here)
    assert report is not None
    kept = {sample['key']: sample['captions'] for sample in samples(tmp_path / 'out/16px')}
    assert kept == wanted
    assert {kind: found.count for kind, found in report.passed_over.items()} == {'.pdf': 1}
    assert report.inputs == len(kept) + sum(found.count for found in report.rejected.values()) + 1
    foreign_rows = sum(row.file != name for row, name in zip(rows, names, strict=True)) if by_file else 0
    assert report.inputs == ROWS + foreign_rows + 1, 'an image that no row names is an input too, beside its row'


@pytest.mark.parametrize(
    'write', [write_csv, write_jsonl, write_parquet, write_sidecars], ids=lambda write: write.__name__
)
@pytest.mark.parametrize('seed', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_captions_reject_their_images_alone(
    write: Callable[[list[Row], Path], list[Any]], seed: int, tmp_path: Path
) -> None:
    check(seed, write, tmp_path)
