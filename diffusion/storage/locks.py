"""File locks between processes of a machine, released when the owner exits, and temporary folders for downloads.

To lock a run against jobs on other machines, use `runs.run_lock`: shared file systems may not support flock.
"""

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from diffusion.storage.local_files import open_own_file

SUFFIX = '.unfinished'
SHORTEST_POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.25
POLL_FACTOR = 0.02
"""Time between attempts to take a lock, as a fraction of the time since the first attempt; from 20 to 250 ms."""
STALE_SECONDS = 24 * 3600.0
"""Age in seconds from which temporary download folders are removed on a file system without locks; younger ones may
still be in use."""


class WaitedTooLong(Exception):
    """Raised if another process held a lock for longer than `wait_at_most` allows."""


def wait_at_most(seconds: float, wait: Callable[[], None]) -> Callable[[], None]:
    """Return a wrapper of `wait` that raises WaitedTooLong if called later than `seconds` from now."""
    deadline = time.monotonic() + seconds

    def limited() -> None:
        wait()
        if time.monotonic() >= deadline:
            raise WaitedTooLong

    return limited


def hold_path_lock(path: Path, wait: Callable[[], None]) -> contextlib.AbstractContextManager[bool]:
    """Hold a lock on `path` during the `with` block, using a hidden file beside it; otherwise like `hold_lock`."""
    return hold_lock(_lock_path(path), wait, remove=True)


@contextlib.contextmanager
def hold_lock(file: Path, wait: Callable[[], None], *, shared: bool = False, remove: bool = False) -> Iterator[bool]:
    """Create and lock a file during the `with` block; yield True, or False if the file system has no locks.

    Args:
        wait: Called every 20 to 250 ms while another process holds the lock; it may raise an exception to end the wait.
        shared: Take a shared lock, which several processes can hold at the same time.
        remove: Remove the lock file afterward; allowed only if no process takes a shared lock on it.
    """
    # Poll: a blocking flock could not call `wait`, which raises on the caller's timeout or another rank's failure.
    begin = time.monotonic()
    while (handle := _try_lock(file, shared=shared)) is None:
        wait()
        # Poll less often after the first second: each poll sends three requests to the server of a cluster's file
        # system, which may be shared by thousands of processes.
        time.sleep(min(max(SHORTEST_POLL_SECONDS, POLL_FACTOR * (time.monotonic() - begin)), LONGEST_POLL_SECONDS))
    try:
        yield handle >= 0
    finally:
        _release(handle, file if remove else None)


def make_scratch_folder(path: Path, size: int) -> Path:
    """Create a folder beside `path` in which to download this file of `size` bytes; the folder's name has the size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f'.{path.name}.{size}.{uuid.uuid4().hex[:12]}{SUFFIX}')
    scratch.mkdir()
    return scratch


def reserved_bytes(name: str) -> int:
    """Return the number of bytes reserved for a download, from its folder's name; 0 for other names."""
    parts = name.removesuffix(SUFFIX).rsplit('.', 2)
    return int(parts[1]) if name.endswith(SUFFIX) and len(parts) == 3 and parts[1].isdigit() else 0


def remove_stale_scratch(folder: Path) -> None:
    """Remove temporary download folders that killed processes left below a folder; folders in use are kept.

    Locks show which folders are in use. On a file system without locks, folders older than STALE_SECONDS are removed.
    """
    for scratch in folder.rglob(f'.*{SUFFIX}'):
        target = scratch.with_name(scratch.name.removesuffix(SUFFIX).rsplit('.', 2)[0][1:])
        # A running download holds its target's lock, so if the lock can be taken, the process has ended.
        lock = _lock_path(target)
        handle = _try_lock(lock)
        if handle is None:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):
                if handle >= 0 or time.time() - scratch.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(scratch, ignore_errors=True)
        finally:
            _release(handle, lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(f'.{path.name}.lock')


def _try_lock(lock: Path, *, shared: bool = False) -> int | None:
    """Try to take an exclusive or `shared` lock: return a descriptor, -1 if locks do not work, None if it is held."""
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
        # The previous owner may have removed the file between our open and our flock. Our lock is then on an unlinked
        # inode, and the next process would create and lock a new file, so both would hold "the" lock. Keep our lock
        # only if the name still refers to the same inode; otherwise, try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        os.close(handle)


def _open(lock: Path) -> int:
    try:
        return open_own_file(lock, os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError:
        # In a world-writable sticky folder such as /tmp, another user's file cannot be opened with O_CREAT (sysctl
        # fs.protected_regular) or for writing. But it can be opened for reading, which is enough for flock.
        return open_own_file(lock, os.O_RDONLY)


def _release(handle: int, lock: Path | None) -> None:
    """Unlock and close a file descriptor returned by `_try_lock`, after removing the lock file if one is given."""
    if handle < 0:
        return
    # Unlink the file before releasing the lock: afterward, another process may already have locked it.
    if lock is not None:
        lock.unlink(missing_ok=True)
    # Unlock explicitly: if a process forked in the meantime shares the descriptor, closing does not release the lock.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
