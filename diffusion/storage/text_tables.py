"""Read CSV and TSV files written by people, and JSON Lines files that may be incomplete.

Mistakes in a CSV file are reported with file and line. Lines of JSON Lines files that are not objects are skipped.
"""

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diffusion.errors import UserError

_NEVER = re.compile('[\0\udc80-\udcff]')
"""Characters that never occur in UTF-8 text: NUL, and surrogates for undecodable bytes."""
_CONTROL = re.compile('[\x01-\x08\x0e-\x1f]')


def csv_rows(
    file: Path,
    name: str,
    *,
    check: Callable[[Sequence[str]], None] = lambda columns: None,
    delimiter: str = ',',
    quoting: int = csv.QUOTE_MINIMAL,
    errors: str = 'strict',
) -> Iterator[tuple[str, dict[str, str | None]]]:
    """Yield (position, cells by column) for each row of a CSV file whose first line has the column names.

    A position is a text such as `captions.csv line 7`. Missing cells of short rows are None. `errors` is
    an argument of `open`: with 'strict', a file that is not UTF-8 raises UnicodeDecodeError.

    Args:
        check: Called with the column names before the first row; raises an error for a missing column.
    """
    with file.open(encoding='utf-8-sig', errors=errors, newline='') as lines:
        if sys.version_info < (3, 11):  # csv rejects NUL: pass a surrogate, for `is_misread`
            lines = (line.replace('\0', '\udc80') for line in lines)
        reader = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)  # pyright: ignore[reportArgumentType]
        try:
            columns = next(reader, [])
            _check_header(columns, f'{name} line 1')
            check(columns)
            for cells in reader:
                where = f'{name} line {reader.line_num}'
                if len(cells) > len(columns) and any(cells[len(columns) :]):
                    raise UserError(
                        f'{where}: has {len(cells)} cells, more than the {len(columns)} columns of line 1 '
                        f'({", ".join(columns)}); put cells that contain the delimiter in quotation marks'
                    )
                if cells:
                    given: list[str | None] = [*cells[: len(columns)], *[None] * (len(columns) - len(cells))]
                    yield where, dict(zip(columns, given, strict=True))
        except csv.Error as error:
            raise UserError(f'{name} line {reader.line_num}: is not valid CSV ({error}); correct it') from error


def is_misread(text: str) -> bool:
    """Return True if a text was decoded as UTF-8 but has another encoding.

    Such a text contains surrogates for undecodable bytes (`surrogateescape`) or a NUL, or at least one in four of its
    characters is a control character: UTF-16 without a byte-order mark is valid UTF-8, with a NUL after each Latin
    letter and the control character U+0004 after each Cyrillic letter.
    """
    if text.isascii() and text.isprintable():
        return False
    start = text[:1000]
    return bool(_NEVER.search(text)) or 4 * len(_CONTROL.findall(start)) >= len(start)


def _check_header(columns: Sequence[str], where: str) -> None:
    if any(map(is_misread, columns)):
        raise UserError(f'{where}: is not UTF-8 text, but UTF-16 or another encoding; save the file as UTF-8')
    repeated = [name for name, count in Counter(columns).items() if count > 1 and name]
    if repeated:
        raise UserError(f'{where}: has two columns {repeated[0]!r}; rename or remove one')


MAX_LINE_BYTES = 2**16
"""Length in bytes above which `parse_json_lines` skips a line; lines written by this library have a few hundred."""


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects in a file's content; skip lines that are incomplete, too long or not objects."""
    return [*json_objects(line for line in content.splitlines() if len(line) <= MAX_LINE_BYTES)]


def json_objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines; skip lines that are incomplete or not objects."""
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # invalid JSON or UTF-8, or more than 4300 digits
            continue
        if isinstance(values, dict):
            yield values
