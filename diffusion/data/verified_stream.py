"""Streams that serve a shard only after its size and hash have been verified against the index.

Streaming trusts any existing file, even if its hash has just turned out to be wrong, or if an earlier run left it
truncated. Here, a shard is verified when a run first needs it, and after a download before it gets its final name.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.compression import decompress
from streaming.base.format import FileInfo, Reader

from diffusion.config.byte_sizes import bytes_text
from diffusion.data import shard_cache
from diffusion.data.shard_cache import INDEX, CacheBudget, DownloadTurns
from diffusion.errors import DataError, GaveUp, UserError
from diffusion.storage import locks
from diffusion.storage.mds import algorithm_for, find_damage
from diffusion.storage.object_store import RemoteFolder
from diffusion.storage.retry import DISK_FULL_ERRORS, DamagedDownload, RetryPolicy

log = logging.getLogger(__name__)

DEFAULTS = {
    'remote': None,
    'local': None,
    'split': None,
    'download_retry': 2,
    'download_timeout': 60.0,
    'validate_hash': None,
    'keep_zip': False,
}
"""Values of a stream's settings if neither the stream nor the dataset sets them, as in StreamingDataset."""
EVICTIONS = 3
"""Maximum number of times that downloaded shards are evicted from a full disk for one new shard."""
EVICTED_SHARDS = 4
"""Space to free per eviction, as a multiple of the new shard's size."""
RESTORE = 'restore it, or prepare the data again'
RESTART = 'start the same command again when the store responds; the data may be intact'


