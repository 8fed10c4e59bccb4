"""Write and read the sharded tensors of a checkpoint: each rank writes its shards and reads those it needs.

A wrapper of torch.distributed.checkpoint, for tensors only; the rest of a checkpoint is in its state.pt. Shards are
indexed by their offsets in the full tensor, so they can be read by any number of ranks with any strategy.
"""

import collections
import datetime
import io
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import INDEX, FileRecord, HashingWriter, WriteProgress, read_with_retries
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, storage_fault
from diffusion.compatibility.private_names import _DistWrapper, _metadata_fn
from diffusion.compatibility.torch_versions import code_to_run
from diffusion.errors import UserError
from diffusion.storage.direct_file import open_for_writing

log = logging.getLogger(__name__)

Fetch = Callable[[Path, Collection[str]], None]
"""Function that ensures that files of a checkpoint are present, given the checkpoint's folder and the files' names."""


def present(folder: Path, names: Collection[str]) -> None:
    """Do nothing: in a shared folder, all files of a checkpoint are present."""


def read_tensors(tensors: dict[str, Tensor], folder: Path, fetch: Fetch = present) -> None:
    """Load a sharded checkpoint into the given tensors and DTensors; every rank must call this with the same names.

    Args:
        fetch: Called with the files that this rank will read, before any rank reads.

    Raises:
        UserError: A tensor is missing in the checkpoint or has another shape, or a shard contains pickled code.
        OSError: The index cannot be read, or a file cannot be fetched. Raised on every rank.
        CheckpointException: A rank cannot read its shards, even after all ranks have retried. Raised on every rank.
    """
    with raise_on_all_ranks(f'{folder}: not loaded'):
        stored = shapes(folder)
        for name, tensor in tensors.items():
            if stored.get(name) != tensor.shape:
                found = f'is {tuple(stored[name])}, expected {tuple(tensor.shape)}' if name in stored else 'is missing'
                raise UserError(f'{folder}: tensor {name} {found}; use the model and optimizer that were saved')
        fetch(folder, _files_to_read(tensors, folder))
    for pause in (*checkpoint_store.RETRY_PAUSES_SECONDS, None):
        try:
            with quiet():
                load(tensors, storage_reader=_Reader(folder), planner=DefaultLoadPlanner())
            return
        except CheckpointException as error:
            _raise_for_pickled_code(error, folder)
            # Every rank raises the same failures, so either all ranks retry or none does.
            if pause is None or storage_fault(error) is None:
                raise
            log.warning('%s: %s; retrying in %g s', folder, storage_fault(error), pause)
            time.sleep(pause)


def read_all_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the full tensors whose names start with `prefix`, on the CPU, by name without prefix; not a collective."""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _entries(folder).items()
        if name.startswith(prefix)
    }

    def read() -> None:
        try:
            with quiet():
                load(dict(tensors), storage_reader=_Reader(folder), planner=DefaultLoadPlanner(), no_dist=True)
        except CheckpointException as error:
            _raise_for_pickled_code(error, folder)
            fault = storage_fault(error)
            if fault is None:
                raise
            raise fault from error

    read_with_retries(read)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _raise_for_pickled_code(error: CheckpointException, folder: Path) -> None:
    """Raise UserError if a shard was rejected because its pickle contains code."""
    for failure, _ in error.failures.values():
        if (has_code := code_to_run(failure)) is not None:
            raise UserError(f'{folder}: not loaded, because a shard {has_code}; use another checkpoint') from error


def shapes(folder: Path) -> dict[str, torch.Size]:
    return {name: entry.size for name, entry in _entries(folder).items()}


def data_files(folder: Path) -> set[str]:
    """Return the names of the shard files of a sharded checkpoint, as listed in its index."""
    return {Path(info.relative_path).as_posix() for info in _Reader(folder).read_metadata().storage_data.values()}


def _files_to_read(tensors: dict[str, Tensor], folder: Path) -> set[str]:
    """Return the names of the files that contain the shards this rank loads into `tensors`."""
    index = read_with_retries(_Reader(folder).read_metadata)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, index, is_coordinator=False)
    return {index.storage_data[each.storage_index].relative_path for each in planner.create_local_plan().items}


def _entries(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Return the index entries (shape, dtype and shards) of a sharded checkpoint's tensors by name."""
    found = read_with_retries(_Reader(folder).read_metadata).state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, metadata.TensorStorageMetadata)}


class _Reader(filesystem.FileSystemReader):
    """Reader for sharded checkpoints that loads the index file without executing pickled code."""

    # torch's FileSystemReader.read_metadata calls pickle.load, which would run code from an untrusted checkpoint. The
    # lines after `load()` are those of torch 2.7.
    def read_metadata(self) -> metadata.Metadata:
        path = Path(self.path) / INDEX
        try:
            found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError as error:
            raise UserError(f'{path}: does not exist; use a folder that is a sharded checkpoint') from error
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError) as error:
            code = code_to_run(error)
            reason = (
                f'not the index of a sharded checkpoint ({error})' if code is None else f'{code}, so it is not loaded'
            )
            raise UserError(f'{path}: {reason}; use another checkpoint') from error
        if not isinstance(found, metadata.Metadata):
            raise UserError(f'{path}: not the index of a sharded checkpoint (contains a {type(found).__name__})')
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that only loads classes that the index of a sharded checkpoint may contain."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the class or function with this name if it is allowed in an index; raise UnpicklingError otherwise."""
        allowed = {module.__name__: module for module in (metadata, filesystem)}
        plain = {
            ('torch', 'Size'): torch.Size,
            ('torch.serialization', '_get_layout'): _layout,
            ('collections', 'OrderedDict'): collections.OrderedDict,
            ('datetime', 'timedelta'): datetime.timedelta,
            ('pathlib', 'PosixPath'): PosixPath,
            ('pathlib._local', 'PosixPath'): PosixPath,  # the name of this class in Python 3.13
        }
        if (module_name, global_name) in plain:
            return plain[module_name, global_name]
        found = getattr(allowed.get(module_name), global_name, None)
        if module_name == 'torch' and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        # Only allow classes defined in these modules: modules that they import, such as os, must not be reachable.
        if isinstance(found, type) and found.__module__ == module_name:
            return found
        raise pickle.UnpicklingError(f'unsupported global {module_name}.{global_name}')


