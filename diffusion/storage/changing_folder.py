"""Folder, local or in an object store, whose small files several processes replace without losing a change.

A file is replaced on the condition that it is still the version that was read: by the etag in an object store, and by
content under a lock on a local file system.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from diffusion.errors import UserError
from diffusion.storage import locks, object_store
from diffusion.storage.atomic import atomic_file, remove, remove_unfinished, sync_folder, write_atomically
from diffusion.storage.object_store import split
from diffusion.storage.retry import PreconditionFailed

PROBE = 'conditional-write-check'
"""Start of the name of the object that `check_conditions` writes and deletes."""


class Versioned(NamedTuple):
    """Content of a file and the version that it had when it was read."""

    content: bytes
    version: str


class ChangingFolder(Protocol):
    """Interface of a folder whose files are replaced on a condition; see the module."""

    def read(self, name: str) -> Versioned | None:
        """Return a small file with its version; None if it does not exist."""
        ...

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        """Write a small file atomically if it still has the expected version; None expects that it does not exist.

        Raises:
            PreconditionFailed: Another process has changed it.
            UserError: The file system has no locks, or the store has no conditional writes.
        """
        ...

    def put(self, name: str, path: Path) -> None:
        """Move a local file into the folder under this name, replacing an existing file."""
        ...

    def fetch(self, name: str, scratch: Path) -> Path:
        """Return a local path of an existing file: its own, or that of a copy in the folder `scratch`."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that do not exist are skipped."""
        ...

    def remove_folder(self, name: str) -> None:
        """Delete a subfolder with all of its files, in which no other process works."""
        ...

    def clean(self) -> None:
        """Remove the unfinished files that killed processes have left."""
        ...

    def check_conditions(self) -> None:
        """Check that files can be replaced on a condition, before work begins that ends with that.

        Raises:
            UserError: The file system has no locks, or the store has no conditional writes.
        """
        ...


def changing_folder(place: str) -> ChangingFolder:
    """Return the folder at a path or URL."""
    return EtagFolder(place.rstrip('/')) if '://' in place else LockedFolder(Path(place).resolve())


@dataclass(frozen=True)
class LockedFolder(ChangingFolder):
    """Folder on a file system with locks."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def read(self, name: str) -> Versioned | None:
        """Return a small file with the SHA-256 of its content; None if it does not exist."""
        try:
            content = (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Versioned(content, hashlib.sha256(content).hexdigest())

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        """Write a small file atomically if it still has the expected version, under the lock of the folder."""
        path = self.path / name
        with self._locked():
            found = self.read(name)
            if (None if found is None else found.version) != expected:
                raise PreconditionFailed(f'{path}: another process has changed it')
            write_atomically(path, content)

    def put(self, name: str, path: Path) -> None:
        """Move a file into the folder: by a rename on the same file system, otherwise by a copy."""
        final = self.path / name
        final.parent.mkdir(parents=True, exist_ok=True)
        if path.stat().st_dev == final.parent.stat().st_dev:
            os.replace(path, final)
            sync_folder(final.parent)
            return
        with self._locked(), atomic_file(final) as unfinished:
            shutil.copyfile(path, unfinished)
        path.unlink()

    def fetch(self, name: str, scratch: Path) -> Path:
        """Return the path of the file itself."""
        return self.path / name

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that do not exist are skipped."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Delete a subfolder with all of its files, if it exists."""
        with self._locked():
            remove(self.path / name)

    def clean(self) -> None:
        """Remove the unfinished files that killed processes have left."""
        with self._locked():  # every unfinished file is written under the lock
            remove_unfinished(self.path, below=True)

    def check_conditions(self) -> None:
        """Check that the file system has locks."""
        with self._locked():
            pass

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder inside the block."""
        with locks.hold_path_lock(self.path / 'dataset', lambda: None) as is_held:
            if not is_held:
                raise UserError(f'{self.path}: the file system has no locks (flock); keep the dataset on another one')
            yield


@dataclass(frozen=True)
class EtagFolder(ChangingFolder):
    """Folder in an object store with conditional writes: S3, Google with Application Default Credentials, or Azure."""

    url: str

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> Versioned | None:
        """Return a small object with its etag; None if it does not exist."""
        # The etag first: if the object changes before it is read, the etag is that of the old one, and a replacement
        # on its condition fails.
        url = f'{self.url}/{name}'
        key = split(url)[1]
        tag = next((found.tag for found in object_store.list_objects(url) if found.key == key), None)
        content = None if tag is None else object_store.read_if_exists(url)
        return None if tag is None or content is None else Versioned(content, tag)

    def replace(self, name: str, content: bytes, expected: str | None) -> None:
        """Write a small object if it still has the expected etag."""
        object_store.write(f'{self.url}/{name}', content, if_absent=expected is None, if_tag=expected)

    def put(self, name: str, path: Path) -> None:
        """Upload a file and remove it here."""
        object_store.write(f'{self.url}/{name}', path)
        path.unlink()

    def fetch(self, name: str, scratch: Path) -> Path:
        """Download an object into `scratch`, unless it is there already, and return the path of the copy."""
        path = scratch / name
        if not path.exists():
            with atomic_file(path) as unfinished:
                object_store.download(f'{self.url}/{name}', unfinished)
        return path

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist are skipped."""
        object_store.delete_all([f'{self.url}/{name}' for name in names])

    def remove_folder(self, name: str) -> None:
        """Delete all objects in a subfolder."""
        prefix = f'{split(self.url)[1]}/'
        self.delete([found.key.removeprefix(prefix) for found in object_store.list_objects(f'{self.url}/{name}/')])

    def clean(self) -> None:
        """Do nothing: an object is whole or absent."""

    def check_conditions(self) -> None:
        """Check that the store has conditional writes, by one of an empty object that is deleted again."""
        name = f'{PROBE}-{secrets.token_hex(8)}'  # other processes check at the same time
        with suppress(PreconditionFailed):  # the request was repeated after an error, although it had succeeded
            self.replace(name, b'', None)
        self.delete([name])