class VerifiedStream(Stream):
    """Stream whose shards are verified before use, and downloaded again if damaged.

    Args:
        cache: The cache folder; the stream is cached if its `local` folder is inside it.
        wait: Called repeatedly while waiting for files; it may raise an exception to end the wait.
        defaults: Values for settings that are not set on the stream.

    Attributes:
        cache_budget: Limit on the size of downloaded shards, set by the dataset; None means no limit.
        on_disk: CacheBudget of the downloaded shards, set by the dataset; evicts some of them when the disk is full.
        home: The dataset's folder in the cache, or None if the stream is not cached.
        turns: Coordinates the stream's downloads with those of other jobs and nodes.
        source: The remote folder, or None for local data.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        *,
        cache: Path | None,
        wait: Callable[[], None],
        defaults: Mapping[str, Any] = DEFAULTS,
    ) -> None:
        # Copy the attributes instead of calling Stream.__init__: a Stream does not keep its arguments, and
        # Stream.validate_weights() uses hasattr() to find which of `proportion`, `repeat` and `choose` were given. So
        # if an argument was not given, its attribute must be missing. Replace this if Stream gets a copy method.
        vars(self).update(vars(stream))
        self.apply_default(dict(defaults))
        self.name = name
        self.wait = wait
        self.turns = DownloadTurns(f'streams.{name}', wait)
        self.cache_budget: CacheBudget | None = None
        self.on_disk: CacheBudget | None = None
        self.has_warned = False
        self.home: Path | None = None
        self.source: RemoteFolder | None = None
        if self.remote not in (None, self.local):
            url = f'{self.remote.rstrip("/")}/{self.split}'.rstrip('/')
            self.source = RemoteFolder(url, RetryPolicy(1 + self.download_retry, self.download_timeout, wait))
            self.home = Path(self.local) if cache is not None and Path(self.local).is_relative_to(cache) else None

    @property
    def folder(self) -> Path:
        return Path(self.local, self.split)

    def fetch_index(self) -> str:
        """Download the stream's index.json if it has changed, and return the SHA-256; call this once per machine.

        If the remote index cannot be read, an existing local one is used, with a warning. Otherwise, UserError is
        raised if it does not exist, is not accessible or lists no MDS shards, and DataError if the store fails.
        """
        # A dataset rewritten at the same URL has a new index. In a cache, it gets a new folder, so that jobs still
        # reading the old version are not disturbed. In a stream's own folder, the hashes in the new index identify the
        # shards to download again.
        folder = self.home / self.split if self.home is not None else self.folder
        content = self._newest_index(folder / INDEX)
        if self.home is None:
            self._remove_shards_without_hashes(folder, content)
        if self.source is not None:
            shard_cache.write_if_changed(folder / INDEX, content)
        digest = hashlib.sha256(content).hexdigest()
        if self.home is not None:
            alias = shard_cache.create_version(self.home, digest, self.name)
            shard_cache.write_if_changed(alias / self.split / INDEX, content)
        return digest

    def use_index(self, digest: str) -> None:
        """Make a cached stream read the dataset version whose index has this SHA-256; call this on every rank."""
        if self.home is not None:
            self.local = str(shard_cache.version(self.home, digest, self.name))

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: NDArray[np.int64]) -> None:
        """Mark all shards as missing; StreamingDataset's constructor calls this in one process per machine."""
        # Streaming would mark every existing file as LOCAL. Without that mark, `prepare_shard` verifies each shard when
        # it is first needed.
        if self.source is not None:
            locks.remove_stale_scratch(self.folder.resolve())
        cache_usage_per_shard[:] = 0

    def prepare_shard(self, shard: Reader) -> int:
        """Verify a shard's files, and download or unpack those that are missing or damaged, or raise DataError."""
        for raw, zipped in shard.file_pairs:
            path = self.folder / raw.basename
            found = find_damage(path, raw, self.validate_hash)
            if found is None:
                self.touch(path)
            elif self.source is None:
                self._restore_from_zip(path, raw, zipped, shard.compression, found)
            else:
                if path.exists():
                    log.warning('streams.%s: %s: %s; downloading it again', self.name, path, found)
                self._download(path, raw, zipped, shard.compression)
        return 0  # only used for Streaming's own cache_limit, which is never set

    def touch(self, path: str | Path) -> None:
        """Set a downloaded shard's access time to now, so that other shards are evicted first; no-op for local data."""
        if self.source is not None:
            shard_cache.touch(path)

    def fetch_sidecar(self, name: str) -> Path:
        """Return the local path of a small file beside the shards, such as manifest.json, after downloading it."""
        path = self.folder / name
        if self.source is not None:
            try:
                self.source.refresh(name, path)
            except UserError as error:
                raise UserError(f'streams.{self.name}.remote: {error}') from error
            except GaveUp as error:
                raise DataError(f'streams.{self.name}.remote: {error}') from error
        return path

    def _download(self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None) -> None:
        """Download a shard to its final path or, if another job is downloading the shard, wait for that download."""
        assert self.source is not None
        files = [raw] if zipped is None else [zipped, raw]
        size = sum(file.bytes for file in files)
        # The shard states in shared memory coordinate only the processes of this job. `turns` coordinates the jobs and
        # nodes that share a cache, so that only one of them downloads the shard.
        with self.turns.take(path, size, lambda: find_damage(path, raw, self.validate_hash) is None) as locked:
            if locked is None or (zipped is None and self._link_from_other_version(path, raw)):
                return
            for attempt in range(1 + EVICTIONS):
                try:
                    self.source.persist(
                        lambda: self._download_and_unpack(path, locked, files, compression), files[0].basename
                    )
                    return
                except (GaveUp, UserError) as error:
                    damaged = isinstance(error, UserError) or isinstance(error.__cause__, DamagedDownload)
                    way_out = f'{RESTORE} and start the same command again' if damaged else RESTART
                    raise DataError(f'streams.{self.name}: {error}. To fix: {way_out}') from error
                except OSError as error:
                    if error.errno not in DISK_FULL_ERRORS:
                        raise
                    if attempt < EVICTIONS and self._evict_some(path, size):
                        continue
                    url = self.source.address(files[0].basename)
                    raise DataError(
                        f'streams.{self.name}: {url}: no space left on the disk: {error}. '
                        f'To fix: free space in {path.parent}, or set loader.cache_limit to less than its disk holds'
                    ) from error

    def _evict_some(self, path: Path, size: int) -> bool:
        """Evict downloaded shards of `EVICTED_SHARDS * size` bytes when the disk is full; True if any was evicted."""
        # Free space for several shards: other processes download at the same time, and other programs fill the disk.
        freed = 0 if self.on_disk is None else self.on_disk.evict(EVICTED_SHARDS * size)
        if freed and not self.has_warned:
            self.has_warned = True
            log.warning(
                'streams.%s: the disk of %s is full; %s of the least recently used shards were removed. They are '
                'downloaded again when they are needed. Set loader.cache_limit to less than the disk holds',
                *(self.name, path.parent, bytes_text(freed)),
            )
        return freed > 0

    def _link_from_other_version(self, path: Path, raw: FileInfo) -> bool:
        """Hard-link a shard from another cached version of the dataset (as after `--append`); False if that fails."""
        if self.home is None or not raw.hashes:
            return False
        for other in self.home.glob(f'*/{self.split}/{raw.basename}' if self.split else f'*/{raw.basename}'):
            if find_damage(other, raw, self.validate_hash) is not None:
                continue
            # The cache counts both links, to stay within its limit: evicting one of them may free nothing.
            reserved = nullcontext() if self.cache_budget is None else self.cache_budget.reserve(path, raw.bytes)
            # If os.link fails, the caller downloads: the other file was just evicted, or hard links are not supported.
            with suppress(OSError), reserved:
                path.unlink(missing_ok=True)
                os.link(other, path)
                return True
        return False

    def _download_and_unpack(
        self, path: Path, locked: Path, files: Sequence[FileInfo], compression: str | None
    ) -> None:
        """Download a shard to a temporary folder, unpack it if compressed, verify it, and rename it to `path`.

        `locked` is the path whose lock this process holds; the lock shows others that the temporary folder is in use.
        `files` lists the raw file, or the compressed file and then the raw one. Raises DamagedDownload if a file's size
        or hash differs from the index, or if it cannot be unpacked.
        """
        assert self.source is not None
        # Only complete and undamaged files may have their final name: download into a hidden folder on the same file
        # system, then rename atomically. `remove_stale_scratch` removes the folder of a killed process.
        size, begin = sum(file.bytes for file in files), time.monotonic()
        scratch = (self.cache_budget or locks).make_scratch_folder(locked, size)
        try:
            downloaded = scratch / PurePosixPath(files[0].basename).name
            self.source.download(files[0].basename, downloaded)
            _check_download(downloaded, files[0], self.validate_hash)
            if len(files) > 1:
                unpacked = _unpacked(downloaded, files[1], compression)
                if self.safe_keep_zip:
                    os.replace(downloaded, self.folder / files[0].basename)
                downloaded = unpacked
            os.replace(downloaded, path)
        except (FileNotFoundError, DamagedDownload) as error:
            # A cluster file system releases the locks of a node that is stopped or disconnected for a minute. A job
            # that starts on another node then removes this folder as stale.
            if scratch.exists():
                raise
            raise DamagedDownload(f'another process removed the temporary folder {scratch}') from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.turns.record(size, time.monotonic() - begin)

    def _restore_from_zip(
        self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None, found: str
    ) -> None:
        """Unpack a local shard's compressed file, since its raw file is missing or damaged (`found` says which).

        Raises DataError if the shard has no compressed file, or this is missing or damaged too.
        """
        source = self.folder / (zipped or raw).basename
        found = found if zipped is None else find_damage(source, zipped, self.validate_hash) or ''
        if found:
            raise DataError(f'streams.{self.name}: {source}: {found}. To fix: {RESTORE}')
        scratch = locks.make_scratch_folder(path, raw.bytes)
        try:
            os.replace(_unpacked(source, raw, compression, scratch), path)
        except DamagedDownload as error:
            raise DataError(f'streams.{self.name}: {source}: after unpacking, {error}. To fix: {RESTORE}') from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _newest_index(self, path: Path) -> bytes:
        """Return the remote index.json; if there is no remote or it cannot be read, the local one at `path`."""
        where = f'streams.{self.name}'
        local = path.read_bytes() if path.is_file() else None
        if self.source is None:
            if local is None:
                raise UserError(f'{where}: {path} does not exist; use a folder of MDS shards with an index.json')
            self._check_index(local, str(path))
            return local
        fetched, url = [], self.source.address(INDEX)
        try:
            self.source.persist(lambda: fetched.append(self._downloaded_index()), INDEX)
        except (GaveUp, UserError) as error:
            if local is None:
                way_out = 'check that it is a folder of MDS shards with an index.json that this machine can access'
                # If the file is still not an index after all retries, it is a user's mistake, not an outage.
                refused = isinstance(error, UserError) or isinstance(error.__cause__, DamagedDownload)
                raise (UserError if refused else DataError)(f'{where}.remote: {error}; {way_out}') from error
            log.warning('%s: %s; using the local copy %s', where, error, path)
            fetched.append(local)
        self._check_index(fetched[0], url)
        if local is not None and local != fetched[0]:
            log.warning('%s: the dataset was rewritten since it was cached; downloading the shards that differ', where)
        return fetched[0]

    def _downloaded_index(self) -> bytes:
        """Return the content of the remote index.json; raise DamagedDownload if this is not an index of MDS shards."""
        assert self.source is not None
        content = self.source.read(INDEX)
        # An index has no hash to verify it with. Parse it, so that a truncated index, which is not valid JSON, is
        # downloaded again.
        try:
            files_in_index(content)
        except ValueError as error:
            raise DamagedDownload(str(error)) from error
        return content

    def _check_index(self, content: bytes, path: str) -> None:
        """Raise UserError if an index.json is unusable or unsafe; warn if its shards have no hashes."""
        where = f'streams.{self.name}'
        try:
            files = files_in_index(content)
        except ValueError as error:
            raise UserError(f'{where}: {path} {error}; prepare the data again') from error
        shards = json.loads(content)['shards']
        if not sum(shard.get('samples', 0) for shard in shards):
            raise UserError(f'{where}: {path} has no samples; prepare the data again, or remove the stream')
        # An index from a remote is untrusted input. Without these checks, it could run code on this machine, or
        # overwrite files outside of the dataset's folder.
        if any('pkl' in shard.get('column_encodings', ()) for shard in shards):
            raise UserError(
                f'{where}: {path} has pickled columns, which run code when they are read; prepare the data without them'
            )
        for file in files:
            name = PurePosixPath(file.basename)
            if name.is_absolute() or '..' in name.parts:
                raise UserError(
                    f'{where}: {path} lists a file outside of its folder, {file.basename!r}; prepare the data again'
                )
            try:
                algorithm_for(file.hashes, self.validate_hash)
            except UserError as error:
                raise UserError(f'{where}.{error}') from error
        if any(not file.hashes for file in files):
            log.warning(
                '%s: its shards have no hashes, so only sizes are checked; write the shards with hashes=["xxh64"]',
                where,
            )

    def _remove_shards_without_hashes(self, folder: Path, content: bytes) -> None:
        """Remove downloaded shards without hashes, to download them again, if the remote's index has changed."""
        # Only a hash can distinguish an old shard from a new one of the same size.
        path = folder / INDEX
        if self.source is None or not path.exists() or path.read_bytes() == content:
            return
        for file in files_in_index(content):
            if not file.hashes:
                (folder / file.basename).unlink(missing_ok=True)


