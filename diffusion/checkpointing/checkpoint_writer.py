"""Save one checkpoint from all ranks, step by step: collect the state, write the files, publish the checkpoint."""

import datetime
import errno
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from diffusion.algorithms.finite_weights import NOT_SAVED, check_weights
from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import FileRecord, WriteProgress
from diffusion.checkpointing.rank_agreement import gather_on_rank_zero, raise_on_all_ranks, storage_fault
from diffusion.checkpointing.run_storage import SaveTarget
from diffusion.checkpointing.sharded_state import ShardedWrite
from diffusion.checkpointing.snapshot import SnapshotBuffers, StateTensors, TensorCopies, reserve_on_all_ranks
from diffusion.checkpointing.trainer_state import changed_by_updates, gather_state
from diffusion.storage.direct_file import open_for_writing
from diffusion.storage.retry import DISK_FULL_ERRORS

PICKLED_AT_ONCE = 2
"""Number of objects, mostly tensors, that a background save pickles between two pauses."""
PICKLING_PAUSE_SECONDS = 0.001


class SaveFailed(OSError):
    """Error for a checkpoint that could not be written because of a storage fault; raised on every rank.

    Training may continue until the next save. `errno` is that of the fault.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()  # without the errno, which the message describes in words


def describe_fault(fault: OSError, folder: Path, *, needed_bytes: int) -> str:
    """Describe a storage fault in words, such as `no space left on runs/a: 13.85 GiB needed, 2.10 GiB free`."""
    if fault.errno not in DISK_FULL_ERRORS:
        reason = fault.strerror or str(fault)
        return f'{reason}: {fault.filename}' if fault.filename is not None else reason
    what = 'the disk quota is used up on' if fault.errno == errno.EDQUOT else 'no space left on'
    try:
        free = f', {_gib(shutil.disk_usage(folder).free)} free'
    except OSError:  # the file system does not respond, so omit the free space
        free = ''
    return f'{what} {folder}: {_gib(needed_bytes)} needed{free}'


def way_out(number: int | None) -> str:
    """Return what the user should do after a save failed with this errno."""
    if number in DISK_FULL_ERRORS:
        return 'free some space and start the same command again'
    return 'check the storage of the run and start the same command again'


def _gib(size: float) -> str:
    return f'{size / 2**30:.2f} GiB'


class Collected(NamedTuple):
    """The part of a checkpoint that a single rank writes; `sharded_bytes` counts the shards of all ranks."""

    content: Mapping[str, Any]
    sharded: ShardedWrite | None
    sharded_bytes: int

    @property
    def written(self) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
        """The content of state.pt, and the sharded tensors by name."""
        return self.content, {} if self.sharded is None else self.sharded.shards


def collect(state: State, folder: Path, progress: WriteProgress | None = None, *, sharded_tensors: bool) -> Collected:
    """Collect this rank's part of a checkpoint; all ranks must call this.

    With `sharded_tensors`, each rank gets its own shards, and rank 0 also gets the rest of the state. Otherwise, rank 0
    gets everything, and the other ranks get nothing.
    """
    content, tensors = gather_state(state, sharded_tensors=sharded_tensors)
    sharded = ShardedWrite(tensors, folder, progress) if sharded_tensors else None
    content = content if dist.get_global_rank() == 0 else {}
    return Collected(content, sharded, sum(tensor.nbytes for tensor in tensors.values()))


class SaveInProgress:
    """Saves a trainer's state as a checkpoint, in three steps.

    The constructor, a collective, collects the state. `write` writes this rank's files; if there is a snapshot, it can
    run in a thread while training continues. `publish`, a collective, completes the checkpoint once all ranks have
    written. Only then does the checkpoint get its final name; if a step fails, the files written so far are
    removed.

    Most of a snapshot is copied during the next batch, before the optimizer changes the weights: training must call
    `start_copy` when the batch starts and `end_copy` before the optimizer's step. `write` waits for the copies.

    Raises:
        SaveFailed: A rank hit a storage fault. Raised on every rank.
        NonFiniteWeights: Weights are NaN or infinite. Raised on every rank, before anything is written.
    """

    def __init__(
        self,
        state: State,
        storage: SaveTarget,
        *,
        sharded_tensors: bool = False,
        recipe_text: str = '',
        buffers: SnapshotBuffers | None = None,
    ) -> None:
        self.batch: int = state.timestamp.batch.value
        self.name = storage.name_of(self.batch)
        self.progress = WriteProgress()
        self.write_seconds = 0.0
        """Duration of `write` on this rank, excluding its pauses."""
        self.total_seconds = 0.0
        """Time from the start of the save to its publication."""
        self.published = False
        self._began = time.monotonic()
        self.has_snapshot = False
        """True if `write` writes a copy of the state in host memory (a snapshot), False if the trainer's own
        tensors."""
        self._storage, self._work = storage, storage.work_folder(self.batch)
        self._recipe_text = recipe_text
        self._needed_bytes = 0
        self._error: BaseException | None = None
        self._records: dict[str, FileRecord] = {}
        self._results: list[WriteResult] = []
        self._copies: TensorCopies | None = None
        self._reductions: dict[int, Any] | None = None
        check_weights(state, f'batch {self.batch}', NOT_SAVED)
        with self._discard_on_error():
            with self._as_save_failed():
                storage.begin(self.batch, every_rank=sharded_tensors)
            self._collect(state, sharded_tensors=sharded_tensors, buffers=buffers)

    def write(self) -> None:
        """Write this rank's files and upload them, without collectives. `publish` raises any error later."""
        rank = dist.get_global_rank()
        try:
            if self._copies is not None:
                self._copies.wait()
        except Exception as error:
            self._error = self._error or error
        began = time.monotonic()
        try:
            if self._error is not None:
                raise self._error
            if self._sharded is not None:
                self._results = self._sharded.write()
                self._records |= self._sharded.records
            if rank == 0:
                self._records[checkpoint_store.STATE] = _write_state(
                    self._content, self._work / checkpoint_store.STATE, self.progress, self._reductions
                )
                if self._recipe_text:
                    path = self._work / checkpoint_store.RECIPE
                    self._records[checkpoint_store.RECIPE] = _write_text(self._recipe_text, path)
            self.progress.check()  # raises SaveAbandoned: do not upload an abandoned save
        except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
            self._error = error
        # Also call `upload` after a failure, without files: in a tier, ranks of other nodes wait for the exchange.
        try:
            self._storage.upload(self._work, {} if self._error else self._records, self.batch, self.progress.check)
        except Exception as error:
            self._error = self._error or error
        self.write_seconds = time.monotonic() - began - self.progress.paused_seconds

    def publish(self) -> str:
        """Publish the checkpoint after `write` on all ranks; return its path or URL. All ranks must call this."""
        # All ranks continue or all raise after each step: a rank that raised alone would leave the others waiting in
        # the next collective until its timeout.
        failure = f'{self.name}: not saved'
        with self._discard_on_error():
            with self._as_save_failed(), raise_on_all_ranks(failure, logs=False):
                if self._error is not None:
                    raise self._error
            written = gather_on_rank_zero((self._records, self._results))
            with self._as_save_failed(), raise_on_all_ranks(failure, logs=False):
                if written is not None:
                    self._publish([each for each, _ in written], [each for _, each in written])
            with self._as_save_failed():
                self._storage.finish(self._work, self.batch)
        self.published, self.total_seconds = True, time.monotonic() - self._began
        return self.name

    def start_copy(self) -> None:
        """Start copying tensors that only the optimizer's step changes, unless copying has started already."""
        if self._copies is not None:
            self._copies.start()

    def end_copy(self) -> None:
        """Wait for copies that have been started; called before the optimizer's step."""
        if self._copies is not None and not self._copies.wait_before_change():
            self._error = SaveFailed(
                errno.EAGAIN,
                'weights were changed between the start of a batch and the step of the optimizer, while they were '
                'copied. To fix: checkpointing.asynchronous: false, or change them at the end of a batch',
            )

    def abandon(self) -> None:
        """Stop `write` at its next write to a file; called from another thread, which must call `discard` next."""
        self.progress.abandon()
        if self._copies is not None:
            self._copies.give_up()

    def discard(self) -> None:
        """Remove the files written so far; every rank calls this, but it is not a collective."""
        self._storage.discard(self._work)

    def _collect(self, state: State, *, sharded_tensors: bool, buffers: SnapshotBuffers | None) -> None:
        """Collect the state to write; all ranks must call this.

        If `buffers` are given and all ranks have enough memory, collect a snapshot of the state in them instead.
        """
        # Do not convert errors to SaveFailed here: a collective in this call may fail on a single rank, which would
        # then continue training while the others wait for it.
        collected = collect(state, self._work, self.progress, sharded_tensors=sharded_tensors)
        self._about = _about(state, sharded_tensors=sharded_tensors) | {'run': self._storage.run_id}
        self._content, self._sharded = collected.content, collected.sharded
        found = StateTensors(collected.written)
        self.progress.total_bytes = found.content_bytes
        self._needed_bytes = collected.sharded_bytes or found.content_bytes
        if buffers is not None:
            self.has_snapshot = reserve_on_all_ranks(buffers, found)
            if self.has_snapshot:
                later = changed_by_updates(state)
                (self._content, shards), self._copies = buffers.copy(collected.written, found, later)
                self._reductions = buffers.reductions
                if self._sharded is not None:
                    self._sharded.shards = shards

    def _publish(self, records: list[dict[str, FileRecord]], results: list[list[WriteResult]]) -> None:
        """Write the index of sharded tensors and the receipt, from the results of all ranks; called on rank 0."""
        files = {name: record for each in records for name, record in each.items()}
        if self._sharded is not None:
            self._sharded.write_index(results)
            index = {checkpoint_store.INDEX: self._sharded.records[checkpoint_store.INDEX]}
            files |= index
            self._storage.upload(self._work, index, self.batch, self.progress.check)
        self._storage.publish(self._work, self.batch, files, self._about)

    @contextmanager
    def _discard_on_error(self) -> Iterator[None]:
        """Remove this save's files if the block raises: they are useless, and a full disk needs the space."""
        try:
            yield
        except (Exception, CheckpointException):  # CheckpointException is not an Exception
            self.discard()
            raise

    def _as_save_failed(self) -> AbstractContextManager[None]:
        return _as_save_failed(self.name, self._storage.folder, self._needed_bytes)


