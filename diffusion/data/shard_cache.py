"""A cache of shards that the jobs of a machine share, below a limit; the least recently used shards go first.

Layout of a cache folder, the same for every job that is given it:

    bucket-laion-512-1f0c8a6e2b7d/        a dataset, by the end of its URL and a hash of it
        index.json                        the newest that was seen
        9d3c1e44a0b2f715/                 the shards of one index, by its hash: of a dataset that is written anew while
            index.json                    jobs read it, old and new shards are never mixed
            shard.00000.mds
            as/photos -> ..               Streaming wants a folder for each stream

A shard may go while somebody reads it: what is open stays readable, and the next read finds it missing and fetches it.
"""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diffusion.storage import atomic, locks

INDEX = 'index.json'
MARK = '.mds'
"""Part of the names of shards, compressed or not."""
VERSION = re.compile(r'/[0-9a-f]{16}/')
"""The version of its dataset in the path of a shard in a cache folder."""


class Held(NamedTuple):
    """A shard's file."""

    used: int
    """Time of its last use, in ns."""
    size: int
    path: Path


def home(cache: Path, remote: str) -> Path:
    """Return the folder of a dataset in a cache."""
    readable = re.sub(r'[^A-Za-z0-9]+', '-', remote.partition('://')[2] or remote).strip('-')[-40:]
    return cache / f'{readable}-{hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:12]}'


def version(home: Path, digest: str, stream: str) -> Path:
    """Return the folder of the shards of an index, by its hash, as a stream of some name sees it."""
    return home / digest[:16] / 'as' / re.sub(r'[^A-Za-z0-9._-]+', '_', stream)


def make_version(home: Path, digest: str, stream: str) -> Path:
    """Make that folder and return it."""
    alias = version(home, digest, stream)
    alias.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        alias.symlink_to('..', target_is_directory=True)
    return alias


def bring_up_to_date(path: Path, content: bytes) -> None:
    """Write a small file whole, unless it has this content already."""
    if path.exists() and path.read_bytes() == content:
        return
    atomic.write_whole(path, content)


def touch(path: str | Path) -> None:
    """Note that a shard is used, in its access time alone; file systems themselves note it once a day or never."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


class Room:
    """A limit on the shards below some folders.

    Args:
        folders: Each with the names of its shards, relative to it; None for a cache folder, where all shards count that
            lie in the folder of a version. Nothing else is ever evicted.
        limit_bytes: Largest size of all shards together, with those being fetched.
        wait: Called while another process makes room; an exception that it raises ends the wait.
    """

    def __init__(
        self, folders: Mapping[Path, Collection[str] | None], limit_bytes: int, wait: Callable[[], None]
    ) -> None:
        self.folders = dict(folders)
        self.limit_bytes = limit_bytes
        self.wait = wait
        self._lock = next(iter(self.folders)) / 'room'

    def scratch_for(self, path: Path, size: int) -> Path:
        """Make a folder beside a shard's path to fetch it into, after evicting as much as it needs."""
        with locks.locked(self._lock, self.wait):
            held, reserved = self._held()
            used = sum(file.size for file in held) + reserved
            for file in sorted(held):
                if used + size <= self.limit_bytes:
                    break
                file.path.unlink(missing_ok=True)
                used -= file.size
            return locks.scratch_for(path, size)

    def used_bytes(self) -> int:
        """Return the size of all shards, with those being fetched."""
        held, reserved = self._held()
        return sum(file.size for file in held) + reserved

    def _held(self) -> tuple[list[Held], int]:
        """List the shards, and add up the bytes of those being fetched."""
        held, reserved = [], 0
        for folder, names in self.folders.items():
            for entry in _entries(folder):
                reserved += locks.reserved_bytes(entry.name)
                if MARK not in entry.name or entry.name.startswith('.'):
                    continue
                name = os.path.relpath(entry.path, folder)
                if name not in names if names is not None else not VERSION.search(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    held.append(Held(status.st_atime_ns, status.st_size, Path(entry.path)))
        return held, reserved


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder, but not the content of hidden folders; no link is followed."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith('.'):
                yield from _entries(entry.path)
