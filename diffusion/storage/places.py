"""Common interface for a folder shared by several processes, on a file system or in an object store.

File names are paths relative to the folder, such as `status/node-0.json`. Small files are read, listed and replaced as
a whole; large files are written to and read from a local path. Conditional replacement of a file requires that it still
has the version that was read: the etag in a store, or, on a file system, the content (compared under a lock).
"""

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from diffusion.errors import UserError
from diffusion.storage import locks, object_store
from diffusion.storage.atomic import (
    UNFINISHED,
    atomic_file,
    new_unfinished,
    remove,
    remove_unfinished,
    sync_folder,
    write_atomically,
)
from diffusion.storage.local_files import open_own_file, opener
from diffusion.storage.retry import PreconditionFailed, RetryPolicy, status_of

QUICK = RetryPolicy(tries=2, timeout_seconds=5.0)
"""Retry policy for files that are not essential to a run; callers stop waiting after `bounded_call.STORAGE_SECONDS`."""
PATIENT = RetryPolicy(tries=4, timeout_seconds=20.0)
PROBE = 'conditional-write-check'
"""Name prefix of the object that `check_conditions` writes and deletes."""


class FileVersion(NamedTuple):
    """Version of a file in a listing; changes with every write."""

    tag: str
    modified: float | None
    """Time of the last write in seconds since 1970, or None if the storage does not report it."""


class Listing(NamedTuple):
    """Files and subfolders directly in a folder, by name."""

    files: dict[str, FileVersion]
    folders: set[str]


class Versioned(NamedTuple):
    """Content of a file, and its version at the time of reading."""

    content: bytes
    version: str


class Place(Protocol):
    """Interface for a shared folder. Methods raise OSError if the storage fails, UserError if it denies access."""

    def locate(self, name: str = '') -> str:
        """Return the path or URL of a file or folder, for messages."""
        ...

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        """Return the content of a small file, or only its last bytes; None if it does not exist."""
        ...

    def read_version(self, name: str) -> Versioned | None:
        """Return the content of a small file with its version; None if it does not exist."""
        ...

    def write(self, name: str, content: str | bytes, *, flush: bool = True, in_place: bool = False) -> None:
        """Write a small file atomically, and create its folder; the options have no effect on objects in a store.

        Args:
            flush: False if the file need not survive a power failure.
            in_place: On a file system, overwrite the file in place. Readers may then see a partial write, but clients
                of a network file system see a changed file sooner than a new file with the same name.
        """
        ...

    def create(self, name: str, content: str | bytes, *, alone: bool = False) -> bool:
        """Write a small file unless it exists; of several concurrent calls, exactly one succeeds and returns True.

        `alone` states that no other process calls this at the same time, so that a store needs no conditional writes.
        """
        ...

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        """Write a small file if it still has the expected version; None means that it must not exist.

        Raise PreconditionFailed if another process has changed the file.
        """
        ...

    def list(self, folder: str = '') -> Listing:
        """Return the files and subfolders in a folder; empty if it does not exist."""
        ...

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of all complete files in the folder and its subfolders, by relative path."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that do not exist are skipped."""
        ...

    def remove_folder(self, name: str) -> None:
        """Delete a subfolder with all its files; no other process may be using it."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path for writing a file; if the block succeeds, the file replaces any file of this name."""
        ...

    def put(self, name: str, path: Path) -> None:
        """Move a local file into the folder under this name, replacing an existing file."""
        ...

    def fetch(self, name: str, *, again: bool = False) -> Path:
        """Return a local path of a file, which must exist.

        In a folder, this is the file itself. From an object store, the file is downloaded to the scratch folder, unless
        there is a copy already; `again` downloads it in any case.
        """
        ...

    def clean(self) -> None:
        """Remove unfinished files left by killed processes."""
        ...

    def check_conditions(self) -> None:
        """Raise UserError if `replace` does not work on this storage; call this before long work that ends with it."""
        ...


