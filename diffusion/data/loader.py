"""The loader: batches with their place in the epoch, and an epoch that ends early is an error."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming import StreamingDataLoader
from streaming.base.world import World

from diffusion.data import keys
from diffusion.data.streams import BucketedDataset
from diffusion.models.noise import Draws, Purpose


class BucketedLoader(StreamingDataLoader):
    """A StreamingDataLoader that numbers its batches.

    The number of a global batch within its epoch is the same on any number of devices and after any interruption, so
    randomness may depend on it.

    Args:
        dataset: What it serves.
        stratified: Give samples a timestep quantile, for `Objective.timesteps: stratified`; all ranks iterate together.
        settings: Keywords of StreamingDataLoader.
    """

    dataset: BucketedDataset  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(self, dataset: BucketedDataset, *, stratified: bool = False, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        if stratified and not dataset.elastic:
            raise ValueError('stratified: devices may get batches of unequal size; make the dataset with elastic=True')
        self.stratified = stratified
        self._gloo: torch.distributed.ProcessGroup | None = None

    def __iter__(self) -> Iterator[Any]:
        world = World.detect()
        # Read before the workers start, since they count the epoch up.
        _, sample_in_epoch = self.dataset._resume(world, self.dataset.next_epoch)
        assert self.batch_size is not None
        first = sample_in_epoch // (self.batch_size * world.num_ranks)
        for index, batch in enumerate(super().__iter__(), start=first):
            batch[keys.BATCH_INDEX] = torch.full_like(batch[keys.SAMPLE_ID], index)
            if self.stratified:
                everyone = self._of_all_ranks(batch[keys.SAMPLE_ID])
                batch[keys.TIMESTEP_QUANTILE] = timestep_quantiles(self.dataset.seed, batch, everyone, world.rank)
            yield batch
        # Streaming ends an epoch early when a shard is missing or corrupt, and raises nothing; its event is set.
        event = getattr(self.dataset, '_event', None)
        if event is not None and event.is_set():
            names = ', '.join(f'streams.{bucket.name}' for bucket in self.dataset.buckets)
            raise ValueError(
                f'{names}: the epoch ended early because a shard is missing or corrupt; the log above names it. '
                'Restore it (a corrupt local copy: delete it, it is fetched again) and resume'
            )

    def _of_all_ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids of a global batch, rank after rank."""
        if self._gloo is None and torch.distributed.is_initialized():
            # NCCL takes no tensors of the CPU, and on the GPU they would wait for all that is queued there.
            self._gloo = torch.distributed.new_group(backend='gloo')
        return torch.cat(list(dist.all_gather(ids, group=self._gloo)))


def timestep_quantiles(seed: int, batch: Mapping[str, torch.Tensor], everyone: torch.Tensor, rank: int) -> torch.Tensor:
    """Quantiles of a rank's share of a global batch, float64 [B]; `everyone` holds the ids of all ranks in turn."""
    first = {name: batch[name][:1].expand(len(everyone)) for name in (keys.EPOCH, keys.BATCH_INDEX)}
    draws = Draws(seed, everyone, first[keys.EPOCH], first[keys.BATCH_INDEX])
    size = len(batch[keys.SAMPLE_ID])
    return draws.stratified(Purpose.STRATUM, Purpose.TIMESTEP)[rank * size : (rank + 1) * size]


def as_spec(loader: BucketedLoader) -> DataSpec:
    """The loader for a Trainer's evaluation: Composer's own splitting warns about a last batch that is short."""
    return DataSpec(loader, split_batch=_split)


def _split(batch: dict[str, torch.Tensor], size: int | float) -> list[dict[str, torch.Tensor]]:
    count = len(batch[keys.SAMPLE_ID])
    starts = range(0, count, int(size))
    return [{name: tensor[start : start + int(size)] for name, tensor in batch.items()} for start in starts]


def outlive_signals(worker: int) -> None:
    """Let a worker ignore what tells a run to stop: its process ends it, after the batch (see `Preemption`)."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def default_num_workers(devices_on_node: int) -> int:
    """Workers a device: the cores that this process may use, shared out, one kept for the device's own process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(0, min(8, cores // max(1, devices_on_node) - 1))
