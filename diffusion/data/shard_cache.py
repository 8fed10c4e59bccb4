"""Cache of shards shared by the jobs of a machine, or of several machines on a file system that all mount.

Layout of a cache folder, which all jobs that use it follow:

    .used_bytes.json                      total size of the shards, if a job limits it (CacheBudget)
    bucket-laion-512-1f0c8a6e2b7d/        one dataset: the end of its URL and a hash of the URL
        index.json                        the newest index seen
        9d3c1e44a0b2f715/                 the shards of one version of the dataset, by the hash of its index; if the
            index.json                    dataset is rewritten while jobs read it, old and new shards are never mixed
            shard.00000.mds
            as/photos -> ..               Streaming requires a folder per stream

A shard may be evicted while a process reads it: an open file stays readable, and the next read finds the shard missing
and downloads it again.

One process downloads a shard while the others wait for its lock, so that the shard leaves the object store once. The
lock of a killed process ends, but that of a stopped node does not, and a node with a bad network holds it for minutes.
So a process waits for another one not much longer than its own download would take, and then downloads the shard too.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diffusion.storage import atomic, locks
from diffusion.storage.mds import file_signature

log = logging.getLogger(__name__)

INDEX = 'index.json'
VERSION = re.compile(r'/[0-9a-f]{16}/')
"""Pattern of the version folder in the path of a cached shard."""
SHARD_MARKER = '.mds'
"""Substring of the file names of all shards, compressed or not."""
RECORD = '.used_bytes.json'
"""Name of the file with the used size of a folder, written by all processes that share the folder."""
RECOUNT_SECONDS = 600.0
"""Time after which the files are counted again, since a job without a limit does not record its shards."""
SLACK = 0.01
"""Fraction of the limit that an eviction frees in addition. Evictions should be rare, because each lists all files."""
PATIENCE_SECONDS = 10.0
"""Time to wait for another process that evicts shards, and shortest time to wait for one that downloads a shard."""
PATIENCE_FACTOR = 3.0
"""Time to wait for another process's download, as a multiple of the time that this process needs for one."""
ASSUMED_BYTES_PER_SECOND = 20e6
"""Speed of this process's downloads before its first."""


def home(cache: Path, remote: str) -> Path:
    """Return the path inside the folder `cache` that holds the cached dataset of the URL `remote`."""
    readable = re.sub(r'[^A-Za-z0-9]+', '-', remote.partition('://')[2] or remote).strip('-')[-40:]
    return cache / f'{readable}-{hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:12]}'


def version(home: Path, digest: str, stream: str) -> Path:
    """Return the cache folder of one version of a dataset, for a stream to use as its local folder.

    A dataset that is rewritten at the same URL gets another version, identified by the SHA-256 of its index.
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
