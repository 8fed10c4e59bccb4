"""Share the first failure of a dataset's processes with all others on the same machine, so that all of them stop.

Streaming's workers wait for each other's downloads indefinitely, and a download thread that fails only ends its
worker's epoch early, with a log line. So the first process that fails writes its message to a file, and all others
check for the file whenever they wait.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from diffusion.errors import DataError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""Minimum interval between checks of the file: one takes 3 us, and Streaming's threads check several times a sample."""


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
