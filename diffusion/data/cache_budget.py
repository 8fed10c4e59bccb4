"""Limit on the total size of downloaded shards, kept by evicting the least recently used ones."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diffusion.data.shard_cache import VERSION
from diffusion.storage import locks

log = logging.getLogger(__name__)

SHARD_MARKER = '.mds'
"""Substring of the file names of all shards, compressed or not."""
RECORD = '.used_bytes.json'
"""Name of the file with the used size of a folder, written by all processes that share the folder."""
RECOUNT_SECONDS = 600.0
"""Time after which the files are counted again, since a job without a limit does not record its shards."""
SLACK = 0.01
"""Fraction of the limit that an eviction frees in addition. Evictions should be rare, because each lists all files."""
PATIENCE_SECONDS = 10.0
"""Time to wait for another process that evicts shards; if its node is stopped, this process continues unlocked."""


class CachedShard(NamedTuple):
    """File of a shard in a limited folder; sorts by the time of the last access, oldest first."""

    accessed: int
    """Access time in ns."""
    size: int
    """Size in bytes."""
    path: str
    folder: Path
    """The limited folder."""


class Record(NamedTuple):
    """How much of a limited folder is used."""

    used_bytes: int
    """Total size of the shards in the folder, including those being downloaded."""
    counted_at: float
    """Time of the last count, in seconds since 1970."""


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
        self._without_lock: set[Path] = set()

    @contextlib.contextmanager
    def reserve(self, path: Path, size: int) -> Iterator[None]:
        """Evict enough shards for a new one of `size` bytes at `path`, and record its size.

        Inside the block, create the file, or a temporary folder with the size in its name, so that others count it.
        """
        # Evict and reserve under locks, which all jobs that share the folders take. Otherwise, two processes would
        # count the same free space and together exceed the limit.
        with self._locked():
            # A cache of 2 TB has 30,000 files, and listing them for each download would take 0.15 s. A failed download
            # or another job's `evict` makes a record too large, which the next count corrects.
            records = self._read_records()
            if records is None or sum(record.used_bytes for record in records.values()) + size > self.limit_bytes:
                records = self._count_and_evict(size)
            owner = next((folder for folder in self.folders if path.is_relative_to(folder)), next(iter(self.folders)))
            records[owner] = records[owner]._replace(used_bytes=records[owner].used_bytes + size)
            for folder, record in records.items():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / RECORD).write_text(json.dumps(record._asdict()))
            yield

    def make_scratch_folder(self, path: Path, size: int) -> Path:
        """Create a temporary folder next to a shard's path to download the shard into, after evicting enough others.

        Args:
            size: Size of the download in bytes, including the unpacked shard if it is compressed.
        """
        with self.reserve(path, size):
            return locks.make_scratch_folder(path, size)

    def evict(self, size: int) -> int:
        """Evict shards with at least `size` bytes in total, or all, and return how many bytes that freed."""
        with self._locked():
            return sum(shard.size for shard in _evict(self._shards_and_reservations()[0], size))

    def used_bytes(self) -> int:
        """Return the total size of all downloaded shards in bytes, including downloads in progress."""
        shards, reserved = self._shards_and_reservations()
        return sum(shard.size for shard in shards) + sum(reserved.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the locks of all limited folders inside the block."""
        with contextlib.ExitStack() as stack:
            # Every process takes the locks in the same order, or two could wait for each other.
            for folder in sorted(self.folders):
                seconds = 0.0 if folder in self._without_lock else PATIENCE_SECONDS
                try:
                    stack.enter_context(locks.hold_path_lock(folder / 'room', locks.wait_at_most(seconds, self.wait)))
                    self._without_lock.discard(folder)
                except locks.WaitedTooLong:
                    # Two processes without the lock may record or evict at the same time. The limit is then exceeded
                    # by a few shards until the next count.
                    if seconds:
                        log.warning(
                            '%s: another process has held its lock for %.0f s; limiting its size without the lock. '
                            'If nodes share the folder, check for one that is stopped',
                            folder,
                            seconds,
                        )
                    self._without_lock.add(folder)
            yield

    def _read_records(self) -> dict[Path, Record] | None:
        """Return the records of all folders; None if one is missing, damaged or old."""
        records = {}
        for folder in self.folders:
            try:
                record = Record(**json.loads((folder / RECORD).read_text()))
                # A process that was killed while it wrote leaves half of a record (ValueError or TypeError below). The
                # age may be negative, since clocks of nodes differ.
                if abs(time.time() - record.counted_at) > RECOUNT_SECONDS:
                    return None
            except (OSError, ValueError, TypeError):
                return None
            records[folder] = record
        return records

    def _count_and_evict(self, size: int) -> dict[Path, Record]:
        """Count all files, evict shards to make room for `size` bytes if needed, and return new records."""
        shards, used = self._shards_and_reservations()
        for shard in shards:
            used[shard.folder] += shard.size
        excess = sum(used.values()) + size - self.limit_bytes
        if excess > 0:
            for shard in _evict(shards, excess + SLACK * self.limit_bytes):
                used[shard.folder] -= shard.size
        return {folder: Record(count, time.time()) for folder, count in used.items()}

    def _shards_and_reservations(self) -> tuple[list[CachedShard], dict[Path, int]]:
        """Return the shards on the disk, and the size in bytes of the downloads in progress in each folder."""
        shards, reserved = [], dict.fromkeys(self.folders, 0)
        for folder, names in self.folders.items():
            start = len(str(folder)) + 1
            for entry in _entries(folder):
                if SHARD_MARKER not in entry.name or entry.name.startswith('.'):
                    reserved[folder] += locks.reserved_bytes(entry.name)
                    continue
                name = entry.path[start:]
                if name not in names if names is not None else not VERSION.search(name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    shards.append(CachedShard(status.st_atime_ns, status.st_size, entry.path, folder))
        return shards, reserved


def _evict(shards: list[CachedShard], size: float) -> list[CachedShard]:
    """Remove the least recently used shards, at least `size` bytes or all, and return them."""
    evicted, freed = [], 0
    for shard in sorted(shards):
        if freed >= size:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shard.path)
        evicted.append(shard)
        freed += shard.size
    return evicted


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder, without the content of hidden folders."""
    # Hidden folders hold incomplete downloads. Symbolic links are not followed: each stream's link leads to the folder
    # that contains it, and its shards would count twice.
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith('.'):
                yield from _entries(entry.path)
