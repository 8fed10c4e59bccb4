"""Reading of JSON Lines files that a killed program, or another user, may have left in any state."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

MAX_LINE_BYTES = 2**16
"""Longest line that is read; lines of this library have a few hundred bytes."""


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects in the content of a file; skip lines that are incomplete, too long or not objects."""
    return [*json_objects(line for line in content.splitlines() if len(line) <= MAX_LINE_BYTES)]


def json_objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines; skip lines that are incomplete or not objects."""
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: not JSON, not UTF-8, or a number of more than 4300 digits
            continue
        if isinstance(values, dict):
            yield values
