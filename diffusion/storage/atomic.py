"""Atomic writes of files and folders: after a crash, each is either complete or absent.

Each is written under a temporary name in the same folder, flushed to disk, and renamed. Files get the permissions set
by the umask, regardless of the library that writes them.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

UNFINISHED = '.unfinished-'
"""Substring in the name of every incomplete file and folder, including those left by a killed process."""
PRIVATE = 0o600


def new_unfinished(path: Path) -> Path:
    """Return a unique temporary path in the same folder as `path`, for writing before renaming to `path`."""
    # Use the same folder, because a rename is atomic only within a file system.
    return path.with_name(f'{path.name}{UNFINISHED}{uuid4().hex[:12]}')


@contextmanager
def atomic_file(path: Path, *, create_folder: bool = True) -> Iterator[Path]:
    """Yield a temporary path for writing a file; if the block succeeds, flush the file and rename it to `path`.

    The folder is created if it is missing. Pass `create_folder=False` for a file in a run's folder, which must not be
    recreated if its mount is missing: the write then fails.
    """
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new_unfinished(path)
    try:
        yield unfinished
        # Flush the content before the rename: otherwise, a power failure could leave an empty file under the final
        # name.
        _flush(unfinished)
        unfinished.replace(path)
    except BaseException:  # remove the file after KeyboardInterrupt too
        unfinished.unlink(missing_ok=True)
        raise
    # The new name is stored in the folder, which must be flushed separately.
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; if the block succeeds, flush it and rename it to `path`.

    Raises:
        OSError: At the end of the block, `path` exists and is not an empty folder.
    """
    unfinished = new_unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for folder, _, names in os.walk(unfinished):
            for name in names:
                _flush(Path(folder, name))
            sync_folder(Path(folder))
        # rename(2) replaces only empty folders and otherwise fails, so an existing dataset is never overwritten.
        os.rename(unfinished, path)
    except BaseException:
        remove(unfinished)
        raise
    sync_folder(path.parent)


def replace_folder(written: Path, path: Path, *, aside: Path | None = None, create_folder: bool = True) -> None:
    """Rename a folder to `path`, replacing an existing folder, which is restored if the rename fails.

    Args:
        aside: Temporary path for the replaced folder, which stays there if the process is killed between the two
            renames; by default, a path from `new_unfinished`.
    """
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(written)
    aside = new_unfinished(path) if aside is None else aside
    replaces = path.exists()
    # Two renames are needed, because rename(2) cannot replace a folder that has files. A kill between them leaves no
    # folder at `path`, but both folders are complete under other names.
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


def write_atomically(path: Path, content: str | bytes, *, create_folder: bool = True) -> None:
    """Write a file atomically (text as UTF-8) and flush it to disk, replacing an existing file."""
    with atomic_file(path, create_folder=create_folder) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    """Remove a file or folder if it exists; even if the process is killed, no partial folder remains under its name."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # The process that writes the folder may still be alive and may rename it too: one of the two renames succeeds, and
    # the other finds nothing.
    removed = new_unfinished(path)
    with suppress(FileNotFoundError):
        path.rename(removed)
    # NFS keeps files that are still open (as .nfsXXXX), which makes rmtree fail; the next call of remove_unfinished
    # removes them.
    shutil.rmtree(removed, ignore_errors=True)


def remove_unfinished(folder: Path, *, below: bool = False) -> None:
    """Remove what killed processes left incomplete from a folder; call this only while no process writes to it.

    `below` includes its subfolders.
    """
    pattern = f'*{UNFINISHED}*'
    for path in [*(folder.rglob(pattern) if below else folder.glob(pattern))]:
        remove(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's directory entries to disk, if the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush(path: Path) -> None:
    """Flush a file's content to disk; if only its owner may read it, set the usual permissions."""
    # Network mounts may report a full disk only at fsync; without fsync, a power failure can leave an empty file.
    with path.open('rb+') as file:
        # safetensors 0.8 writes via a temporary file with mode 0600, so nobody else could load exported weights.
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) == PRIVATE:
            os.fchmod(file.fileno(), _usual_permissions(path.parent))
        os.fsync(file.fileno())


def _usual_permissions(folder: Path) -> int:
    """Return the permissions of new files in a folder, which depend on the umask and the folder's access list."""
    # Create a file to find out: os.umask can read the umask only by changing it for all threads.
    probe = new_unfinished(folder / 'permissions')
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()
