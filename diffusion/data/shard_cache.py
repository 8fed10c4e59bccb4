"""Shard cache shared by all jobs on a machine, or on several machines that mount the same file system.

Layout of a cache folder, the same for all jobs that use it:

    .used_bytes.json                      total size of the shards, if a job limits it (CacheBudget)
    bucket-laion-512-1f0c8a6e2b7d/        one dataset: the end of its URL and a hash of the URL
        index.json                        the newest index seen
        9d3c1e44a0b2f715/                 the shards of one version of the dataset, by the hash of its index; if the
            index.json                    dataset is rewritten while jobs read it, old and new shards are never mixed
            shard.00000.mds
            as/photos -> ..               Streaming requires a folder per stream

A shard may be evicted while a process reads it: an open file stays readable, and the next read finds the shard missing
and downloads it again.

One process downloads a shard while the others wait for its lock, so that each shard is fetched from the object store
only once. A killed process releases its lock, but a stopped node does not, and a node with a bad network may hold a
lock for several minutes. So a process waits for another not much longer than its own download would take, and then
downloads the shard too.
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
"""Substring of the file names of all shards, compressed (`.mds.zstd`) or not."""
RECORD = '.used_bytes.json'
"""Name of the file with the total size of a folder's shards, kept by all processes that limit the folder's size."""
RECOUNT_SECONDS = 600.0
"""Age at which files are counted again to replace a folder's RECORD, which misses shards of jobs without a limit."""
SLACK = 0.01
"""Extra space freed per eviction, as a fraction of the limit. Evictions should be rare: each one lists all files."""
PATIENCE_SECONDS = 10.0
"""Maximum wait for another process to evict shards; the maximum wait for its download is at least this long."""
PATIENCE_FACTOR = 3.0
"""Maximum wait for another process's download, as a multiple of the expected time of our own download."""
ASSUMED_BYTES_PER_SECOND = 20e6
"""Assumed download speed of this process before its first download."""


def home(cache: Path, remote: str) -> Path:
    """Return the folder inside `cache` for the dataset at the URL `remote`."""
    readable = re.sub(r'[^A-Za-z0-9]+', '-', remote.partition('://')[2] or remote).strip('-')[-40:]
    return cache / f'{readable}-{hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:12]}'


def version(home: Path, digest: str, stream: str) -> Path:
    """Return a stream's folder for one version of a dataset; `digest` is the SHA-256 of that version's index."""
    # StreamingDataset rejects two streams with the same local folder, so each stream gets its own symbolic link to the
    # version's folder.
    return home / digest[:16] / 'as' / re.sub(r'[^A-Za-z0-9._-]+', '_', stream)


def create_version(home: Path, digest: str, stream: str) -> Path:
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
    """Set a cached shard's access time to now, so that other shards are evicted first."""
    # File systems update the access time only once per day (relatime) or never (noatime). Keep the modification time:
    # it is part of the signature that shows whether a shard has changed since it was verified.
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))


class CachedShard(NamedTuple):
    """Shard file in a folder whose size is limited; sorts by last access, oldest first."""

    accessed: int
    """Access time in ns."""
    size: int
    """Size in bytes."""
    path: str
    folder: Path
    """The folder whose size is limited; the shard may be in a subfolder of it."""


class Record(NamedTuple):
    """Content of RECORD: how much space the shards in a folder use."""

    used_bytes: int
    """Total size of the shards in the folder, including those being downloaded."""
    counted_at: float
    """Time of the last count, in seconds since 1970."""


