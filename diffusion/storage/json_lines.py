"""Reading of JSON Lines files that a killed program, or another user, may have left in any state."""

import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 2**16
"""Longest line that is read; lines of this library have a few hundred bytes."""


def read_json_lines(path: Path, *, tail_bytes: int) -> list[dict[str, Any]]:
    """Return the JSON objects in the last part of a file; skip lines that are incomplete, too long or no objects.

    Args:
        path: The file; anything but a regular file has no lines.
        tail_bytes: Size of the part that is read.

    Raises:
        OSError: The file cannot be read.
    """
    # O_NONBLOCK: opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        is_regular = stat.S_ISREG(status.st_mode)
        content = os.pread(descriptor, tail_bytes, max(0, status.st_size - tail_bytes)) if is_regular else b''
    finally:
        os.close(descriptor)
    return parse_json_lines(content)


def parse_json_lines(content: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects in the content of a file; skip lines that are incomplete, too long or no objects."""
    return [*json_objects(line for line in content.splitlines() if len(line) <= MAX_LINE_BYTES)]


def json_objects(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines; skip lines that are incomplete or no objects."""
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: not JSON, not UTF-8, or a number of more than 4300 digits
            continue
        if isinstance(values, dict):
            yield values
