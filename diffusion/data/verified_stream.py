"""Streams that serve a shard only after its size and hash have been checked against its index.

Streaming trusts every file that exists, even one that it has just found to be damaged or that an earlier run left cut
short. Here a shard is checked when a run first needs it, and after a download before it gets its name.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.compression import decompress
from streaming.base.format import FileInfo, Reader

from diffusion.data import shard_cache
from diffusion.data.shard_cache import INDEX, Room
from diffusion.errors import DataError, UserError
from diffusion.storage import locks
from diffusion.storage.download import RemoteFolder
from diffusion.storage.integrity import algorithm_for, damage
from diffusion.storage.retry import NO_ROOM, DamagedDownload, GaveUp, RetryPolicy

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
"""Values that StreamingDataset takes where a stream has none."""
RESTORE = 'restore it, or prepare the data again'


class VerifiedStream(Stream):
    """A stream whose shards are checked, and fetched again where they are damaged.

    Args:
        stream: The stream to take the place of.
        name: The stream's name in a recipe.
        cache: The cache folder, where the stream's local folder is in one.
        wait: Called while files are waited for; an exception that it raises ends the wait.
        defaults: Values of the settings that the stream does not have.
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
        # Not by Stream.__init__: a Stream says by the attributes that it has which of `proportion`, `repeat` and
        # `choose` it was given, and does not keep the arguments under their names.
        vars(self).update(vars(stream))
        self.apply_default(dict(defaults))
        self.name = name
        self.wait = wait
        self.room: Room | None = None
        self.home: Path | None = None
        self.source: RemoteFolder | None = None
        if self.remote not in (None, self.local):
            url = f'{self.remote.rstrip("/")}/{self.split}'.rstrip('/')
            self.source = RemoteFolder(url, RetryPolicy(1 + self.download_retry, self.download_timeout, wait))
            self.home = Path(self.local) if cache is not None and Path(self.local).is_relative_to(cache) else None

    @property
    def folder(self) -> Path:
        """The folder of the index and the shards."""
        return Path(self.local, self.split)

    def fetch_index(self) -> str:
        """Bring the index up to date, for one process of a machine; returns its SHA-256.

        A dataset that was written anew has another index, whose hashes tell which of its shards are still those that
        are here. Where its remote gives none, the one that is here holds.

        Raises:
            UserError: There is no index, it may not be read, or it is none of MDS shards.
            DataError: Its store does not answer.
        """
        folder = self.home / self.split if self.home is not None else self.folder
        content = self._newest_index(folder / INDEX)
        if self.home is None:
            self._forget_what_has_no_hash(folder, content)
        if self.source is not None:
            shard_cache.bring_up_to_date(folder / INDEX, content)
        digest = hashlib.sha256(content).hexdigest()
        if self.home is not None:
            alias = shard_cache.make_version(self.home, digest, self.name)
            shard_cache.bring_up_to_date(alias / self.split / INDEX, content)
        return digest

    def settle(self, digest: str) -> None:
        """Use the cache folder of the index with this hash; on every rank."""
        if self.home is not None:
            self.local = str(shard_cache.version(self.home, digest, self.name))

    def set_up_local(self, shards: list[Reader], cache_usage_per_shard: NDArray[np.int64]) -> None:
        """Count no shard as present, so that each is checked when it is first needed; for one process of a machine."""
        if self.source is not None:
            locks.remove_stale_scratch(self.folder.resolve())
        cache_usage_per_shard[:] = 0

    def prepare_shard(self, shard: Reader) -> int:
        """Check a shard's files, and fetch or unpack those that are missing or damaged.

        Raises:
            DataError: A file is damaged, and cannot be fetched.
        """
        for raw, zipped in shard.file_pairs:
            path = self.folder / raw.basename
            found = damage(path, raw, self.validate_hash)
            if found is None:
                self.touch(path)
            elif self.source is None:
                self._restore_from_zip(path, raw, zipped, shard.compression, found)
            else:
                if path.exists():
                    log.warning('streams.%s: %s: %s; it is fetched again', self.name, path, found)
                self._fetch(path, raw, zipped, shard.compression)
        return 0  # Streaming's own limit is never set

    def touch(self, path: str | Path) -> None:
        """Note that a shard is used, where it is in a cache."""
        if self.source is not None:
            shard_cache.touch(path)

    def beside(self, name: str) -> Path:
        """Return the path of a small file beside the shards, fetched anew where it comes from a remote.

        Raises:
            UserError: It is neither there nor here, or may not be read.
            DataError: It is not here, and its store does not answer.
        """
        path = self.folder / name
        if self.source is not None:
            try:
                self.source.refresh(name, path)
            except UserError as error:
                raise UserError(f'streams.{self.name}.remote: {error}') from error
            except GaveUp as error:
                raise DataError(f'streams.{self.name}.remote: {error}') from error
        return path

    def _fetch(self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None) -> None:
        assert self.source is not None
        files = [raw] if zipped is None else [zipped, raw]
        with locks.locked(path, self.wait):
            if damage(path, raw, self.validate_hash) is None:
                return  # another process has fetched it meanwhile
            try:
                self.source.persist(lambda: self._bring(path, files, compression), files[0].basename)
            except (GaveUp, UserError) as error:
                raise DataError(
                    f'streams.{self.name}: {error}. Way out: {RESTORE} and start the same command again'
                ) from error
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                url = self.source.address(files[0].basename)
                raise DataError(
                    f'streams.{self.name}: {url}: no room on the disk: {error}. '
                    f'Way out: make room in {path.parent}, or give a loader.cache_limit that its disk holds'
                ) from error

    def _bring(self, path: Path, files: Sequence[FileInfo], compression: str | None) -> None:
        """Download the first of the files, unpack it if there are two, and give the last its name when it is sound."""
        assert self.source is not None
        scratch = (self.room or locks).scratch_for(path, sum(file.bytes for file in files))
        try:
            came = scratch / PurePosixPath(files[0].basename).name
            self.source.download(files[0].basename, came)
            _expect(came, files[0], self.validate_hash)
            if len(files) > 1:
                unpacked = _unpacked(came, files[1], compression)
                if self.safe_keep_zip:
                    os.replace(came, self.folder / files[0].basename)
                came = unpacked
            os.replace(came, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _restore_from_zip(
        self, path: Path, raw: FileInfo, zipped: FileInfo | None, compression: str | None, found: str
    ) -> None:
        """Unpack a local dataset's shard again, where it has a compressed one that is sound."""
        source = self.folder / (zipped or raw).basename
        found = found if zipped is None else damage(source, zipped, self.validate_hash) or ''
        if found:
            raise DataError(f'streams.{self.name}: {source}: {found}. Way out: {RESTORE}')
        scratch = locks.scratch_for(path, raw.bytes)
        try:
            os.replace(_unpacked(source, raw, compression, scratch), path)
        except DamagedDownload as error:
            raise DataError(f'streams.{self.name}: {source}: unpacked, {error}. Way out: {RESTORE}') from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _newest_index(self, path: Path) -> bytes:
        where = f'streams.{self.name}'
        here = path.read_bytes() if path.is_file() else None
        if self.source is None:
            if here is None:
                raise UserError(f'{where}: {path} does not exist; is it a folder of MDS shards with an index.json?')
            self._check_index(here, str(path))
            return here
        fetched, url = [], self.source.address(INDEX)
        try:
            self.source.persist(lambda: fetched.append(self._downloaded_index()), INDEX)
        except (GaveUp, UserError) as error:
            if here is None:
                way_out = 'is it a folder of MDS shards with an index.json, and may this machine read it?'
                refused = isinstance(error, UserError) or isinstance(error.__cause__, DamagedDownload)
                raise (UserError if refused else DataError)(f'{where}.remote: {error}; {way_out}') from error
            log.warning('%s: %s; going on with the one in %s', where, error, path)
            fetched.append(here)
        self._check_index(fetched[0], url)
        if here is not None and here != fetched[0]:
            log.warning('%s: the dataset was written anew since it was cached; what differs is fetched again', where)
        return fetched[0]

    def _downloaded_index(self) -> bytes:
        assert self.source is not None
        content = self.source.read(INDEX)
        try:
            files_of(content)
        except ValueError as error:
            raise DamagedDownload(str(error)) from error
        return content

    def _check_index(self, content: bytes, path: str) -> None:
        where = f'streams.{self.name}'
        try:
            files = files_of(content)
        except ValueError as error:
            raise UserError(f'{where}: {path} {error}; prepare it again') from error
        shards = json.loads(content)['shards']
        if not sum(shard.get('samples', 0) for shard in shards):
            raise UserError(f'{where}: {path} has no samples; prepare it again, or remove the stream')
        if any('pkl' in shard.get('column_encodings', ()) for shard in shards):
            raise UserError(f'{where}: {path} has pickled columns, which run code when they are read; refused')
        for file in files:
            name = PurePosixPath(file.basename)
            if name.is_absolute() or '..' in name.parts:
                raise UserError(f'{where}: {path} names a file outside of its folder, {file.basename!r}; refused')
            try:
                algorithm_for(file.hashes, self.validate_hash)
            except UserError as error:
                raise UserError(f'{where}.{error}') from error
        if any(not file.hashes for file in files):
            log.warning('%s: its shards have no hashes; only their sizes are checked. Write it with hashes', where)

    def _forget_what_has_no_hash(self, folder: Path, content: bytes) -> None:
        """Remove shards without hashes when the index changes: an old one could have the size of the new one."""
        path = folder / INDEX
        if self.source is None or not path.exists() or path.read_bytes() == content:
            return
        for file in files_of(content):
            if not file.hashes:
                (folder / file.basename).unlink(missing_ok=True)


@contextmanager
def unseen_remotes(streams: Sequence[VerifiedStream]) -> Iterator[None]:
    """Let the constructor of StreamingDataset take the streams for local ones.

    With a remote it would fetch the indexes by itself, without checks, and refuse a local folder that another job
    uses or that a killed one has left in its list in shared memory. Streaming has no setting for either.
    """
    remotes = [stream.remote for stream in streams]
    for stream in streams:
        stream.remote = None
    try:
        yield
    finally:
        for stream, remote in zip(streams, remotes, strict=True):
            stream.remote = remote


def files_of(index: bytes) -> list[FileInfo]:
    """Return all files that an index names.

    Raises:
        ValueError: The content is not an index of MDS shards.
    """
    try:
        content = json.loads(index)
        if content['version'] != 2:
            raise ValueError(f'version {content["version"]}, not 2')
        kinds = ('raw_data', 'zip_data', 'raw_meta', 'zip_meta')
        return [FileInfo(**shard[kind]) for shard in content['shards'] for kind in kinds if shard.get(kind)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'is not an index of MDS shards ({type(error).__name__}: {error})') from error


def _unpacked(path: Path, raw: FileInfo, compression: str | None, folder: Path | None = None) -> Path:
    """Unpack a shard beside the compressed one or in another folder, and check it."""
    unpacked = (folder or path.parent) / PurePosixPath(raw.basename).name
    try:
        content = decompress(compression, path.read_bytes())
    except Exception as error:  # every decompressor raises its own kind
        raise DamagedDownload(f'{type(error).__name__}: {error}') from error
    unpacked.write_bytes(content)
    _expect(unpacked, raw)
    return unpacked


def _expect(path: Path, expected: FileInfo, demanded: str | None = None) -> None:
    found = damage(path, expected, demanded)
    if found is not None:
        raise DamagedDownload(found)
