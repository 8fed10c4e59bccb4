"""Tell a failure of one process of a dataset to all others on its machine, so that they stop too.

Streaming's workers wait for each other's downloads without end, and a thread that fails there ends its worker's epoch
early with a line in the log. So the first process that fails leaves its message in a file, and all others look for
that whenever they wait.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from diffusion.errors import DataError

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.05
"""A look costs 3 microseconds, and Streaming's threads would take several per sample."""


class Failures:
    """The first failure of a dataset's processes on this machine.

    Args:
        path: The file of the message, the same for all of them and for no other dataset.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._message: str | None = None
        self._looked = 0.0

    def clear(self) -> None:
        """Remove the message of an earlier run; for one process, before the others begin."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)

    def report(self, message: str) -> None:
        """Leave a message, unless another process has left one."""
        unfinished = self.path.with_name(f'.{self.path.name}.{os.getpid()}.{threading.get_ident()}')
        try:
            unfinished.write_text(message, encoding='utf-8')
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, self.path)  # unlike a rename it leaves the first message in place
            unfinished.unlink()
        except OSError as error:
            log.warning('%s: cannot be written (%s); the other processes hear of no failure', self.path, error)
            self._message = message
        self._looked = 0.0

    def message(self, *, now: bool = False) -> str | None:
        """Return the first message, up to LOOK_EVERY_SECONDS late unless `now`."""
        if self._message is None and (now or time.monotonic() - self._looked > LOOK_EVERY_SECONDS):
            self._looked = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                self._message = self.path.read_text(encoding='utf-8')
        return self._message

    def check(self, *, now: bool = False) -> None:
        """Raise the first message, if there is one.

        Raises:
            DataError: A process has failed.
        """
        message = self.message(now=now)
        if message is not None:
            raise DataError(message)


class FailureEvent(threading.Event):
    """The event that Streaming's threads stop at, set for all processes at once."""

    def __init__(self, failures: Failures) -> None:
        super().__init__()
        self.failures = failures

    def is_set(self) -> bool:
        """Return whether this process or another one has failed."""
        return super().is_set() or self.failures.message() is not None
