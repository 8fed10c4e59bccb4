"""Locks between processes of a machine, which end with their owner, and folders for unfinished files.

Jobs of several machines are kept apart by `launch.run_lock`, since file systems of clusters may have no locks.
"""

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

SUFFIX = '.unfinished'
STALE_SECONDS = 24 * 3600.0
"""Age at which unfinished files are removed from a file system without locks, which cannot tell who is at them."""


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock of a path, in a hidden file beside it; as `held`."""
    with held(_lock_of(path), wait, remove=True) as is_held:
        yield is_held


@contextlib.contextmanager
def held(file: Path, wait: Callable[[], None], *, shared: bool = False, remove: bool = False) -> Iterator[bool]:
    """Hold the lock that a file stands for; yields False where the file system has no locks and nothing is held.

    Args:
        file: Made if it is not there, with its folder.
        wait: Called every few milliseconds while another process holds the lock; an exception that it raises ends
            the wait.
        shared: Let others hold it too, who ask for it shared.
        remove: Remove the file afterwards; only for files that nobody holds shared.
    """
    while (handle := _taken(file, shared=shared)) is None:
        wait()
        time.sleep(0.02)
    try:
        yield handle >= 0
    finally:
        _release(handle, file if remove else None)


def scratch_for(path: Path, size: int) -> Path:
    """Make a folder beside a path, to make the file in; its name says how large that will be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f'.{path.name}.{size}.{uuid.uuid4().hex[:12]}{SUFFIX}')
    scratch.mkdir()
    return scratch


def reserved_bytes(name: str) -> int:
    """Return the size that a folder of `scratch_for` will hold, from its name; 0 for another name."""
    parts = name.removesuffix(SUFFIX).rsplit('.', 2)
    return int(parts[1]) if name.endswith(SUFFIX) and len(parts) == 3 and parts[1].isdigit() else 0


def remove_stale_scratch(folder: Path) -> None:
    """Remove the unfinished files of killed processes below a folder; those that a living one is at stay."""
    for scratch in folder.rglob(f'.*{SUFFIX}'):
        target = scratch.with_name(scratch.name.removesuffix(SUFFIX).rsplit('.', 2)[0][1:])
        lock = _lock_of(target)
        handle = _taken(lock)
        if handle is None:
            continue
        try:
            if handle >= 0 or _age_seconds(scratch) > STALE_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            _release(handle, lock)


def _lock_of(path: Path) -> Path:
    return path.with_name(f'.{path.name}.lock')


def _taken(lock: Path, *, shared: bool = False) -> int | None:
    """Return a handle that holds the lock, -1 where there are no locks, None where another process holds it."""
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _open(lock)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            return -1
        # The owner before may have removed the file after it was opened here: the lock is then of a file without a
        # name, and the next process would make another one.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        os.close(handle)


def _open(lock: Path) -> int:
    try:
        return os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except PermissionError:
        # Another user's file in a folder that all may write to, such as /tmp, can be opened to be read, and not with
        # O_CREAT (sysctl fs.protected_regular).
        return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)


def _release(handle: int, lock: Path | None) -> None:
    if handle < 0:
        return
    if lock is not None:
        lock.unlink(missing_ok=True)
    fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it to a process forked meanwhile
    os.close(handle)


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
