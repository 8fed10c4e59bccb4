"""Tensors of a checkpoint in pieces: each rank writes what it holds, and reads what it needs.

This is torch.distributed.checkpoint for tensors alone: whatever else a checkpoint holds is in its state.pt. A piece is
found by its place in the whole tensor, so any number of ranks under any strategy can read what another number wrote.
"""

import collections
import datetime
import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from diffusion.errors import UserError

INDEX = '.metadata'
"""Where torch.distributed.checkpoint writes which piece is in which file."""


def write_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write tensors and DTensors, flushed to disk; every rank calls this with the same names."""
    writer = filesystem.FileSystemWriter(folder, sync_files=True)
    with _quiet():
        save(dict(tensors), storage_writer=writer, planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))


def read_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors and DTensors in place; every rank calls this with the same names.

    Raises:
        UserError: The checkpoint lacks some of them, or has them in other shapes.
    """
    stored = shapes(folder)
    for name, tensor in tensors.items():
        if stored.get(name) != tensor.shape:
            found = f'is {tuple(stored[name])}, here {tuple(tensor.shape)}' if name in stored else 'is not in it'
            raise UserError(f'{folder}: {name} {found}; the checkpoint is of another architecture or optimizer')
    with _quiet():
        load(tensors, storage_reader=_Reader(folder), planner=DefaultLoadPlanner())


def read_all_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors whose name begins with a prefix, whole and on the CPU, by the rest of their name; no other rank."""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _entries(folder).items()
        if name.startswith(prefix)
    }
    with _quiet():
        load(dict(tensors), storage_reader=_Reader(folder), planner=DefaultLoadPlanner(), no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of a checkpoint's tensors."""
    return {name: entry.size for name, entry in _entries(folder).items()}


def _entries(folder: Path) -> dict[str, metadata.TensorStorageMetadata]:
    found = _Reader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, metadata.TensorStorageMetadata)}


class _Reader(filesystem.FileSystemReader):
    """Reads the index without running anything that is pickled in it."""

    def read_metadata(self) -> metadata.Metadata:
        path = Path(self.path) / INDEX
        try:
            found = _IndexUnpickler(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError as error:
            raise UserError(f'{path}: not there; {path.parent} is not a sharded checkpoint') from error
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, KeyError) as error:
            raise UserError(f'{path}: not the index of a sharded checkpoint ({error})') from error
        if not isinstance(found, metadata.Metadata):
            raise UserError(f'{path}: not the index of a sharded checkpoint (it holds a {type(found).__name__})')
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _IndexUnpickler(pickle.Unpickler):
    """Admits the classes of an index and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
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
        }
        if (module_name, global_name) in plain:
            return plain[module_name, global_name]
        found = getattr(allowed.get(module_name), global_name, None)
        if module_name == 'torch' and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if isinstance(found, type) and found.__module__ == module_name:
            return found
        raise pickle.UnpicklingError(f'it holds a pickled {module_name}.{global_name}, which is not loaded')


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix('torch.'), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f'{name!r} is no layout of a tensor')
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on running in one process, and on its own deprecated storage."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='torch.distributed is disabled')
        warnings.filterwarnings('ignore', message='TypedStorage is deprecated')
        yield