@dataclass(frozen=True)
class LocalPlace(Place):
    """Folder on a file system; with `is_run`, a run's folder, which is never created here.

    If its mount is missing, a new folder would look like the run's.
    """

    path: Path
    is_run: bool = False

    def __str__(self) -> str:
        return str(self.path)

    def locate(self, name: str = '') -> str:
        return str(self.path / name)

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        try:
            # Use O_NONBLOCK: otherwise, opening a pipe would wait for a writer.
            descriptor = os.open(self.path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with open(descriptor, 'rb') as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return b''
            if tail_bytes is not None:
                file.seek(max(0, status.st_size - tail_bytes))
            return file.read()

    def read_version(self, name: str) -> Versioned | None:
        try:
            # Follow no links: another user's link in a run's folder could redirect the next write to any file.
            with open(self.path / name, 'rb', opener=opener if self.is_run else None) as file:
                content = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Versioned(content, hashlib.sha256(content).hexdigest())

    def write(self, name: str, content: str | bytes, *, flush: bool = True, in_place: bool = False) -> None:
        path, data = self._prepared(name), _encoded(content)
        if in_place:
            # Do not use O_TRUNC, which would leave the file empty until the write.
            with open(open_own_file(path, os.O_CREAT | os.O_WRONLY), 'wb', buffering=0) as file:
                os.pwrite(file.fileno(), data, 0)
                file.truncate(len(data))
                os.fsync(file.fileno())
        elif flush:
            write_atomically(path, data, create_folder=False)
        else:
            unfinished = path.with_name(f'.{path.name}')
            unfinished.write_bytes(data)
            unfinished.replace(path)

    def create(self, name: str, content: str | bytes, *, alone: bool = False) -> bool:
        path = self._prepared(name)
        if path.exists():
            return False
        unfinished = new_unfinished(path)
        write_atomically(unfinished, _encoded(content), create_folder=False)
        try:
            return move_if_absent(unfinished, path)
        except OSError:  # without hard links, write in place: another process may see a partial file
            with suppress(FileExistsError), path.open('xb', buffering=0) as file:
                file.write(_encoded(content))
                os.fsync(file.fileno())
                return True
            return False

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        with self._locked():
            found = self.read_version(name)
            if (None if found is None else found.version) != expected:
                raise PreconditionFailed(f'{self.path / name}: another process has changed it')
            write_atomically(self._prepared(name), content, create_folder=False)

    def list(self, folder: str = '') -> Listing:
        listing = Listing({}, set())
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path / folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    listing.folders.add(entry.name)
                elif not entry.name.startswith('.'):  # skip hidden files, which are still being written
                    with suppress(FileNotFoundError):  # skip a file that was removed since
                        status = entry.stat()
                        listing.files[entry.name] = FileVersion(str(status.st_mtime_ns), status.st_mtime)
        return listing

    def sizes(self) -> dict[str, int]:
        files = (path for path in self.path.rglob('*') if UNFINISHED not in path.name and path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        with self._locked():
            remove(self.path / name)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with atomic_file(self._prepared(name), create_folder=False) as path:
            yield path

    def put(self, name: str, path: Path) -> None:
        final = self._prepared(name)
        if path.stat().st_dev == final.parent.stat().st_dev:
            os.replace(path, final)
            sync_folder(final.parent)
            return
        with self._locked(), atomic_file(final) as unfinished:
            shutil.copyfile(path, unfinished)
        path.unlink()

    def fetch(self, name: str, *, again: bool = False) -> Path:
        return self.path / name

    def clean(self) -> None:
        with self._locked():  # no process is writing: unfinished files are written only under the lock
            remove_unfinished(self.path, below=True)

    def check_conditions(self) -> None:
        with self._locked():
            pass

    def _prepared(self, name: str) -> Path:
        path = self.path / name
        if not self.is_run:
            path.parent.mkdir(parents=True, exist_ok=True)
        else:
            for parent in [*reversed(Path(name).parents)][1:]:
                (self.path / parent).mkdir(exist_ok=True)
        return path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locks.hold_path_lock(self.path / 'dataset', lambda: None) as is_held:
            if not is_held:
                raise UserError(f'{self.path}: the file system has no locks (flock); keep the dataset on another one')
            yield


@dataclass(frozen=True)
class StorePlace(Place):
    """Folder in an object store. Conditional writes need S3, Azure, or Google with Application Default Credentials.

    Attributes:
        scratch: Local folder for files being uploaded or downloaded; no other process writes to it.
        retry: Number of attempts and timeout for each request.
        refusal_is_fault: Raise OSError instead of UserError if the store denies access. Set this for files that are not
            essential, since a store may deny access temporarily.
    """

    url: str
    scratch: Path | None = None
    retry: RetryPolicy = object_store.DEFAULT
    refusal_is_fault: bool = False

    def __str__(self) -> str:
        return self.url

    def locate(self, name: str = '') -> str:
        return f'{self.url}/{name}'.rstrip('/')

    def read(self, name: str, *, tail_bytes: int | None = None) -> bytes | None:
        url, span = self.locate(name), None
        with self._faults(url):
            if tail_bytes is not None:
                size = object_store.head(url, retry=self.retry).size
                span = (size - tail_bytes, size) if size > tail_bytes else None
            return object_store.read(url, span=span, retry=self.retry)
        return None

    def read_version(self, name: str) -> Versioned | None:
        url = self.locate(name)
        with self._faults(url):
            # Read the etag first: if the object changes between the two requests, a conditional write with this etag
            # fails. In the other order, a write could replace content that was never read.
            tag = object_store.head(url, retry=self.retry).tag
            return Versioned(object_store.read(url, retry=self.retry), tag)
        return None

    def write(self, name: str, content: str | bytes, *, flush: bool = True, in_place: bool = False) -> None:
        with self._faults():
            object_store.write(self.locate(name), _encoded(content), retry=self.retry)

    def create(self, name: str, content: str | bytes, *, alone: bool = False) -> bool:
        if alone and self.read(name) is not None:
            return False
        with self._faults(), suppress(PreconditionFailed):
            object_store.write(self.locate(name), _encoded(content), if_absent=not alone, retry=self.retry)
            return True
        return False

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        with self._faults():
            object_store.write(
                self.locate(name), content, if_absent=expected is None, if_tag=expected, retry=self.retry
            )

    def list(self, folder: str = '') -> Listing:
        with self._faults():
            folders, files = object_store.list_folder(self.locate(folder), retry=self.retry)
        return Listing(
            {found.key.rpartition('/')[2]: FileVersion(found.tag, None) for found in files},
            {key.rpartition('/')[2] for key in folders},
        )

    def sizes(self, folder: str = '') -> dict[str, int]:
        """Return the size of each object, or only of those in a subfolder (name with trailing slash), by its path."""
        prefix = f'{object_store.split(self.url)[1]}/'.lstrip('/')
        with self._faults():
            found = object_store.list_objects(f'{self.url}/{folder}', retry=self.retry)
        return {each.key.removeprefix(prefix): each.size for each in found}

    def delete(self, names: Iterable[str]) -> None:
        with self._faults():
            object_store.delete_all([self.locate(name) for name in names], retry=self.retry)

    def remove_folder(self, name: str) -> None:
        self.delete(self.sizes(f'{name}/'))

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        path = self._scratch(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a killed process may have left a file; mode 'x' would then fail
        try:
            yield path
            object_store.write(self.locate(name), path, retry=self.retry)
        finally:
            path.unlink(missing_ok=True)

    def put(self, name: str, path: Path) -> None:
        object_store.write(self.locate(name), path, retry=self.retry)
        path.unlink()

    def fetch(self, name: str, *, again: bool = False) -> Path:
        path = self._scratch(name)
        if again or not path.exists():
            with atomic_file(path) as unfinished:
                object_store.download(self.locate(name), unfinished, retry=self.retry)
        return path

    def clean(self) -> None:
        """Do nothing: objects are always complete or absent."""

    def check_conditions(self) -> None:
        name = f'{PROBE}-{secrets.token_hex(8)}'  # a unique name, since other processes may check too
        with suppress(PreconditionFailed):  # conditions work; a retry found the object of a lost first attempt
            self.replace(name, b'', None)
        self.delete([name])

    def _scratch(self, name: str) -> Path:
        assert self.scratch is not None, 'a place for large files has a scratch folder'
        return self.scratch / name

    @contextmanager
    def _faults(self, missing: str | None = None) -> Iterator[None]:
        """Convert a UserError raised in the block to OSError if `refusal_is_fault`.

        Suppress the error if the object at the URL `missing` does not exist. But raise it if the whole bucket does not
        exist, which is only checked without `refusal_is_fault`.
        """
        try:
            yield
        except UserError as error:
            if missing is not None and status_of(error) == 404:
                if not self.refusal_is_fault:  # list objects to raise an error if the bucket is missing
                    object_store.list_objects(missing, retry=self.retry)
                return
            if not self.refusal_is_fault:
                raise
            raise OSError(str(error)) from error


def is_url(place: Path | str) -> bool:
    return isinstance(place, str) and '://' in place


def place_at(place: Path | str, scratch: Path | None = None) -> Place:
    """Return a `LocalPlace` for a path, or a `StorePlace` for a URL; `scratch` is for the latter."""
    return StorePlace(str(place).rstrip('/'), scratch) if is_url(place) else LocalPlace(Path(place).resolve())


def files_of_run(run: Path | str, retry: RetryPolicy = QUICK, *, refusal_is_fault: bool = True) -> Place:
    """Return a `LocalPlace` for a run's folder, or a `StorePlace` for its URL; the options are for the latter."""
    if is_url(run):
        return StorePlace(str(run).rstrip('/'), retry=retry, refusal_is_fault=refusal_is_fault)
    return LocalPlace(Path(run), is_run=True)


def move_if_absent(unfinished: Path, path: Path) -> bool:
    """Move a complete file to `path` unless a file exists there; of concurrent calls, exactly one returns True.

    `unfinished` is removed in any case.
    """
    # Unlike a rename, which would silently replace another process's file, a hard link fails if the name exists. The
    # linked file is already complete, so readers never see a partial one.
    try:
        with suppress(FileExistsError):
            os.link(unfinished, path)
            return True
        return False
    finally:
        unfinished.unlink()


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
