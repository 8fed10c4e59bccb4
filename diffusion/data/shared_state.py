"""State shared by the processes of a machine: a dataset's first failure, and names in shared memory.

Streaming's workers wait indefinitely for each other's downloads. If a download thread fails, Streaming only logs a line
and ends that worker's epoch early. So the first process that fails writes its message to a file, and all others check
for the file whenever they wait.
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
"""Minimum interval between checks of the file: a check takes 3 us, and threads check several times per sample."""
SHM = Path('/dev/shm')
LOCK = Path(tempfile.gettempdir()) / 'diffusion-streaming.lock'
TIMEOUT_SECONDS = 15.0
"""Maximum wait in seconds while another job creates its dataset; after it, this job goes on without the lock."""


class Failures:
    """Shares the message of the first failure with all processes of a dataset on this machine, in the file `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._message: str | None = None
        self._last_poll = 0.0

    def clear(self) -> None:
        """Remove the failure message left by an earlier run; call this in one process before the others start."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def report(self, message: str) -> None:
        """Share this process's failure message, unless another process has already reported a failure."""
        # Write to a temporary file first, so that readers never see a partial message. Unlike a rename, os.link fails
        # if the target exists, so the first message, which names the cause, is kept.
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
        """Return the first failure's message, or None; the answer is up to POLL_SECONDS old unless `now` is set."""
        if self._message is None and (now or time.monotonic() - self._last_poll > POLL_SECONDS):
            self._last_poll = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                self._message = self.path.read_text(encoding='utf-8')
        return self._message

    def check(self, *, now: bool = False) -> None:
        """Raise DataError with the first failure's message; may be up to POLL_SECONDS late unless `now` is set."""
        if (message := self.message(now=now)) is not None:
            raise DataError(message)


class FailureEvent(threading.Event):
    """Event that stops Streaming's threads; it is also set when another process has failed."""

    # Streaming's threads wait for a shard in loops that end only when their event is set, and each worker has its own
    # event. If a download fails in one worker, the threads of the other workers would wait for the shard forever.

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self.failures = failures

    def is_set(self) -> bool:
        return super().is_set() or self.failures.message() is not None


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold a machine-wide lock while a dataset is created; a collective. Failing to take it only logs a warning."""
    # Streaming's get_shm_prefix() searches for a free name in shared memory on each rank and claims it only later, so:
    # (1) If two jobs start on one machine at the same time, one fails with `FileExistsError`. (2) If a killed job's
    # names vanish during the search, as when ranks restart, ranks find different names. (3) Streaming also accepts a
    # name for which a killed job has left only some files in shared memory. If these include a resume position, the new
    # job skips the beginning of its data. Remove this module once Streaming claims an unused name atomically.
    with contextlib.ExitStack() as stack:
        if dist.get_local_rank() == 0:
            try:
                # Never remove the lock file: /tmp has the sticky bit, so other users could not remove it.
                stack.enter_context(locks.hold_lock(LOCK, locks.wait_at_most(TIMEOUT_SECONDS, lambda: None)))
            except locks.WaitedTooLong:
                log.warning('%s: held by another job for %d s; continuing without the lock', LOCK, TIMEOUT_SECONDS)
            except OSError as error:
                log.warning('%s: cannot be opened (%s); continuing without the lock', LOCK, error)
        # One rank per machine takes the lock; the other ranks wait here until it has done so.
        dist.barrier()
        with _unused_name_on_all_ranks():
            yield


@contextlib.contextmanager
def _unused_name_on_all_ranks() -> Iterator[None]:
    """Make a machine's ranks use one unused number in Streaming's shared memory names: the largest that any found."""
    find, machine = private_attribute(prefix, '_check_and_find_retrying'), os.uname().nodename

    def agreed(*arguments: Any, **settings: Any) -> int:
        error: ValueError | None = None
        number = -1
        try:
            number = _unused(find(*arguments, **settings))
        except ValueError as caught:  # another dataset on this machine uses the local folder
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
    """Return the first number, starting from `number`, that is not the prefix of a file in shared memory."""
    used = {path.name[:6] for path in SHM.glob('[0-9]' * 6 + '_*')}
    while f'{number:06}' in used:
        number += 1
    return number