@contextmanager
def hidden_remotes(streams: Sequence[VerifiedStream]) -> Iterator[None]:
    """Set all streams' remotes to None within the `with` block, so that StreamingDataset() downloads nothing."""
    # For a stream with a remote, the constructor downloads the index without checks, and get_shm_prefix() raises
    # "Reused local directory" if another job uses the folder or a killed job left its name in shared memory. Neither
    # can be turned off. Remove this when Streaming lets jobs share local folders.
    remotes = [stream.remote for stream in streams]
    for stream in streams:
        stream.remote = None
    try:
        yield
    finally:
        for stream, remote in zip(streams, remotes, strict=True):
            stream.remote = remote


def files_in_index(index: bytes) -> list[FileInfo]:
    """Return the files listed in the content of an index.json; raise ValueError if it lists no MDS shards."""
    try:
        content = json.loads(index)
        if content['version'] != 2:
            raise ValueError(f'version {content["version"]}, not 2')
        kinds = ('raw_data', 'zip_data', 'raw_meta', 'zip_meta')
        return [FileInfo(**shard[kind]) for shard in content['shards'] for kind in kinds if shard.get(kind)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'is not an index of MDS shards ({type(error).__name__}: {error})') from error


def _unpacked(path: Path, raw: FileInfo, compression: str | None, folder: Path | None = None) -> Path:
    """Unpack a compressed shard into `folder` (None: its own folder) and return the path; may raise DamagedDownload."""
    unpacked = (folder or path.parent) / PurePosixPath(raw.basename).name
    try:
        content = decompress(compression, path.read_bytes())
    except Exception as error:  # each decompression library has its own exceptions
        raise DamagedDownload(f'{type(error).__name__}: {error}') from error
    unpacked.write_bytes(content)
    _check_download(unpacked, raw)
    return unpacked


def _check_download(path: Path, expected: FileInfo, algorithm: str | None = None) -> None:
    if (found := find_damage(path, expected, algorithm)) is not None:
        raise DamagedDownload(found)
