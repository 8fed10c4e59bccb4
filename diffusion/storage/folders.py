"""One interface to a local folder and to a folder of an object store: files appear in it whole, and are listed."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diffusion.storage.atomic import UNFINISHED, becoming, new_unfinished, write_whole
from diffusion.storage.object_store import download, list_objects, split, upload


class Folder(Protocol):
    """A folder that several processes write files into."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every whole file in the folder and below, by its path from here."""
        ...

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write a new file at; it appears here when the block ends well."""
        ...

    def fetch(self, name: str) -> Path:
        """Return a local path of a file that is here."""
        ...

    def write_first(self, name: str, text: str) -> None:
        """Write a file unless it is here already."""
        ...

    def write_text(self, name: str, text: str) -> None:
        """Write a file."""
        with self.writing(name) as path:
            path.write_text(text, encoding='utf-8')


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder of a file system that all processes share."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every whole file in the folder and below, by its path from here."""
        files = (path for path in self.path.rglob('*') if UNFINISHED not in path.name and path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in files}

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write a new file at; it appears here when the block ends well."""
        return becoming(self.path / name)

    def fetch(self, name: str) -> Path:
        """Return the path of a file."""
        return self.path / name

    def write_first(self, name: str, text: str) -> None:
        """Write a file unless it is here already; of several processes that do so at once, one is first."""
        path = self.path / name
        if path.exists():
            return
        unfinished = new_unfinished(path)
        write_whole(unfinished, text)
        with suppress(FileExistsError):
            os.link(unfinished, path)
        unfinished.unlink()


@dataclass(frozen=True)
class StoreFolder(Folder):
    """A folder of an object store; files pass through a local folder.

    Attributes:
        url: The folder in the store.
        scratch: The local folder; no other process writes files of the same names there.
    """

    url: str
    scratch: Path

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every object in the folder and below, by its path from here."""
        prefix = f'{split(self.url)[1]}/'
        return {found.key.removeprefix(prefix): found.size for found in list_objects(f'{self.url}/')}

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield a local path to write a new file at; it is uploaded and removed when the block ends well."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that was killed
        try:
            yield path
            upload(path, f'{self.url}/{name}'.rpartition('/')[0])
        finally:
            path.unlink(missing_ok=True)

    def fetch(self, name: str) -> Path:
        """Return the path of a local copy."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        download(f'{self.url}/{name}', path)
        return path

    def write_first(self, name: str, text: str) -> None:
        """Write a file unless it is here already; for one process at a time."""
        if name not in self.sizes():
            self.write_text(name, text)
