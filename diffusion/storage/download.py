"""Files from an object store or a mount: tried several times, and never waited for without end."""

import contextlib
import errno
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from streaming.base.storage import CloudDownloader

from diffusion.errors import DataError
from diffusion.storage import locks
from diffusion.storage.atomic import write_whole

log = logging.getLogger(__name__)

PROGRESS_BYTES = 2**20
"""What has to come within a timeout for a download to go on: 64 of them may share a slow line."""
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST_PAUSE_SECONDS = 30.0


class DamagedDownload(Exception):
    """What came is not what should have come."""


class GaveUp(Exception):
    """All tries have failed, or the disk is full; the message says why."""

    def __init__(self, reason: str, *, no_room: bool = False) -> None:
        super().__init__(reason)
        self.no_room = no_room


class RemoteFolder:
    """A folder of an object store, or of a mount.

    Args:
        url: Of the folder.
        tries: Times a file is asked for.
        timeout_seconds: In which a download must end, or bring another PROGRESS_BYTES.
        wait: Called while waiting; what it raises ends the wait.
    """

    def __init__(self, url: str, *, tries: int, timeout_seconds: float, wait: Callable[[], None]) -> None:
        self.url = url
        self.tries = tries
        self.timeout_seconds = timeout_seconds
        self.wait = wait
        self._clients: list[CloudDownloader] = []
        self._process = os.getpid()

    def address(self, name: str) -> str:
        """The URL of a file."""
        return f'{self.url.rstrip("/")}/{name}'

    def persist(self, make: Callable[[], None], what: str) -> None:
        """Call `make`, which downloads and checks `what`, until it succeeds.

        Raises:
            GaveUp: It failed every time, or the disk is full.
        """
        for attempt in range(1, self.tries + 1):
            try:
                return make()
            except DataError:  # of somebody else, from `wait`
                raise
            except Exception as error:  # every cloud's client raises its own kind
                reason = _reason(error)
                if _is_for_want_of_room(error):
                    raise GaveUp(f'no room on the disk: {reason}', no_room=True) from error
                if attempt == self.tries:
                    raise GaveUp(f'{reason}; {attempt} tries') from error
                log.warning('%s: %s; trying again', self.address(what), reason)
            self._pause(min(LONGEST_PAUSE_SECONDS, 2.0 ** (attempt - 1)))
        raise AssertionError

    def download(self, name: str, path: Path) -> None:
        """Download a file into a folder that holds nothing else.

        Raises:
            TimeoutError: It stalled. Its thread is left behind and goes when the socket does.
            Exception: Whatever the cloud's client raises.
        """
        errors: list[BaseException] = []
        thread = threading.Thread(target=self._download, args=(name, path, errors), daemon=True)
        thread.start()
        seen, since = 0, time.monotonic()
        while thread.is_alive():
            thread.join(0.02)
            self.wait()
            now = time.monotonic()
            if now - since <= self.timeout_seconds:
                continue
            size = _bytes_below(path.parent)
            if size < seen + PROGRESS_BYTES:
                raise TimeoutError(f'{size} bytes came in {self.timeout_seconds:g} s and more')
            seen, since = size, now
        if errors:
            raise errors[0]

    def content(self, name: str, *, beside: Path) -> bytes:
        """What is in a small file; it comes by way of a folder beside a path."""
        scratch = locks.scratch_for(beside, 0)
        try:
            self.download(name, scratch / name)
            return (scratch / name).read_bytes()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def refresh(self, name: str, path: Path) -> None:
        """Fetch a small file anew: no index tells whether the one that is at `path` is the same.

        Where it cannot be had, that one holds, and a warning says so.

        Raises:
            GaveUp: Neither is there.
        """
        try:
            self.persist(lambda: write_whole(path, self.content(name, beside=path)), name)
        except GaveUp as error:
            if not path.exists():
                raise
            log.warning('%s: %s; going on with the one in %s', self.address(name), error, path)

    def _download(self, name: str, path: Path, errors: list[BaseException]) -> None:
        try:
            client = self._client()
            client.download(self.address(name), str(path), self.timeout_seconds)
            self._clients.append(client)
        except BaseException as error:
            errors.append(error)

    def _client(self) -> CloudDownloader:
        """A client that nobody uses: one that has just failed is not used again, nor one of before a fork."""
        if self._process != os.getpid():
            self._process, self._clients = os.getpid(), []
        try:
            return self._clients.pop()
        except IndexError:
            return CloudDownloader.get(self.url)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds * random.uniform(0.5, 1.0)
        while time.monotonic() < end:
            self.wait()
            time.sleep(0.02)


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _reason(error: BaseException) -> str:
    text = ' '.join(str(error).split())
    if isinstance(error, DamagedDownload | TimeoutError):
        return text
    cause = getattr(error, 'last_exception', None)  # boto's, which else says only that it has tried several times
    return f'{type(error).__name__}: {text}' + ('' if cause is None else f' ({_reason(cause)})')


def _is_for_want_of_room(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        error = error.__cause__ or error.__context__
    return False