class CacheBudget:
    """Limit on the total size of downloaded shards; the least recently used ones are evicted to make room.

    Args:
        folders: The limited folders, each with the relative paths of the shards that count and may be evicted; None
            for a cache folder, where all shards of all datasets do. No other file is ever evicted.
        limit_bytes: Maximum total size of all shards, including those being downloaded; infinite if the only limit is
            the disk.
        wait: Called repeatedly while another process evicts; it may raise an exception to end the wait.
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
        """Evict enough shards to make room for a new one of `size` bytes at `path`, and record its size.

        The folders are locked during the `with` block. Before it ends, create the file, or a temporary folder whose
        name contains the size: other processes then count it.
        """
        # Evict and reserve while holding locks shared by all jobs that use the folders. Otherwise, two processes would
        # both count on the same free space and exceed the limit.
        with self._locked():
            # Use the records: a 2 TB cache has 30,000 files, and listing them takes 0.15 s per download. After a
            # failed download or another job's `evict`, a record is too large until the next count of the files.
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
        """Evict shards to make room for `size` bytes, and create a temporary folder for a download next to `path`."""
        with self.reserve(path, size):
            return locks.make_scratch_folder(path, size)

    def evict(self, size: int) -> int:
        """Evict shards until at least `size` bytes are freed or no shard is left; return the bytes freed."""
        with self._locked():
            return sum(shard.size for shard in _evict(self._shards_and_reservations()[0], size))

    def used_bytes(self) -> int:
        shards, reserved = self._shards_and_reservations()
        return sum(shard.size for shard in shards) + sum(reserved.values())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # Take the locks in the same order in every process, to avoid deadlock.
            for folder in sorted(self.folders):
                seconds = 0.0 if folder in self._without_lock else PATIENCE_SECONDS
                try:
                    stack.enter_context(locks.hold_path_lock(folder / 'room', locks.wait_at_most(seconds, self.wait)))
                    self._without_lock.discard(folder)
                except locks.WaitedTooLong:
                    # Without the lock, two processes may record or evict at the same time. The limit may then be
                    # exceeded by a few shards until the next count.
                    if seconds:
                        log.warning(
                            '%s: another process has held its lock for %.0f s; limiting its size without the lock. '
                            'If nodes share the folder, check for a stopped node',
                            *(folder, seconds),
                        )
                    self._without_lock.add(folder)
            yield

    def _read_records(self) -> dict[Path, Record] | None:
        """Return the records by folder; None if any of them is missing, damaged or older than RECOUNT_SECONDS."""
        records = {}
        for folder in self.folders:
            try:
                record = Record(**json.loads((folder / RECORD).read_text()))
                # A process killed during a write leaves a partial record (ValueError or TypeError below). The age may
                # be negative, since the nodes' clocks differ.
                if abs(time.time() - record.counted_at) > RECOUNT_SECONDS:
                    return None
            except (OSError, ValueError, TypeError):
                return None
            records[folder] = record
        return records

    def _count_and_evict(self, size: int) -> dict[Path, Record]:
        """Count all files, evict shards to make room for `size` bytes if needed, and return new records by folder."""
        shards, used = self._shards_and_reservations()
        for shard in shards:
            used[shard.folder] += shard.size
        excess = sum(used.values()) + size - self.limit_bytes
        if excess > 0:
            for shard in _evict(shards, excess + SLACK * self.limit_bytes):
                used[shard.folder] -= shard.size
        return {folder: Record(count, time.time()) for folder, count in used.items()}

    def _shards_and_reservations(self) -> tuple[list[CachedShard], dict[Path, int]]:
        """Return the shards on disk, and the bytes reserved for downloads in progress in each folder."""
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
    """Remove the least recently used shards until `size` bytes are freed or none is left; return the removed shards."""
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
    """Yield all files and folders below a folder, except the contents of hidden folders."""
    # Hidden folders contain incomplete downloads. Do not follow symbolic links: each stream's link points to a folder
    # above it, so shards would count twice.
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith('.'):
                yield from _entries(entry.path)


class DownloadTurns:
    """Lets one process at a time download a file; meanwhile the others call `wait` repeatedly, which may raise."""

    def __init__(self, name: str, wait: Callable[[], None]) -> None:
        self.name = name
        self.wait = wait
        self._bytes_per_second: float | None = None
        self._given_up: set[Path] = set()
        self._has_warned = False

    @contextlib.contextmanager
    def take(self, path: Path, size: int, is_complete: Callable[[], bool]) -> Iterator[Path | None]:
        """Wait while other processes download a file, then hold the right to download it during the `with` block.

        Yields the path that this process has locked: `path` or, if other processes held that lock for too long, `path`
        with a number. Name the temporary folder after it. Yields None if another process has completed the file:
        `is_complete` is called when the file has changed, and returns True if it exists and is undamaged.
        """
        patience = self.patience_seconds(size)
        known = _signature(path)

        def wait() -> None:
            nonlocal known
            self.wait()
            # Check the file too: the process that writes it may hold another lock than the one we wait for.
            if (found := _signature(path)) != known:
                known = found
                if is_complete():
                    raise _IsComplete

        # After giving up on a lock, wait for the next one, so that impatient processes download one at a time.
        for number in itertools.count():
            locked = path if not number else path.with_name(f'{path.name}.{number}')
            # Do not wait a second time for a lock that was not released the first time, for example when an evicted
            # shard is downloaded again.
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
        # Keep the highest speed: after a store outage, a low speed would mean long waits for stopped processes.
        self._bytes_per_second = max(self._bytes_per_second or 0.0, size / max(seconds, 1e-3))

    def patience_seconds(self, size: int) -> float:
        own_seconds = size / (self._bytes_per_second or ASSUMED_BYTES_PER_SECOND)
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * own_seconds)

    def _warn(self, path: Path, seconds: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            '%s: %s: another process has not finished its download in %.0f s; downloading it here too. '
            'If nodes share the folder, check for a node that is stopped or has a slow network',
            *(self.name, path, seconds),
        )


class _IsComplete(Exception):
    """Raised when another process has completed the file."""


def _signature(path: Path) -> int | None:
    """Return a signature that changes when the file changes, or None if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return file_signature(path)
    return None
