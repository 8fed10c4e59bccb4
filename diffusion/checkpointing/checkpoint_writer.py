"""Saving of one checkpoint by all ranks, step by step: write the files, store them, and publish the checkpoint."""

import datetime
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves

from diffusion.checkpointing import checkpoint_store, sharded_state
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.run_storage import RunStorage
from diffusion.checkpointing.storage_faults import SaveFailed, describe_fault, storage_fault
from diffusion.checkpointing.trainer_state import gather_state


def save_checkpoint(state: State, storage: RunStorage, *, sharded_tensors: bool = False, recipe_text: str = '') -> str:
    """Save a checkpoint of a trainer's state and return its path or URL; a collective, which every rank must call.

    Args:
        state: The trainer's state.
        storage: Storage of the run's checkpoints, which is open.
        sharded_tensors: Each rank writes its shards of the tensors; otherwise rank 0 writes all of them.
        recipe_text: The resolved recipe, stored as recipe.yaml; empty for none.

    Raises:
        SaveFailed: A rank met a storage fault. Every rank raises, no checkpoint appears under the final name, and the
            files written so far are removed.
    """
    batch = state.timestamp.batch.value
    name, work = storage.name_of(batch), storage.work_folder(batch)
    try:
        with _as_save_failed(name, storage.folder):
            storage.begin(batch, every_rank=sharded_tensors)
        # The collectives in this call may raise on one rank only. That must not count as a failed save: this rank
        # would continue training while the others wait for it.
        content, tensors = gather_state(state, sharded_tensors=sharded_tensors)
        needed_bytes = sum(leaf.nbytes for leaf in tree_leaves([content, tensors]) if isinstance(leaf, Tensor))
        about = _about(state, sharded_tensors=sharded_tensors) | {'run': storage.run_id}
        with _as_save_failed(name, storage.folder, needed_bytes):
            _write_checkpoint(content, tensors, about, storage, work, recipe_text)
    except (Exception, CheckpointException):  # CheckpointException is a BaseException
        # An incomplete checkpoint is of no use, and a full disk needs the space.
        storage.discard(work)
        raise
    return name


@contextmanager
def _as_save_failed(name: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Replace an error of the block that a storage fault caused by SaveFailed; all ranks must raise alike in it."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        fault = storage_fault(error)
        if fault is None:
            raise
        reason = describe_fault(fault, folder, needed_bytes=needed_bytes)
        raise SaveFailed(fault.errno, f'{name}: not saved, {reason}') from error


def _write_checkpoint(
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    storage: RunStorage,
    work: Path,
    recipe_text: str,
) -> None:
    """Write a checkpoint to the temporary folder `work`, store its files and publish it; a collective."""
    # After each step all ranks continue or all raise: a rank that raised alone would leave the others waiting in the
    # next collective until its timeout.
    rank, batch = dist.get_global_rank(), about['batch']
    failure = f'{storage.name_of(batch)}: not saved'
    records: dict[str, checkpoint_store.FileRecord] = {}
    with raise_on_all_ranks(failure, logs=False):
        if about['kind'] == 'sharded':
            sharded_state.write_tensors(tensors, work)
            # torch.distributed.checkpoint names files __RANK_NUMBER.distcp. Each rank hashes its own.
            names = [path.name for path in work.glob(f'__{rank}_*')] + ([checkpoint_store.INDEX] if rank == 0 else [])
            records |= checkpoint_store.records_of(work, names)
        if rank == 0:
            records[checkpoint_store.STATE] = _write_state(content, work / checkpoint_store.STATE)
            if recipe_text:
                records[checkpoint_store.RECIPE] = _write_text(recipe_text, work / checkpoint_store.RECIPE)
        storage.upload(work, records, batch)
    all_records: dict[str, checkpoint_store.FileRecord] = {}
    for rank_records in dist.all_gather_object(records):
        all_records |= rank_records
    with raise_on_all_ranks(failure, logs=False):
        if rank == 0:
            storage.publish(work, batch, all_records, about)
    storage.finish(work, batch)


def _write_state(content: Mapping[str, Any], path: Path) -> checkpoint_store.FileRecord:
    """Write the content of state.pt to a file, and return its size and hash."""
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        torch.save(dict(content), writer)  # type: ignore[arg-type]
        checkpoint_store.flush(file)
    return writer.record()


def _write_text(text: str, path: Path) -> checkpoint_store.FileRecord:
    """Write a text file and return its size and hash."""
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
