"""Writing of the sharded tensors of a checkpoint: each rank writes its own shards, rank 0 the index."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from diffusion.checkpointing.checkpoint_store import INDEX, FileRecord, HashingWriter, flush
from diffusion.checkpointing.sharded_state import quiet
from diffusion.checkpointing.storage_faults import storage_fault
from diffusion.checkpointing.write_progress import WriteProgress
from diffusion.compatibility.private_names import _DistWrapper, _metadata_fn
from diffusion.storage.direct_file import open_for_writing


class ShardedWrite:
    """Write of the sharded tensors of one checkpoint in three steps; a thread can run the second one.

    The constructor, a collective, plans which rank writes which shard. `write` writes this rank's shards. With the
    results of all ranks, rank 0 writes the index (`write_index`).

    Args:
        tensors: Tensors and DTensors by name; the same names on every rank.

    Raises:
        CheckpointException: A rank cannot plan its write; on every rank.
    """

    # torch.distributed.checkpoint.save() runs these steps in one collective. The calls here follow torch 2.7's
    # _save_state_dict.
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
        self.shards = local_shards({name: tensors[name] for name in {item.index.fqn for item in self._plan.items}})
        """The shards of DTensors and the plain tensors that this rank writes, by name; a snapshot may replace them."""

    def write(self) -> list[WriteResult]:
        """Write the tensors of `shards` to this rank's file, and return what the index needs; not a collective.

        Raises:
            OSError: A storage fault.
        """
        self._planner.shards = self.shards
        if all(each.device.type == 'cpu' for each in self.shards.values()):
            # Copying ahead would make the thread wait for the GPU's stream, on which training runs.
            self._writer.per_thread_copy_ahead = 0
        with quiet():
            return self._writer.write_data(self._plan, self._planner).value()

    def write_index(self, results: Sequence[list[WriteResult]]) -> None:
        """Write the index file, on rank 0, from the results of all ranks."""
        assert self._metadata is not None, 'only rank 0 writes the index'
        self._writer.finish(self._metadata, list(results))

    @property
    def records(self) -> dict[str, FileRecord]:
        """Size and hash of the files that this rank has written so far, by name."""
        return self._writer.files.records


def local_shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of DTensors, and plain tensors unchanged, by name."""
    with torch.no_grad():
        return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in tensors.items()}


class _Planner(DefaultSavePlanner):
    """Planner of a sharded checkpoint that plans with DTensors and writes the shards that `shards` holds."""

    def __init__(self) -> None:
        # Tensors that all ranks hold are written by the lowest rank only.
        super().__init__(dedup_save_to_lowest_rank=True)
        self.shards: Mapping[str, Tensor] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.state_dict = {}  # planning is done; do not write these, since training changes them
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        # A rank has one shard of a DTensor at most, so the name is enough.
        return self.shards[index.fqn]


class _Stream(HashingWriter):
    """File of a sharded checkpoint that stays open when torch closes it, to be flushed to the disk."""

    def close(self) -> None:
        """Do nothing: `create_stream` closes the file."""


class _HashingFiles(filesystem.FileSystem):
    """Files of a sharded checkpoint, which are hashed while they are written."""

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
            # Flush here, since torch syncs the index to the disk before it flushes Python's buffer.
            flush(file)
        self.records[Path(path).name] = stream.record()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _Writer(filesystem.FileSystemWriter):
    """Writer of sharded checkpoints that raises the OSError of a storage fault instead of torch's own error."""

    def __init__(self, folder: Path, progress: WriteProgress | None) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = self.files = _HashingFiles(progress)

    # torch.save hides an OSError in the context of a RuntimeError.
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            fault = storage_fault(error)
            if fault is None or fault is error:
                raise
            raise OSError(fault.errno, fault.strerror, fault.filename or str(self.path)) from error


assert _metadata_fn == INDEX
