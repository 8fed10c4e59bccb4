"""One interface to local folders and object-store folders: atomic writes, listing and reading of files."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diffusion.storage.atomic import UNFINISHED, atomic_file, new_unfinished, write_atomically
from diffusion.storage.object_store import download, list_objects, split, upload


class Folder(Protocol):
    """Interface of a folder, local or in an object store, that several processes write files to."""

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every complete file in the folder and its subfolders, by relative path."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write a new file to; if the block succeeds, the file appears in the folder."""
        ...

    def fetch(self, name: str) -> Path:
        """Return a local path to read an existing file of the folder from, after downloading the file if necessary."""
        ...

    def write_if_absent(self, name: str, text: str) -> None:
        """Write a text file unless it exists."""
        ...

    def write_text(self, name: str, text: str) -> None:
        """Write a text file to the folder, replacing an existing one; readers never see a partial file."""
        with self.writing(name) as path:
            path.write_text(text, encoding='utf-8')


@dataclass(frozen=True)
class LocalFolder(Folder):
    """Folder on a file system that all processes share; the local counterpart of `StoreFolder`, for writing output."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every complete file in the folder and its subfolders, by relative path."""
        files = (path for path in self.path.rglob('*') if UNFINISHED not in path.name and path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a temporary path to write a new file to; if the block succeeds, it is renamed to its final name."""
        return atomic_file(self.path / name)

    def fetch(self, name: str) -> Path:
        """Return the path of an existing file of the folder."""
        return self.path / name

    def write_if_absent(self, name: str, text: str) -> None:
        """Write a text file unless it exists; of several concurrent calls, exactly one writes the file."""
        path = self.path / name
        if path.exists():
            return
        unfinished = new_unfinished(path)
        write_atomically(unfinished, text)
        move_if_absent(unfinished, path)


def move_if_absent(unfinished: Path, path: Path) -> None:
    """Move a complete file to another name unless that exists; of several concurrent calls, exactly one has an effect.

    In each case `unfinished` is gone.
    """
    # A hard link fails if the name exists, where a rename would silently replace another process's file. The linked
    # file is complete already, so no reader can see a partial one.
    with suppress(FileExistsError):
        os.link(unfinished, path)
    unfinished.unlink()


@dataclass(frozen=True)
class StoreFolder(Folder):
    """A folder in an object store; files are staged in a local folder.

    Attributes:
        url: URL of the folder.
        scratch: The local folder; no other process may write files of the same names there.
    """

    url: str
    scratch: Path

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object in the folder and its subfolders, by relative path."""
        prefix = f'{split(self.url)[1]}/'
        return {found.key.removeprefix(prefix): found.size for found in list_objects(f'{self.url}/')}

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a local path to write a new file to; the file is uploaded if the block succeeds, then removed."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by a killed process; writers open it with mode 'x'
        try:
            yield path
            upload(path, f'{self.url}/{name}'.rpartition('/')[0])
        finally:
            path.unlink(missing_ok=True)

    def fetch(self, name: str) -> Path:
        """Download a file of the folder and return the path of the local copy."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        download(f'{self.url}/{name}', path)
        return path

    def write_if_absent(self, name: str, text: str) -> None:
        """Write a text file unless it exists; only one process at a time may call this."""
        # No conditional write: the clients have none for Oracle, nor for Google with HMAC keys.
        if name not in self.sizes():
            self.write_text(name, text)
