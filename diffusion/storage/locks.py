"""Locks between processes that end with their owner, and folders for what is not finished."""

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
"""Age at which unfinished files go on a file system that has no locks to tell whether somebody is at them."""


@contextlib.contextmanager
def locked(path: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a path, waiting for who holds it; `wait` is called meanwhile and may raise.

    Where the file system has no locks, nothing is held.
    """
    lock = _lock_of(path)
    while (handle := _taken(lock)) is None:
        wait()
        time.sleep(0.02)
    try:
        yield
    finally:
        _release(handle, lock)


def scratch_for(path: Path, size: int) -> Path:
    """A new folder beside a path, to make the file in; its name says how large that will be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f'.{path.name}.{size}.{uuid.uuid4().hex[:12]}{SUFFIX}')
    scratch.mkdir()
    return scratch


def reserved_bytes(name: str) -> int:
    """What a folder of `scratch_for` will hold, or 0 for another name."""
    parts = name.removesuffix(SUFFIX).rsplit('.', 2)
    return int(parts[1]) if name.endswith(SUFFIX) and len(parts) == 3 and parts[1].isdigit() else 0


def remove_stale_scratch(folder: Path) -> None:
    """Remove what killed processes left unfinished below a folder; what a living one is at stays."""
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


def _taken(lock: Path) -> int | None:
    """A handle that holds the lock, -1 where there are no locks, None where another process holds it."""
    while True:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            return -1
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        os.close(handle)  # its last owner has removed it; the name is of another file now


def _release(handle: int, lock: Path) -> None:
    if handle < 0:
        return
    lock.unlink(missing_ok=True)
    fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it to a process forked meanwhile
    os.close(handle)


def _age_seconds(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
