"""A StreamingDataset that serves only checked shards, and whose processes stop together when one of them fails."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from composer.utils import dist
from filelock import FileLock
from streaming import Stream, StreamingDataset
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _ShardState
from streaming.base.format import Reader
from streaming.base.shared import SharedArray

from diffusion.config.byte_sizes import parse_bytes
from diffusion.data.shard_cache import Room
from diffusion.data.shared_failure import FailureEvent, Failures
from diffusion.data.shm_lock import one_job_at_a_time
from diffusion.data.verified_stream import DEFAULTS, VerifiedStream, unseen_remotes
from diffusion.errors import DataError, UserError
from diffusion.storage.integrity import file_signature

log = logging.getLogger(__name__)

TOUCH_EVERY_SECONDS = 60.0
"""How exactly a cache knows when a shard was last used."""


class VerifiedDataset(StreamingDataset):
    """Samples of named streams, each shard checked against its index before a sample of it is served.

    Args:
        streams: By name.
        cache_folder: Where the shards of streams are that have a local folder in it; jobs may share it.
        cache_limit: Largest size of what is fetched, such as 500gb.
        streaming: Keywords of StreamingDataset.
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
            VerifiedStream(stream, name, cache=cache, wait=self.look_for_failures, defaults=defaults)
            for name, stream in streams.items()
        ]
        _fetch_indexes(verified)
        _check_folders_differ(verified)
        with one_job_at_a_time(), unseen_remotes(verified):
            super().__init__(streams=verified, **streaming)
        self.room = None if cache_limit is None else self._room(cache, parse_bytes(cache_limit))
        for stream in self.streams:
            stream.room = self.room
        self._touched: dict[int, float] = {}
        self._share()

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """A sample of a shard that is as it was when it was checked.

        Raises:
            DataError: The shard cannot be had, or somebody keeps writing to it.
        """
        shard_id, row = self.spanner[sample_id]
        for _ in range(1 + retry):
            if self._shard_states[shard_id] != _ShardState.LOCAL:
                self.prepare_shard(shard_id)
            try:
                sample = self.shards[shard_id][row]
            except Exception:
                if self._is_as_checked(shard_id):
                    raise
            else:
                # Looked at after reading: a file that is being written to has another time then.
                if self._is_as_checked(shard_id):
                    self._note_use(shard_id)
                    return sample
            self._mistrust(shard_id)
        raise self._failed(f'{self._where(shard_id)}: it changed or went {1 + retry} times while it was read')

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard sound, or wait for the process that is at it.

        Raises:
            DataError: It cannot be had, or another process has failed.
        """
        while not self._claim(shard_id):
            if not blocking or self._shard_states[shard_id] == _ShardState.LOCAL:
                return
            self.look_for_failures()
            time.sleep(TICK)
        try:
            self.look_for_failures(now=True)
            self._stream_of(shard_id).prepare_shard(self.shards[shard_id])
            with contextlib.suppress(FileNotFoundError):  # another job has evicted it again; reading will find out
                self._signatures[shard_id] = file_signature(self._path(shard_id))
        except BaseException as error:
            if isinstance(error, DataError):
                self._failed(error)
            elif isinstance(error, Exception):
                self._failed(f'{self._where(shard_id)}: {described(error)}')
            self._shard_states[shard_id] = _ShardState.REMOTE
            raise
        self._shard_states[shard_id] = _ShardState.LOCAL

    def on_exception(self, future: Future) -> None:
        """Tell everybody that a thread has failed; Streaming would log it and end this worker's epoch."""
        error = future.exception()
        if error is not None:
            self._failed(error)
            self._event.set()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.look_for_failures()
        assert self.failures is not None
        self._event = FailureEvent(self.failures)
        try:
            yield from super().__iter__()
        except Exception as error:
            self._failed(error)
            raise

    def _each_sample_id(self, it: _Iterator) -> Iterator[int]:
        yield from super()._each_sample_id(it)
        # Here and not after the iteration, which would wait for the end of a download first.
        self.look_for_failures()
        if it.yield_index < it.total and not it.should_exit():
            raise DataError(f'{self.names()}: the epoch ended after {it.yield_index} of {it.total} samples')

    def look_for_failures(self, *, now: bool = False) -> None:
        """Stop where another process of this machine has failed.

        Raises:
            DataError: With what that one said.
        """
        if self.failures is not None:
            self.failures.check(now=now)

    def names(self) -> str:
        """The streams, for messages."""
        return ', '.join(f'streams.{stream.name}' for stream in self.streams)

    def shards_of_streams(self) -> Iterator[tuple[VerifiedStream, list[Reader]]]:
        """Every stream and its shards."""
        for stream, first, count in zip(
            self.streams, self.shard_offset_per_stream, self.shards_per_stream, strict=True
        ):
            yield stream, self.shards[first : first + count]

    def being_fetched(self) -> list[str]:
        """Shards that a process of this machine is at now."""
        at = np.flatnonzero(self._shard_states.numpy() == _ShardState.PREPARING)
        return [self._where(int(shard_id)) for shard_id in at]

    def _claim(self, shard_id: int) -> bool:
        """Whether this process is the one to make a shard sound."""
        if self._shard_states[shard_id] != _ShardState.REMOTE:
            return False
        with self._states_locked():
            if self._shard_states[shard_id] != _ShardState.REMOTE:
                return False
            self._shard_states[shard_id] = _ShardState.PREPARING
            return True

    def _mistrust(self, shard_id: int) -> None:
        """Have a shard checked again before it is served."""
        with self._states_locked():
            if self._shard_states[shard_id] == _ShardState.LOCAL:
                self._shard_states[shard_id] = _ShardState.REMOTE

    def _states_locked(self) -> FileLock:
        if not hasattr(self, '_cache_filelock'):  # made late: it holds a thread's lock, which cannot be pickled
            self._cache_filelock = FileLock(self._cache_filelock_path)
        return self._cache_filelock

    def _is_as_checked(self, shard_id: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return file_signature(self._path(shard_id)) == int(self._signatures[shard_id])
        return False

    def _note_use(self, shard_id: int) -> None:
        now = time.monotonic()
        if now - self._touched.get(shard_id, now - TOUCH_EVERY_SECONDS) >= TOUCH_EVERY_SECONDS:
            self._touched[shard_id] = now
            self._stream_of(shard_id).touch(self._path(shard_id))

    def _stream_of(self, shard_id: int) -> VerifiedStream:
        return self.streams[int(self.stream_per_shard[shard_id])]

    def _path(self, shard_id: int) -> str:
        shard = self.shards[shard_id]
        # For every sample: os.path.join takes ten times as long.
        return f'{shard.dirname}/{shard.split}/{shard.file_pairs[0][0].basename}'

    def _where(self, shard_id: int) -> str:
        return f'streams.{self._stream_of(shard_id).name}: {self.shards[shard_id].file_pairs[0][0].basename}'

    def _failed(self, error: BaseException | str) -> DataError:
        """Tell the other processes of this machine, and give back what to raise."""
        message = error if isinstance(error, str) else described(error)
        if self.failures is not None:
            self.failures.report(message)
        return DataError(message)

    def _room(self, cache: Path | None, limit: int) -> Room | None:
        """What the limit is about: the cache folder, and the local folders of other streams that have a remote."""
        folders: dict[Path, set[str] | None] = {}
        for stream, shards in self.shards_of_streams():
            if stream.home is not None and cache is not None:
                folders[cache] = None
            elif stream.source is not None:
                folders[stream.folder] = {
                    file.basename for shard in shards for pair in shard.file_pairs for file in pair if file
                }
        return Room(folders, limit, self.look_for_failures) if folders else None

    def _share(self) -> None:
        """What all processes of this machine have in common, besides what Streaming shares."""
        prefix = f'{self._shm_prefix_int:06}'
        # As large as it has to be under its name, even if a killed run has left one.
        name = f'{prefix}_signatures_{self.num_shards}'
        failures = Failures(Path(tempfile.gettempdir(), f'diffusion-{os.getuid()}', f'failed-{prefix}'))
        if self._unique_rank_world.is_local_leader:
            failures.clear()
            self._signatures = SharedArray(self.num_shards, np.uint64, name)
            self._signatures.numpy()[:] = 0
        dist.barrier()
        if not self._unique_rank_world.is_local_leader:
            self._signatures = SharedArray(self.num_shards, np.uint64, name)
        self.failures = failures


def _check_folders_differ(streams: list[VerifiedStream]) -> None:
    names: dict[Path, str] = {}
    for stream in streams:
        other = names.setdefault(stream.folder.absolute(), stream.name)
        if other != stream.name:
            raise UserError(f'streams.{stream.name}: is in {stream.folder}, as streams.{other} is; give it another')


def described(error: BaseException) -> str:
    """Return the message of an error, after the name of its class unless the class is ours."""
    return str(error) if isinstance(error, UserError | DataError) else f'{type(error).__name__}: {error}'


def _fetch_indexes(streams: list[VerifiedStream]) -> None:
    """Have one process of each machine fetch all indexes; every rank learns of every problem."""
    own = _indexes_of_this_machine(streams) if dist.get_local_rank() == 0 else (None, [])
    found = dist.all_gather_object(own)
    problems = [problem for problem, _ in found if problem is not None]
    if problems:
        # A mistake of the user outlasts an outage of the store, so it decides the exit status.
        kind = UserError if any(isinstance(problem, UserError) for problem in problems) else DataError
        raise kind('\n'.join(dict.fromkeys(map(str, problems))))
    mine = found[dist.get_global_rank() - dist.get_local_rank()][1]
    for stream, digest, *others in zip(streams, mine, *(digests for _, digests in found if digests), strict=True):
        if set(others) != {digest}:
            raise DataError(f'streams.{stream.name}: machines see different indexes; is it being written just now?')
        stream.settle(digest)


def _indexes_of_this_machine(streams: list[VerifiedStream]) -> tuple[UserError | DataError | None, list[str]]:
    """Fetch all indexes; returns the first problem, if there is one, and their hashes."""
    digests = []
    for stream in streams:
        try:
            digests.append(stream.fetch_index())
        except (UserError, DataError) as error:
            return error, []
        except OSError as error:
            return DataError(f'streams.{stream.name}: {described(error)}'), []
    return None, digests
