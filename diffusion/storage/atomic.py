"""Atomic writes of files and folders: after a crash each is either complete or absent.

Each is written under a temporary name in the same folder, flushed to the disk and renamed. Files get the permissions
of the umask, whichever library writes them.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

UNFINISHED = '.unfinished-'
"""Substring in the name of every incomplete file and folder, including those that a killed process leaves behind."""
PRIVATE = 0o600
"""Permissions of a file that was created with `tempfile`."""


def new_unfinished(path: Path) -> Path:
    """Return a unique temporary path in the folder of `path`, to write to before renaming to `path`."""
    # Use the same folder, since a rename is atomic only within one file system.
    return path.with_name(f'{path.name}{UNFINISHED}{uuid4().hex[:12]}')


@contextmanager
def atomic_file(path: Path, *, create_folder: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write a file to; if the block succeeds, the file is flushed and renamed to `path`.

    Args:
        create_folder: Create the folder if it does not exist; False for a run's folder, which must not be created again
            if its file system is no longer mounted.
    """
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = new_unfinished(path)
    try:
        yield unfinished
        # Flush the content before the rename: otherwise a power cut could leave an empty file under the final name.
        _flush(unfinished)
        unfinished.replace(path)
    except BaseException:  # KeyboardInterrupt too
        unfinished.unlink(missing_ok=True)
        raise
    # The new name is in the folder, which is flushed separately from the file.
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; if the block succeeds, it is flushed and renamed to `path`.

    Raises:
        OSError: When the block ends, `path` exists and is not an empty folder.
    """
    unfinished = new_unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for folder, _, names in os.walk(unfinished):
            for name in names:
                _flush(Path(folder, name))
            sync_folder(Path(folder))
        # rename(2) replaces an empty folder and fails on any other, so an existing dataset is never overwritten.
        os.rename(unfinished, path)
    except BaseException:
        remove(unfinished)
        raise
    sync_folder(path.parent)


def replace_folder(written: Path, path: Path, *, aside: Path | None = None, create_folder: bool = True) -> None:
    """Rename a folder to `path`, replacing an existing folder, which is restored if the rename fails.

    Args:
        written: The folder, on the same file system; its files must be flushed already.
        aside: Temporary path of the replaced folder, which remains if the process is killed between the two renames;
            a path of `new_unfinished` by default.
        create_folder: Create the folder of `path` if it does not exist.
    """
    if create_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    sync_folder(written)
    aside = new_unfinished(path) if aside is None else aside
    replaces = path.exists()
    # Two renames, since rename(2) cannot replace a folder that has files: a kill between them leaves no folder at
    # `path`, and both complete folders under other names.
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
    """Write a file atomically (text as UTF-8) and flush it to the disk, replacing an existing file."""
    with atomic_file(path, create_folder=create_folder) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists; a kill of the process never leaves a partial folder under the name."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # The process that writes the folder may still be alive and rename it too: one of the two renames succeeds, and
    # the other finds nothing.
    removed = new_unfinished(path)
    with suppress(FileNotFoundError):
        path.rename(removed)
    # NFS keeps a file that a process has open (.nfsXXXX), which makes rmtree fail; the next call of
    # remove_unfinished removes it.
    shutil.rmtree(removed, ignore_errors=True)


def remove_unfinished(folder: Path, *, below: bool = False) -> None:
    """Remove incomplete files and folders that killed processes left; no other process may be writing there.

    Args:
        below: Clean all of its subfolders too.
    """
    pattern = f'*{UNFINISHED}*'
    for path in [*(folder.rglob(pattern) if below else folder.glob(pattern))]:
        remove(path)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk, if the file system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _flush(path: Path) -> None:
    """Flush a file's content to the disk, and give a file that only its owner may read the usual permissions."""
    # Network mounts may report a full disk only at fsync, and without it a power cut can leave an empty file.
    with path.open('rb+') as file:
        # safetensors 0.8 writes through a temporary file with 0600, so nobody else could load exported weights.
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) == PRIVATE:
            os.fchmod(file.fileno(), _usual_permissions(path.parent))
        os.fsync(file.fileno())


def _usual_permissions(folder: Path) -> int:
    """Return the permissions of a new file in a folder, as the umask and the folder's access list set them."""
    # Create a file to see them: os.umask can only read the umask by changing it for all threads.
    probe = new_unfinished(folder / 'permissions')
    probe.touch()
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()