@contextmanager
def _as_save_failed(name: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Inside the block, raise SaveFailed for storage faults; the block must raise on all ranks or on none."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception
        fault = storage_fault(error)
        if fault is None:
            raise
        reason = describe_fault(fault, folder, needed_bytes=needed_bytes)
        raise SaveFailed(fault.errno, f'{name}: not saved, {reason}') from error


def _yielding_pickle(reductions: dict[int, Any]) -> Any:
    """Return a substitute for `pickle` that pauses to let training run, and caches `__reduce_ex__` of tensors."""

    class Pickler(pickle.Pickler):
        # pickle calls this for each object except numbers, text and containers. A tensor takes 70 us (half of that if
        # its reduction is known), during which the training thread waits for the GIL. Pickling 3,430 tensors without
        # pauses lengthens a step of 1.3 s by 0.15 s; pauses spread this over several steps.
        def reducer_override(self, value: object) -> Any:
            self._count: int = getattr(self, '_count', 0) + 1
            if self._count % PICKLED_AT_ONCE == 0:
                time.sleep(PICKLING_PAUSE_SECONDS)
            if (key := id(value)) not in reductions:
                return NotImplemented
            if reductions[key] is None:
                reductions[key] = value.__reduce_ex__(torch.serialization.DEFAULT_PROTOCOL)
            return reductions[key]

    return type('pickle', (), {'Pickler': Pickler})  # torch reads the name of the pickle module


def _write_state(
    content: Mapping[str, Any], path: Path, progress: WriteProgress, reductions: dict[int, Any] | None
) -> FileRecord:
    with open_for_writing(path) as file:
        writer = checkpoint_store.HashingWriter(file, progress)
        chosen = pickle if reductions is None else _yielding_pickle(reductions)
        torch.save(dict(content), writer, pickle_module=chosen)  # type: ignore[arg-type]
        checkpoint_store.flush(file)
    return writer.record()


def _write_text(text: str, path: Path) -> FileRecord:
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        writer.write(text.encode())
        checkpoint_store.flush(file)
    return writer.record()


def _about(state: State, *, sharded_tensors: bool) -> dict[str, Any]:
    """Return the fields of a checkpoint's receipt.json other than `files` and `run`: batch, epoch, kind and others."""
    return {
        'batch': state.timestamp.batch.value,
        'epoch': state.timestamp.epoch.value,
        'kind': 'sharded' if sharded_tensors else 'whole',
        'world_size': dist.get_world_size(),
        'saved': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    }
