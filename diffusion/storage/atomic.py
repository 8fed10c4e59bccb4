"""Files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

UNFINISHED = '.unfinished-'
"""In the name of what is not whole; what a killed process leaves has it too."""


def new_unfinished(path: Path) -> Path:
    """A name beside `path` that nobody else uses, for what becomes `path` when it is whole."""
    return path.with_name(f'{path.name}{UNFINISHED}{uuid4().hex[:12]}')


@contextmanager
def becoming(path: Path) -> Iterator[Path]:
    """A name to write a file under; when the block ends well it is flushed to the disk and becomes `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new_unfinished(path)
    try:
        yield unfinished
        with unfinished.open('rb+') as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, through to the disk; what is there is replaced."""
    with becoming(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a power cut, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
