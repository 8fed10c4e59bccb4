"""Small files that the nodes of a run share: in the run's folder, or as objects below the run's URL.

Names are paths relative to the run, such as `status/node-0.json`. Every fault of the storage is an OSError, also an
object store's refusal: the callers go on without a file, and a store may refuse access for a moment.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.atomic import write_atomically
from diffusion.storage.retry import RetryPolicy, status_of

T = TypeVar('T')

QUICK = RetryPolicy(tries=2, timeout_seconds=5.0)
"""For files without which a run goes on; callers stop waiting after `bounded_call.STORAGE_SECONDS`."""
PATIENT = RetryPolicy(tries=4, timeout_seconds=20.0)
"""For files without which a program cannot go on."""


class FileVersion(NamedTuple):
    """Version of a file, which differs after every write."""

    tag: str
    modified: float | None
    """Time of the last write in seconds since 1970, or None if the storage does not tell."""


class Listing(NamedTuple):
    """What a folder contains directly, by name."""

    files: dict[str, FileVersion]
    folders: set[str]


class SharedFiles(Protocol):
    """Interface of the shared files of a run. Every method raises OSError if the storage fails."""

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        """Return the content of a file, or only its last bytes; None if it does not exist."""
        ...

    def write(self, name: str, content: str | bytes, *, flush: bool = True) -> None:
        """Write a file, which other nodes then see as a whole or not at all.

        Args:
            name: Name of the file; its folder is created, but not the run's.
            content: The new content, text as UTF-8.
            flush: False for a file that need not survive a power cut.
        """
        ...

    def list(self, folder: str = '') -> Listing:
        """Return what a folder contains; nothing if it does not exist."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        ...

    def locate(self, name: str) -> str:
        """Return the path or URL of a file or folder, for messages."""
        ...


class FolderFiles:
    """Files in a folder that all nodes share.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        try:
            # O_NONBLOCK: opening a pipe would wait for a writer.
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with open(descriptor, 'rb') as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return b''
            if tail_bytes is not None:
                file.seek(max(0, status.st_size - tail_bytes))
            return file.read()

    def write(self, name: str, content: str | bytes, *, flush: bool = True) -> None:
        path = self.folder / name
        # Not the run's folder: without its mount, a new folder would look like that of a run.
        if path.parent != self.folder:
            for parent in [*reversed(path.relative_to(self.folder).parents)][1:]:
                (self.folder / parent).mkdir(exist_ok=True)
        if flush:
            write_atomically(path, content, create_folder=False)
            return
        unfinished = path.with_name(f'.{path.name}')
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        unfinished.replace(path)

    def list(self, folder: str = '') -> Listing:
        listing = Listing({}, set())
        try:
            with os.scandir(self.folder / folder) as entries:
                for entry in entries:
                    if entry.is_dir():
                        listing.folders.add(entry.name)
                    elif not entry.name.startswith('.'):  # else it is being written
                        try:
                            status = entry.stat()
                        except FileNotFoundError:  # replaced just now
                            continue
                        listing.files[entry.name] = FileVersion(str(status.st_mtime_ns), status.st_mtime)
        except (FileNotFoundError, NotADirectoryError):
            pass
        return listing

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def locate(self, name: str) -> str:
        return str(self.folder / name)


class BucketFiles:
    """Files in an object store.

    Args:
        url: URL of the run.
        retry: Number of tries and timeout of each request.
    """

    def __init__(self, url: str, retry: RetryPolicy = QUICK) -> None:
        self.url, self.retry = url.rstrip('/'), retry

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        url = self.locate(name)

        def read() -> bytes:
            if tail_bytes is not None:
                size = object_store.head(url, retry=self.retry).size
                if size > tail_bytes:
                    return object_store.read(url, span=(size - tail_bytes, size), retry=self.retry)
            return object_store.read(url, retry=self.retry)

        return _unless_missing(read)

    def write(self, name: str, content: str | bytes, *, flush: bool = True) -> None:
        content = content.encode() if isinstance(content, str) else content
        _within_os_error(lambda: object_store.write(self.locate(name), content, retry=self.retry))

    def list(self, folder: str = '') -> Listing:
        folders, files = _within_os_error(lambda: object_store.list_folder(self.locate(folder), retry=self.retry))
        return Listing(
            {found.key.rpartition('/')[2]: FileVersion(found.tag, None) for found in files},
            {key.rpartition('/')[2] for key in folders},
        )

    def delete(self, name: str) -> None:
        _unless_missing(lambda: object_store.delete(self.locate(name), retry=self.retry))

    def locate(self, name: str) -> str:
        return f'{self.url}/{name}'.rstrip('/')


def _within_os_error(function: Callable[[], T]) -> T:
    """Call a function, and raise a refusal of the store as OSError."""
    try:
        return function()
    except UserError as error:
        raise OSError(str(error)) from error


def _unless_missing(function: Callable[[], T]) -> T | None:
    """Call a function; return None if an object does not exist, and raise any other refusal as OSError."""
    try:
        return function()
    except UserError as error:
        if status_of(error) == 404:
            return None
        raise OSError(str(error)) from error


def is_url(run: Path | str) -> bool:
    """Return True if a run is in an object store, and not in a folder."""
    return isinstance(run, str) and '://' in run


def shared_files(run: Path | str, retry: RetryPolicy = QUICK) -> SharedFiles:
    """Return the shared files of the run in a folder or at a URL; `retry` applies to a URL only."""
    return BucketFiles(str(run), retry) if is_url(run) else FolderFiles(Path(run))
