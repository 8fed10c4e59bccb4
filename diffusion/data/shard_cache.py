"""Cache of shards shared by the jobs of a machine, with a size limit and least-recently-used eviction.

Layout of a cache folder, which all jobs that use it follow:

    bucket-laion-512-1f0c8a6e2b7d/        one dataset: the end of its URL and a hash of the URL
        index.json                        the newest index seen
        9d3c1e44a0b2f715/                 the shards of one version of the dataset, by the hash of its index; if the
            index.json                    dataset is rewritten while jobs read it, old and new shards are never mixed
            shard.00000.mds
            as/photos -> ..               Streaming requires a folder per stream

A shard may be evicted while a process reads it: an open file stays readable, and the next read finds the shard missing
and downloads it again.
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
SHARD_MARKER = '.mds'
"""Substring of the file names of all shards, compressed or not."""
VERSION = re.compile(r'/[0-9a-f]{16}/')
"""Pattern of the version folder in the path of a cached shard."""


class CachedShard(NamedTuple):
    """File of a shard in the cache; sorts by the time of the last access, oldest first."""

    used: int
    """Access time in ns."""
    size: int
    """Size in bytes."""
    path: Path


def home(cache: Path, remote: str) -> Path:
    """Return the path inside the folder `cache` that holds the cached dataset of the URL `remote`."""
    readable = re.sub(r'[^A-Za-z0-9]+', '-', remote.partition('://')[2] or remote).strip('-')[-40:]
    return cache / f'{readable}-{hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:12]}'


def version(home: Path, digest: str, stream: str) -> Path:
    """Return the cache folder of one version of a dataset, for a stream to use as its local folder.

    A dataset that is rewritten at the same URL gets another version, identified by the hash of its index.

    Args:
        home: The dataset's folder in the cache.
        digest: SHA-256 of the version's index, in hexadecimal.
        stream: Name of the stream.
    """
    # StreamingDataset refuses two streams with the same local folder, so each stream gets a symbolic link of its own to
    # the version's folder.
    return home / digest[:16] / 'as' / re.sub(r'[^A-Za-z0-9._-]+', '_', stream)


def create_version(home: Path, digest: str, stream: str) -> Path:
    """Create the cache folder of one version of a dataset, the local folder of a stream, and return its path."""
    alias = version(home, digest, stream)
    alias.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        alias.symlink_to('..', target_is_directory=True)
    return alias


def write_if_changed(path: Path, content: bytes) -> None:
    """Replace a small file atomically, unless it already has this content."""
    if path.exists() and path.read_bytes() == content:
        return
    atomic.write_atomically(path, content)


def touch(path: str | Path) -> None:
    """Set the access time of a cached shard to now, so that the cache evicts other shards first."""
    # File systems update it once per day (relatime) or never (noatime). Keep the modification time: it is part of the
    # signature that shows whether a shard has changed since it was checked.
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


class CacheBudget:
    """Limit on the total size of downloaded shards; the least recently used ones are evicted to make room.

    Args:
        folders: The limited folders, each with the names of its shards relative to the folder, or with None for a cache
            folder, where the shards of all datasets count. No other file is ever evicted.
        limit_bytes: Maximum total size of all shards, including those being downloaded; infinite if only a full disk
            limits them.
        wait: Called repeatedly while another process evicts; an exception that it raises ends the wait.
    """

    def __init__(
        self, folders: Mapping[Path, Collection[str] | None], limit_bytes: float, wait: Callable[[], None]
    ) -> None:
        self.folders = dict(folders)
        self.limit_bytes = limit_bytes
        self.wait = wait
        self._lock = next(iter(self.folders)) / 'room'

    def make_scratch_folder(self, path: Path, size: int) -> Path:
        """Create a temporary folder next to a shard's path to download the shard into, after evicting enough others.

        Args:
            path: Path of the shard.
            size: Size of the download in bytes, including the unpacked shard if it is compressed.
        """
        # Evict and reserve under one lock, which all jobs that share the cache take. Otherwise, two processes would
        # count the same free space and together exceed the limit. The folder's name holds the reserved size, so that
        # other processes count it before the download is complete.
        with locks.hold_path_lock(self._lock, self.wait):
            held, reserved = self._cached_shards()
            used = sum(file.size for file in held) + reserved
            for file in sorted(held):
                if used + size <= self.limit_bytes:
                    break
                file.path.unlink(missing_ok=True)
                used -= file.size
            return locks.make_scratch_folder(path, size)

    def evict(self, size: int) -> int:
        """Evict shards with at least `size` bytes in total, or all, and return how many bytes that freed."""
        with locks.hold_path_lock(self._lock, self.wait):
            freed = 0
            for file in sorted(self._cached_shards()[0]):
                if freed >= size:
                    break
                file.path.unlink(missing_ok=True)
                freed += file.size
            return freed

    def used_bytes(self) -> int:
        """Return the total size of all downloaded shards in bytes, including downloads in progress."""
        held, reserved = self._cached_shards()
        return sum(file.size for file in held) + reserved

    def _cached_shards(self) -> tuple[list[CachedShard], int]:
        """Return the shards on the disk, and the total size in bytes of downloads in progress."""
        # Always list the folders: other jobs add and evict shards, so a count kept in this process would be wrong.
        held, reserved = [], 0
        for folder, names in self.folders.items():
            for entry in _entries(folder):
                reserved += locks.reserved_bytes(entry.name)
                if SHARD_MARKER not in entry.name or entry.name.startswith('.'):
                    continue
                name = os.path.relpath(entry.path, folder)
                if name not in names if names is not None else not VERSION.search(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    held.append(CachedShard(status.st_atime_ns, status.st_size, Path(entry.path)))
        return held, reserved


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder, without the content of hidden folders."""
    # Hidden folders hold incomplete downloads. Symbolic links are not followed: each stream's link leads to the folder
    # that contains it, and its shards would count twice.
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith('.'):
                yield from _entries(entry.path)
