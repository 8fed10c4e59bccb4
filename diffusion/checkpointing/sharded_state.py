"""Reading of the sharded tensors of a checkpoint: each rank reads the shards that it needs.

A wrapper of torch.distributed.checkpoint for tensors only; everything else of a checkpoint is in its state.pt. Shards
are indexed by their offsets in the full tensor, so they can be read by any number of ranks with any strategy.
`sharded_writer` writes them.
"""

import collections
import datetime
import io
import logging
import pickle
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import INDEX, read_with_retries
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.storage_faults import storage_fault
from diffusion.errors import UserError
from diffusion.storage.refused_pickles import code_to_run

log = logging.getLogger(__name__)

Fetch = Callable[[Path, Collection[str]], None]
"""Function that makes files of a checkpoint available in its folder, given the folder and the files' names."""


def present(folder: Path, names: Collection[str]) -> None:
    """Do nothing: all files of a checkpoint in a shared folder are there."""


def read_tensors(tensors: dict[str, Tensor], folder: Path, fetch: Fetch = present) -> None:
    """Load a sharded checkpoint into these tensors and DTensors; every rank must call this with the same names.

    Args:
        tensors: Tensors to load into, by name.
        fetch: Called with the files that this rank reads, before any rank reads.

    Raises:
        UserError: A tensor is missing in the checkpoint or has another shape, or a shard wants to run code.
        OSError: The index cannot be read, or a file cannot be fetched; on every rank.
        CheckpointException: A rank cannot read its shards, after several tries of all ranks; on every rank.
    """
    with raise_on_all_ranks(f'{folder}: not loaded'):
        stored = shapes(folder)
        for name, tensor in tensors.items():
            if stored.get(name) != tensor.shape:
                found = f'is {tuple(stored[name])}, expected {tuple(tensor.shape)}' if name in stored else 'is missing'
                raise UserError(f'{folder}: {name} {found}; use the model and optimizer that it was saved with')
        fetch(folder, _files_to_read(tensors, folder))
    for pause in (*checkpoint_store.RETRY_PAUSES_SECONDS, None):
        try:
            with quiet():
                load(tensors, storage_reader=_Reader(folder), planner=DefaultLoadPlanner())
            return
        except CheckpointException as error:
            _raise_for_pickled_code(error, folder)
            # All ranks raise the same failures, so that all of them try again, or none does.
            if pause is None or storage_fault(error) is None:
                raise
            log.warning('%s: %s; retrying in %g s', folder, storage_fault(error), pause)
            time.sleep(pause)


def read_all_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Return the full tensors whose names have a prefix, on the CPU, by name without the prefix; not a collective."""
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
    """Raise UserError if a shard was refused because its pickle wants to run code."""
    for failure, _ in error.failures.values():
        if (code := code_to_run(failure)) is not None:
            raise UserError(f'{folder}: a shard {code}, so it is not loaded; use another checkpoint') from error


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shapes of a sharded checkpoint's tensors by name."""
    return {name: entry.size for name, entry in _entries(folder).items()}


def data_files(folder: Path) -> set[str]:
    """Return the names of the files with the shards of a sharded checkpoint, as its index names them."""
    return {Path(info.relative_path).as_posix() for info in _Reader(folder).read_metadata().storage_data.values()}


def _files_to_read(tensors: dict[str, Tensor], folder: Path) -> set[str]:
    """Return the names of the files with the shards that this rank loads into these tensors."""
    index = read_with_retries(_Reader(folder).read_metadata)
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, index, is_coordinator=False)
    return {index.storage_data[each.storage_index].relative_path for each in planner.create_local_plan().items}


def _entries(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    """Return the index entries (shape, dtype and shards) of a sharded checkpoint's tensors by name."""
    found = read_with_retries(_Reader(folder).read_metadata).state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, metadata.TensorStorageMetadata)}


class _Reader(filesystem.FileSystemReader):
    """Reader of sharded checkpoints that loads the index file without executing pickled code."""

    # torch's FileSystemReader.read_metadata calls pickle.load, which would run code of a checkpoint from elsewhere. The
    # lines after the load repeat those of torch 2.7.
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
    """Unpickler that loads only the classes that the index of a sharded checkpoint may contain."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the class or function with this name if an index may contain it; raise UnpicklingError otherwise."""
        allowed = {
            'torch.distributed.checkpoint.metadata': metadata,
            'torch.distributed.checkpoint.filesystem': filesystem,
        }
        plain = {
            ('torch', 'Size'): torch.Size,
            ('torch.serialization', '_get_layout'): _layout,
            ('collections', 'OrderedDict'): collections.OrderedDict,
            ('datetime', 'timedelta'): datetime.timedelta,
            ('pathlib', 'PosixPath'): PosixPath,
            ('pathlib._local', 'PosixPath'): PosixPath,  # its name in Python 3.13
        }
        if (module_name, global_name) in plain:
            return plain[module_name, global_name]
        found = getattr(allowed.get(module_name), global_name, None)
        if module_name == 'torch' and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        # Allow only classes that these modules define: modules that they import, such as os, must not be reachable.
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
    """Suppress inside the block torch's warnings about a single process and about its own deprecated storage."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        warnings.filterwarnings('ignore', message='TypedStorage is deprecated')
        yield