def _layout(name: str) -> torch.layout:
    """Return a torch memory layout by name, such as `torch.strided`, for the unpickler."""
    found = getattr(torch, name.removeprefix('torch.'), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f'{name!r} is not a tensor layout')
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, suppress torch's warnings about running in one process and about deprecated storage classes."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        warnings.filterwarnings('ignore', message='TypedStorage is deprecated')
        yield


class ShardedWrite:
    """Writes the sharded tensors of one checkpoint in three steps, the second of which can run in a thread.

    The constructor, a collective, plans which rank writes which shard. `write` writes this rank's shards. `write_index`
    writes the index on rank 0, from the results of all ranks.
    """

    # torch.distributed.checkpoint.save() runs these steps within one collective call. The calls here follow
    # _save_state_dict in torch 2.7.
    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, progress: WriteProgress | None = None) -> None:
        self._writer = _Writer(folder, progress)
        self._planner = _Planner()
        self._metadata: Metadata | None = None
        ranks = _DistWrapper(None, torch.distributed.is_initialized(), 0)

        def plan_locally() -> SavePlan:
            self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), ranks.is_coordinator)
            self._writer.set_up_storage_writer(ranks.is_coordinator)
            return self._planner.create_local_plan()

        def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
            global_plans, self._metadata = self._planner.create_global_plan(plans)
            return self._writer.prepare_global_plan(global_plans)

        plan: SavePlan = ranks.reduce_scatter('plan', plan_locally, plan_globally)
        self._plan = self._planner.finish_plan(plan)
        written = {item.index.fqn: tensors[item.index.fqn] for item in self._plan.items}
        with torch.no_grad():
            self.shards = {
                name: each.to_local() if isinstance(each, DTensor) else each for name, each in written.items()
            }
        """DTensor shards and plain tensors that this rank writes, by name; copies in a snapshot may replace them."""

    def write(self) -> list[WriteResult]:
        """Write the tensors in `shards` to this rank's file, and return the index data; not a collective."""
        self._planner.shards = self.shards
        if all(each.device.type == 'cpu' for each in self.shards.values()):
            # Copying ahead would make the thread wait for the CUDA stream on which training runs.
            self._writer.per_thread_copy_ahead = 0
        with quiet():
            return self._writer.write_data(self._plan, self._planner).value()

    def write_index(self, results: Sequence[list[WriteResult]]) -> None:
        """Write the index file from the results of all ranks; called on rank 0."""
        assert self._metadata is not None, 'only rank 0 writes the index'
        self._writer.finish(self._metadata, list(results))

    @property
    def records(self) -> dict[str, FileRecord]:
        """Size and hash of each file that this rank has written so far, by name."""
        return self._writer.files.records


class _Planner(DefaultSavePlanner):
    """Save planner that is given DTensors to plan a save, but writes the tensors in `shards`, such as copies."""

    def __init__(self) -> None:
        # Tensors that all ranks hold are only written by the lowest rank.
        super().__init__(dedup_save_to_lowest_rank=True)
        self.shards: Mapping[str, Tensor] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.state_dict = {}  # planning is done; drop the DTensors, which training changes
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        # A rank has at most one shard of a DTensor, so the name is sufficient.
        return self.shards[index.fqn]


class _Stream(HashingWriter):
    """File of a sharded checkpoint that stays open when torch closes it, so that it can be flushed to disk."""

    def close(self) -> None:
        """Do nothing: `create_stream` closes the file."""


class _HashingFiles(filesystem.FileSystem):
    """File system for torch.distributed.checkpoint that hashes files while they are written."""

    def __init__(self, progress: WriteProgress | None) -> None:
        self._progress = progress
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # type: ignore[override]
        if mode != 'wb':
            with Path(path).open(mode) as other:
                yield other
            return
        with open_for_writing(Path(path)) as file:
            stream = _Stream(file, self._progress)
            yield stream
            # Flush here, since torch syncs the index to disk before it flushes Python's buffer.
            checkpoint_store.flush(file)
        self.records[Path(path).name] = stream.record()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(filesystem.FileSystemWriter):
    """Writer for sharded checkpoints that raises a storage fault's OSError instead of torch's own error."""

    def __init__(self, folder: Path, progress: WriteProgress | None) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = self.files = _HashingFiles(progress)

    # If a write fails, torch.save raises a RuntimeError whose context is the OSError.
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            fault = storage_fault(error)
            if fault is None or fault is error:
                raise
            raise OSError(fault.errno, fault.strerror, fault.filename or str(self.path)) from error


assert _metadata_fn == INDEX
