"""One job at a time on a machine may register its datasets in shared memory."""

import contextlib
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from composer.utils import dist

log = logging.getLogger(__name__)

LOCK = Path(tempfile.gettempdir()) / 'diffusion-streaming.lock'
PATIENCE_SECONDS = 15.0
"""Enough for local data; a job that hangs while it holds the lock must not hold up the others."""


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold the machine's lock while a dataset is made.

    Streaming looks for a free name in shared memory and takes it later, each rank for itself: of two jobs that start
    on one machine at the same moment, one dies of `FileExistsError`, or its ranks disagree on the name.
    """
    handle = _lock() if dist.get_local_rank() == 0 else None
    try:
        dist.barrier()
        yield
    finally:
        if handle is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it to a process forked meanwhile
            os.close(handle)


def _lock() -> int | None:
    handle = _open()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while handle is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning('%s: held by another job for %d s; going on without it', LOCK, PATIENCE_SECONDS)
                os.close(handle)
                return None
            time.sleep(0.02)
    return None


def _open() -> int | None:
    # A file of another user in a folder that all may write to can be opened, but not with O_CREAT (protected_regular).
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CREAT):
        with contextlib.suppress(OSError):
            return os.open(LOCK, flags | os.O_CLOEXEC, 0o666)
    log.warning('%s: cannot be opened; going on without a lock among the jobs of this machine', LOCK)
    return None
