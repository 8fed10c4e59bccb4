"""File locks between processes of one machine, released when the owner exits, and temporary folders for downloads.

`runs.run_lock` locks a run against jobs on other machines, since shared file systems may not support flock.
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
"""Time between two attempts to take a lock, as a fraction of the time since the first."""
STALE_SECONDS = 24 * 3600.0
"""Age at which unfinished files are removed from a file system without locks, since they might still be in use."""


class WaitedTooLong(Exception):
    """Another process holds a lock for longer than `wait_at_most` allows."""


def wait_at_most(seconds: float, wait: Callable[[], None]) -> Callable[[], None]:
    """Return a `wait` for a lock that calls this one, and raises WaitedTooLong after this many seconds from now."""
    deadline = time.monotonic() + seconds

    def limited() -> None:
        wait()
        if time.monotonic() >= deadline:
            raise WaitedTooLong

    return limited


def hold_path_lock(path: Path, wait: Callable[[], None]) -> contextlib.AbstractContextManager[bool]:
    """Hold a lock on `path` inside the block, by a hidden file next to it; otherwise like `hold_lock`."""
    return hold_lock(_lock_path(path), wait, remove=True)


@contextlib.contextmanager
def hold_lock(file: Path, wait: Callable[[], None], *, shared: bool = False, remove: bool = False) -> Iterator[bool]:
    """Hold a lock on a lock file inside the block; yield False, without a lock, if the file system has no locks.

    Args:
        file: The lock file; created with its folder if it does not exist.
        wait: Called every 20 to 250 ms while another process holds the lock; an exception that it raises ends the wait.
        shared: Take a shared lock, which other processes can hold at the same time if theirs is shared too.
        remove: Remove the lock file afterwards; only for files on which no process takes a shared lock.
    """
    # Poll, since a blocking flock could not call `wait`, which raises a caller's timeout or another rank's failure.
    begin = time.monotonic()
    while (handle := _try_lock(file, shared=shared)) is None:
        wait()
        # Poll less often after the first second: each poll is three requests to the server of a cluster's file system,
        # which thousands of processes may share.
        time.sleep(min(max(SHORTEST_POLL_SECONDS, POLL_FACTOR * (time.monotonic() - begin)), LONGEST_POLL_SECONDS))
    try:
        yield handle >= 0
    finally:
        _release(handle, file if remove else None)


def make_scratch_folder(path: Path, size: int) -> Path:
    """Create a temporary folder next to `path` to download the file into; its name records `size`, in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f'.{path.name}.{size}.{uuid.uuid4().hex[:12]}{SUFFIX}')
    scratch.mkdir()
    return scratch


def reserved_bytes(name: str) -> int:
    """Return the bytes reserved for a download, by the name that `make_scratch_folder` gave; 0 for other names."""
    parts = name.removesuffix(SUFFIX).rsplit('.', 2)
    return int(parts[1]) if name.endswith(SUFFIX) and len(parts) == 3 and parts[1].isdigit() else 0


def remove_stale_scratch(folder: Path) -> None:
    """Remove temporary download folders below a folder that killed processes left; folders in use are kept."""
    for scratch in folder.rglob(f'.*{SUFFIX}'):
        target = scratch.with_name(scratch.name.removesuffix(SUFFIX).rsplit('.', 2)[0][1:])
        # A download holds the lock of its target while it runs: if the lock can be taken, its process has ended.
        lock = _lock_path(target)
        handle = _try_lock(lock)
        if handle is None:
            continue
        try:
            if handle >= 0 or _age_seconds(scratch) > STALE_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)
        finally:
            _release(handle, lock)


def _lock_path(path: Path) -> Path:
    """Return the path of the hidden lock file for `path`, in the same folder."""
    return path.with_name(f'.{path.name}.lock')


def _try_lock(lock: Path, *, shared: bool = False) -> int | None:
    """Return a file descriptor that holds the lock, -1 if locks are not supported, None if another process holds it."""
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
        # The previous owner may have removed the file between the open and the flock here. This lock is then on an
        # unlinked inode, while the next process would create and lock a new file: both would hold "the" lock. Keep it
        # only if the name still refers to the same inode, otherwise try again.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        os.close(handle)


def _open(lock: Path) -> int:
    try:
        return open_own_file(lock, os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError:
        # Another user's file in a world-writable sticky folder such as /tmp cannot be opened with O_CREAT (sysctl
        # fs.protected_regular) or for writing, but it can be opened for reading, which is enough for flock.
        return open_own_file(lock, os.O_RDONLY)


def _release(handle: int, lock: Path | None) -> None:
    """Unlock and close a file descriptor returned by `_try_lock`; a given lock file is removed first."""
    if handle < 0:
        return
    # Unlink the file before the lock is released: afterwards it could be one that another process has just locked.
    if lock is not None:
        lock.unlink(missing_ok=True)
    # Unlock explicitly: closing alone would not release the lock if a process forked meanwhile shares the descriptor.
    fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _age_seconds(path: Path) -> float:
    """Return the seconds since a file was last modified; 0 if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
