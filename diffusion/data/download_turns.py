"""Decide which of several processes downloads a shard into a folder that they share.

One process downloads a shard while the others wait for its lock, so that the shard leaves the object store once. The
lock of a killed process ends, but that of a stopped node does not, and a node with a bad network holds it for minutes.
So a process waits for another one not much longer than its own download would take, and then downloads the shard too.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from diffusion.storage import locks
from diffusion.storage.integrity import file_signature

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""Shortest time to wait for another process's download."""
PATIENCE_FACTOR = 3.0
"""Time to wait for another process's download, as a multiple of the time that this process needs for one."""
ASSUMED_BYTES_PER_SECOND = 20e6
"""Speed of this process's downloads before its first."""


class DownloadTurns:
    """Turns of one process at downloading files into folders that other processes download into too.

    Args:
        name: Owner of the files, for messages, such as `streams.photos`.
        wait: Called repeatedly while another process downloads; an exception that it raises ends the wait.
    """

    def __init__(self, name: str, wait: Callable[[], None]) -> None:
        self.name = name
        self.wait = wait
        self._bytes_per_second: float | None = None
        self._given_up: set[Path] = set()
        self._has_warned = False

    @contextlib.contextmanager
    def take(self, path: Path, size: int, is_complete: Callable[[], bool]) -> Iterator[Path | None]:
        """Hold the turn to download a file inside the block, after waiting for other processes that download it.

        Yields a path to name the temporary folder by; this process holds the lock of that path. It is `path` itself, or
        `path` with a number after too long a wait. Yields None if another process has completed the file.

        Args:
            path: Final path of the file.
            size: Size of the download in bytes.
            is_complete: Returns True if the file exists and is undamaged; called if the file has changed.
        """
        patience = self.patience_seconds(size)
        known = _signature(path)

        def wait() -> None:
            nonlocal known
            self.wait()
            # The file may be written by a process that holds another lock than the one that this process waits for.
            if (found := _signature(path)) != known:
                known = found
                if is_complete():
                    raise _IsComplete

        # Processes that gave up waiting download one after another, not all at once: each waits for the next lock.
        for number in itertools.count():
            locked = path if not number else path.with_name(f'{path.name}.{number}')
            # A shard that was evicted is downloaded again. Do not wait a second time for a lock that was not released.
            seconds = 0.0 if locked in self._given_up else patience
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(locks.hold_path_lock(locked, locks.wait_at_most(seconds, wait)))
                except _IsComplete:
                    yield None
                    return
                except locks.WaitedTooLong:
                    self._given_up.add(locked)
                    self._warn(path, seconds)
                    continue
                self._given_up.discard(locked)
                yield None if is_complete() else locked
                return

    def record(self, size: int, seconds: float) -> None:
        """Record that this process has downloaded `size` bytes in this time."""
        # The fastest download: an outage of the store must not make this process wait for a stopped one.
        self._bytes_per_second = max(self._bytes_per_second or 0.0, size / max(seconds, 1e-3))

    def patience_seconds(self, size: int) -> float:
        """Return the time to wait for another process's download of `size` bytes."""
        own_seconds = size / (self._bytes_per_second or ASSUMED_BYTES_PER_SECOND)
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * own_seconds)

    def _warn(self, path: Path, seconds: float) -> None:
        """Warn, the first time, that another process's download takes too long."""
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            '%s: %s: another process has not finished its download in %.0f s; downloading it here too. '
            'If nodes share the folder, check for one that is stopped or has a slow network',
            self.name,
            path,
            seconds,
        )


class _IsComplete(Exception):
    """Another process has downloaded the file."""


def _signature(path: Path) -> int | None:
    """Return the signature of a file, which changes when the file does; None if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return file_signature(path)
    return None
