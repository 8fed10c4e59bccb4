"""StreamingDataset that serves only verified shards; if one of its processes fails, all of them stop."""

import contextlib
import math
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from composer.utils import dist
from filelock import FileLock
from streaming import Stream, StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, TICK
from streaming.base.format import Reader
from streaming.base.shared import SharedArray

from diffusion.compatibility.private_names import _Iterator, _ShardState
from diffusion.config.byte_sizes import parse_bytes
from diffusion.data.shard_cache import CacheBudget
from diffusion.data.shared_state import FailureEvent, Failures, one_job_at_a_time
from diffusion.data.verified_stream import DEFAULTS, VerifiedStream, hidden_remotes
from diffusion.errors import DataError, UserError
from diffusion.storage.local_files import user_folder
from diffusion.storage.mds import file_signature

TOUCH_INTERVAL_SECONDS = 60.0
"""Minimum interval between updates of a shard's access time, which decides what the cache evicts."""


class VerifiedDataset(StreamingDataset):
    """StreamingDataset over named streams that verifies each shard's size and hash before serving its samples.

    It replaces Streaming's `prepare_shard`, `get_item` and error handling, because Streaming trusts any file that
    exists, ends an epoch early without an exception if a shard is missing, and may hang with several workers.

    Args:
        cache_folder: Cache folder, which jobs may share; holds the shards of streams whose `local` folder is inside it.
        cache_limit: Maximum total size of downloaded shards, such as `500gb`; None means no limit.
    """

    streams: list[VerifiedStream]  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        streams: Mapping[str, Stream],
        *,
        cache_folder: str | None = None,
        cache_limit: str | int | None = None,
        **streaming: Any,
    ) -> None:
        self.failures: Failures | None = None
        cache = None if cache_folder is None else Path(cache_folder)
        defaults = DEFAULTS | {key: value for key, value in streaming.items() if key in DEFAULTS}
        verified = [
            VerifiedStream(stream, name, cache=cache, wait=self.check_failures, defaults=defaults)
            for name, stream in streams.items()
        ]
        _fetch_indexes(verified)
        _check_folders_differ(verified)
        with one_job_at_a_time(), hidden_remotes(verified):
            super().__init__(streams=verified, **streaming)
        self.cache_budget = None if cache_limit is None else self._make_cache_budget(cache, parse_bytes(cache_limit))
        on_disk = self.cache_budget or self._make_cache_budget(cache, math.inf)
        for stream in self.streams:
            stream.cache_budget, stream.on_disk = self.cache_budget, on_disk
        # Streaming's own `cache_limit` is never set: its eviction sees only the shards of one job, and with a limit
        # below the shuffled working set it hangs without an error.
        self._touched: dict[int, float] = {}
        self._checked_again: set[int] = set()
        self._create_shared_state()

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample, making sure that its shard has not changed since it was verified.

        A changed shard is read again, up to `retry` times. Raises DataError if it cannot be read or keeps changing.
        """
        # Another job may evict or replace the file at any time, because readers hold no lock. So read optimistically,
        # then compare the file's signature with the one stored when it was verified, and start over if they differ.
        shard_id, row = self.spanner[sample_id]
        for _ in range(1 + retry):
            if self._shard_states[shard_id] != _ShardState.LOCAL:
                self.prepare_shard(shard_id)
            try:
                sample = self.shards[shard_id][row]
            except Exception:
                # An error in an unchanged shard is real, for example a column that cannot be decoded. In a changed
                # shard, the change may have caused the error.
                if self._is_unchanged(shard_id):
                    raise
            else:
                # Compare after reading: a write during the read changes the modification time.
                if self._is_unchanged(shard_id):
                    now = time.monotonic()  # update the access time, so that the cache keeps the shard
                    if now - self._touched.get(shard_id, now - TOUCH_INTERVAL_SECONDS) >= TOUCH_INTERVAL_SECONDS:
                        self._touched[shard_id] = now
                        self._stream_of(shard_id).touch(self._path(shard_id))
                    return sample
            self._invalidate(shard_id)
        raise self._report_failure(
            f'{self._address(shard_id)}: it changed or disappeared {1 + retry} times while being read. To fix: raise '
            'loader.cache_limit, or stop programs that change the folder'
        )

    def check_again(self, shard_id: int) -> bool:
        """Verify a shard's hash again, at most once per process; return True if its file has been replaced.

        Call this for a sample that cannot be decoded: bits on a disk can flip without a new modification time. Raises
        DataError if the shard is damaged and cannot be downloaded.
        """
        if shard_id in self._checked_again:
            return False
        self._checked_again.add(shard_id)
        before = int(self._signatures[shard_id])
        self._invalidate(shard_id)
        self.prepare_shard(shard_id)
        return int(self._signatures[shard_id]) != before

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Verify a shard, and download it if missing or damaged; only one process per machine works on it at a time.

        With `blocking`, wait if another process is preparing the shard. Raises DataError if any process has failed.
        """
        # StreamingDataset's private `_shard_states` has one byte per shard, in memory shared by all ranks and workers
        # on this machine. Here, REMOTE means "not verified yet". A process claims a shard by changing REMOTE to
        # PREPARING under the lock, and owns it until it sets LOCAL or, after an error, REMOTE. After an exception,
        # Streaming's own prepare_shard leaves the state at PREPARING, so all other processes wait for the shard
        # forever.
        while not self._claim(shard_id):
            if not blocking or self._shard_states[shard_id] == _ShardState.LOCAL:
                return
            # The process that claimed the shard may have been killed before it could reset the state. In that case, its
            # rank reports the failure, and this call raises it.
            self.check_failures()
            time.sleep(TICK)
        try:
            self.check_failures(now=True)
            self._stream_of(shard_id).prepare_shard(self.shards[shard_id])
            # If another job has already evicted the shard again, `get_item` finds it missing and retries.
            with contextlib.suppress(FileNotFoundError):
                self._signatures[shard_id] = file_signature(self._path(shard_id))
        except BaseException as error:
            # Report the failure before resetting the state: the next process to claim the shard first checks for
            # failures, so it stops instead of trying the same download. Catch BaseException, because a
            # KeyboardInterrupt must not leave the shard claimed either.
            if isinstance(error, DataError):
                self._report_failure(error)
            elif isinstance(error, Exception):
                self._report_failure(f'{self._address(shard_id)}: {describe_error(error)}')
            self._shard_states[shard_id] = _ShardState.REMOTE
            raise
        # Set this last: from now on, other processes read the shard and compare it with the signature.
        self._shard_states[shard_id] = _ShardState.LOCAL

    def on_exception(self, future: Future) -> None:
        """Report a Streaming thread's exception to the machine's other processes; Streaming calls this when it ends."""
        # Streaming re-raises here, but the executor only logs a callback's exceptions, so the epoch would end early.
        if (error := future.exception()) is not None:
            self._report_failure(error)
            self._event.set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.check_failures()
        assert self.failures is not None
        # Streaming's threads stop when this event is set. Streaming's __iter__ creates a plain Event unless this
        # private attribute exists. Do not create it in the constructor: its lock cannot be pickled for workers.
        self._event = FailureEvent(self.failures)
        try:
            yield from super().__iter__()
        except Exception as error:
            self._report_failure(error)
            raise

    def _each_sample_id(self, it: _Iterator) -> Iterator[int]:
        yield from super()._each_sample_id(it)
        # Streaming's private generator also ends without an exception when its event is set. Check for failures here:
        # in __iter__, Streaming would first wait for its threads, which may be in the middle of a download.
        self.check_failures()
        if it.yield_index < it.total and not it.should_exit():
            raise DataError(f'{self.names()}: the epoch ended after {it.yield_index} of {it.total} samples')

    def check_failures(self, *, now: bool = False) -> None:
        """Raise DataError if another process of the dataset on this machine has failed; call this while waiting."""
        if self.failures is not None:
            self.failures.check(now=now)

    def names(self) -> str:
        return ', '.join(f'streams.{stream.name}' for stream in self.streams)

    def shards_of_streams(self) -> Iterator[tuple[VerifiedStream, list[Reader]]]:
        for stream, first, count in zip(
            self.streams, self.shard_offset_per_stream, self.shards_per_stream, strict=True
        ):
            yield stream, self.shards[first : first + count]

    def shards_in_progress(self) -> list[str]:
        """Return the stream and file name of each shard that this machine's processes are verifying or downloading."""
        claimed = np.flatnonzero(self._shard_states.numpy() == _ShardState.PREPARING)
        return [self._address(int(shard_id)) for shard_id in claimed]

    def _claim(self, shard_id: int) -> bool:
        """Claim an unverified shard for this process; return False if it is already verified or claimed."""
        # Most calls return here without taking the lock.
        if self._shard_states[shard_id] != _ShardState.REMOTE:
            return False
        with self._states_locked():
            if self._shard_states[shard_id] != _ShardState.REMOTE:
                return False
            self._shard_states[shard_id] = _ShardState.PREPARING
            return True

    def _invalidate(self, shard_id: int) -> None:
        # Do nothing if another process has already claimed the shard.
        with self._states_locked():
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._shard_states[shard_id] = _ShardState.REMOTE

    def _states_locked(self) -> FileLock:
        """Return the lock to hold while changing a shard's state, shared by all processes on this machine."""
        # Like Streaming, create the lock on first use in each process: it contains a threading lock, which cannot be
        # pickled for workers. The path is Streaming's private attribute, unique to this dataset on the machine.
        if not hasattr(self, '_cache_filelock'):
            self._cache_filelock = FileLock(self._cache_filelock_path)
        return self._cache_filelock

    def _is_unchanged(self, shard_id: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return file_signature(self._path(shard_id)) == int(self._signatures[shard_id])
        return False

    def _stream_of(self, shard_id: int) -> VerifiedStream:
        return self.streams[int(self.stream_per_shard[shard_id])]

    def _path(self, shard_id: int) -> str:
        shard = self.shards[shard_id]
        # This runs for every sample, and os.path.join takes ten times as long as an f-string.
        return f'{shard.dirname}/{shard.split}/{shard.file_pairs[0][0].basename}'

    def _address(self, shard_id: int) -> str:
        return f'streams.{self._stream_of(shard_id).name}: {self.shards[shard_id].file_pairs[0][0].basename}'

    def _report_failure(self, error: BaseException | str) -> DataError:
        """Report a failure to the other processes on this machine, and return a DataError to raise in this process."""
        message = error if isinstance(error, str) else describe_error(error)
        if self.failures is not None:
            self.failures.report(message)
        return DataError(message)

    def _make_cache_budget(self, cache: Path | None, limit: float) -> CacheBudget | None:
        """Return a CacheBudget of `limit` bytes for all folders of downloaded shards; None if no stream is remote."""
        folders: dict[Path, set[str] | None] = {}
        for stream, shards in self.shards_of_streams():
            if stream.home is not None and cache is not None:
                folders[cache] = None
            elif stream.source is not None:
                folders[stream.folder] = {
                    file.basename for shard in shards for pair in shard.file_pairs for file in pair if file
                }
        return CacheBudget(folders, limit, self.check_failures) if folders else None

    def _create_shared_state(self) -> None:
        """Create the shard signatures and the failure file shared by a machine's processes; a collective call."""
        # Streaming's private prefix is unique to this dataset among all running jobs on the machine.
        prefix = f'{self._shm_prefix_int:06}'
        # A killed run may have left shared memory with the same prefix. With the number of shards in the name, an
        # existing file has the required size.
        name = f'{prefix}_signatures_{self.num_shards}'
        failures = Failures(user_folder() / f'failed-{prefix}')
        if self._unique_rank_world.is_local_leader:
            failures.clear()
            self._signatures = SharedArray(self.num_shards, np.uint64, name)
            self._signatures.numpy()[:] = 0
            weakref.finalize(self, _remove_lock_files, prefix, os.getpid())
        # Let other ranks attach only when the array exists and is all zeros, which means that no shard is verified yet.
        dist.barrier()
        if not self._unique_rank_world.is_local_leader:
            self._signatures = SharedArray(self.num_shards, np.uint64, name)
        self.failures = failures


def _remove_lock_files(prefix: str, process: int) -> None:
    """Remove a dataset's lock files; runs when the dataset is garbage-collected or its process ends."""
    # Streaming numbers the datasets of a machine, never deletes these files, and skips a number while its files exist:
    # each run would add two files to the folder, and each start would try the numbers of all earlier runs. Forked
    # workers inherit this finalizer and must not run it.
    if os.getpid() != process:
        return
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        with contextlib.suppress(OSError):
            Path(tempfile.gettempdir(), f'{prefix}_{name}').unlink()


def _check_folders_differ(streams: list[VerifiedStream]) -> None:
    names: dict[Path, str] = {}
    for stream in streams:
        other = names.setdefault(stream.folder.absolute(), stream.name)
        if other != stream.name:
            raise UserError(
                f'streams.{stream.name}: has the same folder as streams.{other}, {stream.folder}; use another folder'
            )


def describe_error(error: BaseException) -> str:
    """Return an error's message, preceded by its class name unless it is a UserError or a DataError."""
    return str(error) if isinstance(error, UserError | DataError) else f'{type(error).__name__}: {error}'


def _fetch_indexes(streams: list[VerifiedStream]) -> None:
    """Download and set each stream's index, and check that it is the same on all machines; a collective call.

    One process per machine downloads the index.json files. All ranks raise UserError if an index does not exist, cannot
    be accessed, or does not list MDS shards, and DataError if a store does not answer or an index differs by machine.
    """
    result = _fetch_indexes_once(streams) if dist.get_local_rank() == 0 else (None, [])
    # Gather even after an error: if one rank raised alone, the others would wait in this collective forever.
    found = dist.all_gather_object(result)
    problems = [problem for problem, _ in found if problem is not None]
    if problems:
        # The class determines the exit status. UserError takes precedence: a user's mistake remains once the store is
        # back.
        kind = UserError if any(isinstance(problem, UserError) for problem in problems) else DataError
        raise kind('\n'.join(dict.fromkeys(map(str, problems))))
    # Results are in rank order, and local rank 0 is the first rank of its machine.
    local_digests = found[dist.get_global_rank() - dist.get_local_rank()][1]
    for stream, digest, *others in zip(
        streams, local_digests, *(digests for _, digests in found if digests), strict=True
    ):
        if set(others) != {digest}:
            raise DataError(
                f'streams.{stream.name}: machines read different indexes; start again when the dataset is complete'
            )
        stream.use_index(digest)


def _fetch_indexes_once(streams: list[VerifiedStream]) -> tuple[UserError | DataError | None, list[str]]:
    """Download each stream's index.json; return None and each index's SHA-256, or the first error and no hashes."""
    digests = []
    for stream in streams:
        try:
            digests.append(stream.fetch_index())
        except (UserError, DataError) as error:
            return error, []
        except OSError as error:
            return DataError(f'streams.{stream.name}: {describe_error(error)}'), []
    return None, digests
