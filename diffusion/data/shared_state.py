"""What the processes of a machine share: the first failure of a dataset, and the names in shared memory.

Streaming's workers wait for each other's downloads indefinitely, and a download thread that fails only ends its
worker's epoch early, with a log line. So the first process that fails writes its message to a file, and all others
check for the file whenever they wait.
"""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer.utils import dist
from streaming.base.shared import prefix

from diffusion.compatibility.private_names import private_attribute, set_private_attribute
from diffusion.errors import DataError
from diffusion.storage import locks

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""Minimum interval between checks of the file: one takes 3 us, and Streaming's threads check several times a sample."""
SHM = Path('/dev/shm')
LOCK = Path(tempfile.gettempdir()) / 'diffusion-streaming.lock'
TIMEOUT_SECONDS = 15.0
"""Maximum wait for another job: long enough to open local data, and short enough if the other job hangs."""


class Failures:
    """Message of the first failure among a dataset's processes on this machine, shared so that all of them stop.

    Args:
        path: Path of the message file, the same in all processes of the dataset and different for every other dataset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._message: str | None = None
        self._last_poll = 0.0

    def clear(self) -> None:
        """Remove the failure message left by an earlier run; call this in one process before the others start."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def report(self, message: str) -> None:
        """Share the message of this process's failure, unless another process has already reported a failure."""
        # A reader must never see a partial message: write to a temporary file first. os.link fails if the target
        # exists, unlike a rename, so the first message, which names the cause, stays in place.
        unfinished = self.path.with_name(f'.{self.path.name}.{os.getpid()}.{threading.get_ident()}')
        try:
            unfinished.write_text(message, encoding='utf-8')
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, self.path)
            unfinished.unlink()
        except OSError as error:
            log.warning('%s: cannot be written (%s); other processes will not see this failure', self.path, error)
            self._message = message
        self._last_poll = 0.0

    def message(self, *, now: bool = False) -> str | None:
        """Return the message of the first failure, or None without a failure; up to POLL_SECONDS old unless `now`."""
        if self._message is None and (now or time.monotonic() - self._last_poll > POLL_SECONDS):
            self._last_poll = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                self._message = self.path.read_text(encoding='utf-8')
        return self._message

    def check(self, *, now: bool = False) -> None:
        """Raise an error with the message of the first failure, if any; up to POLL_SECONDS late unless `now`.

        Raises:
            DataError: A process has failed.
        """
        message = self.message(now=now)
        if message is not None:
            raise DataError(message)


class FailureEvent(threading.Event):
    """Event that Streaming's threads check in order to stop; also set when another process has failed."""

    # Streaming's threads wait for a shard in loops that end only when their event is set, and each worker has an event
    # of its own. If a shard's download fails in one worker, threads of the others would wait for it forever.

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self.failures = failures

    def is_set(self) -> bool:
        """Return True if this process or another one on this machine has failed."""
        return super().is_set() or self.failures.message() is not None


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold a lock of this machine while the block creates a dataset; a collective call.

    If the lock cannot be taken, a warning is logged and the block runs without the lock.
    """
    # Streaming's get_shm_prefix() looks for a free name in shared memory on each rank and claims it only afterwards. If
    # two jobs start on one machine at the same time, one fails with `FileExistsError`. If the names of a killed job
    # vanish during the search, as when ranks restart, the ranks find different ones. Streaming also takes a name if a
    # killed job has left only some of its files in shared memory: the position of a resumed job among them would make
    # the new job skip the beginning of its data. Remove this module when Streaming claims an unused name in one step.
    with contextlib.ExitStack() as stack:
        if dist.get_local_rank() == 0:
            try:
                # Do not remove the lock file afterwards: /tmp is sticky, so another user could not.
                stack.enter_context(locks.hold_lock(LOCK, locks.wait_at_most(TIMEOUT_SECONDS, lambda: None)))
            except locks.WaitedTooLong:
                log.warning('%s: held by another job for %d s; continuing without the lock', LOCK, TIMEOUT_SECONDS)
            except OSError as error:
                log.warning('%s: cannot be opened (%s); continuing without the lock', LOCK, error)
        # One rank per machine takes the lock; the others wait here until it holds the lock.
        dist.barrier()
        with _unused_name_on_all_ranks():
            yield


@contextlib.contextmanager
def _unused_name_on_all_ranks() -> Iterator[None]:
    """Let Streaming use, on all ranks of a machine, the largest of the unused numbers that they have found."""
    find, machine = private_attribute(prefix, '_check_and_find_retrying'), os.uname().nodename

    def agreed(*arguments: Any, **settings: Any) -> int:
        error: ValueError | None = None
        number = -1
        try:
            number = _unused(find(*arguments, **settings))
        except ValueError as caught:  # another dataset of this machine uses the local folder
            error = caught
        found = dist.all_gather_object((machine, number))
        if error is not None:
            raise error
        return max(each for place, each in found if place == machine)

    set_private_attribute(prefix, '_check_and_find_retrying', agreed)
    try:
        yield
    finally:
        set_private_attribute(prefix, '_check_and_find_retrying', find)


def _unused(number: int) -> int:
    """Return the first number, from this one on, that is not the prefix of a file in shared memory."""
    used = {path.name[:6] for path in SHM.glob('[0-9]' * 6 + '_*')}
    while f'{number:06}' in used:
        number += 1
    return number
