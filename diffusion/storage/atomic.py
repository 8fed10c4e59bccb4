"""Files and folders that are whole or absent.

Each is written under an unfinished name beside its own, flushed to the disk and renamed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

UNFINISHED = '.unfinished-'
"""Part of the name of everything that is not whole, including what a killed process leaves behind."""


def new_unfinished(path: Path) -> Path:
    """Return a name beside `path` that nobody else uses, for what becomes `path` when it is whole."""
    return path.with_name(f'{path.name}{UNFINISHED}{uuid4().hex[:12]}')


@contextmanager
def becoming(path: Path) -> Iterator[Path]:
    """Yield a name to write a file under; when the block ends well, the file is flushed and renamed to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new_unfinished(path)
    try:
        yield unfinished
        _flush(unfinished)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def becoming_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well, it is flushed and renamed to `path`.

    Raises:
        OSError: `path` is there by then, and is not an empty folder.
    """
    unfinished = new_unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for folder, _, names in os.walk(unfinished):
            for name in names:
                _flush(Path(folder, name))
            sync_folder(Path(folder))
        os.rename(unfinished, path)
    except BaseException:
        remove(unfinished)
        raise
    sync_folder(path.parent)


def replace_folder(written: Path, path: Path, *, aside: Path | None = None) -> None:
    """Rename a folder whose files are flushed to `path`; a folder that is there goes, or comes back on an error.

    Args:
        written: The folder, on the same file system.
        path: Its new name.
        aside: Name of the replaced folder in between, which a kill leaves behind; by default an unfinished name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(written)
    aside = new_unfinished(path) if aside is None else aside
    replaces = path.exists()
    if replaces:
        os.rename(path, aside)
    try:
        os.rename(written, path)
    except BaseException:
        if replaces:
            os.rename(aside, path)
        raise
    sync_folder(path.parent)
    remove(aside)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, through to the disk; a file that is there is replaced."""
    with becoming(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; a removal that is killed leaves no half of it under its name."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # Its writer may live on for a moment and rename it too: one of the two renames wins, and neither gets half of it.
    removed = new_unfinished(path)
    with suppress(FileNotFoundError):
        path.rename(removed)
    # NFS keeps a file that somebody still reads; it goes with the next sweep.
    shutil.rmtree(removed, ignore_errors=True)


def remove_unfinished(folder: Path, *, below: bool = False) -> None:
    """Remove what killed processes left in a folder, or also below it; nobody may be writing there."""
    pattern = f'*{UNFINISHED}*'
    for path in [*(folder.rglob(pattern) if below else folder.glob(pattern))]:
        remove(path)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush(path: Path) -> None:
    """Flush a file to the disk: a full disk can go unnoticed on a network mount, a power cut leave an empty file."""
    with path.open('rb+') as file:
        os.fsync(file.fileno())
