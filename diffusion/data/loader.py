"""The loader: batches with their place in the epoch, and an epoch that ends early is an error."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from composer.core import DataSpec
from streaming import StreamingDataLoader
from streaming.base.world import World

from diffusion.data import keys
from diffusion.data.streams import BucketedDataset


class BucketedLoader(StreamingDataLoader):
    """A StreamingDataLoader that numbers its batches.

    The number of a global batch within its epoch is the same on any number of devices and after any interruption, so
    randomness may depend on it.
    """

    dataset: BucketedDataset  # type: ignore[reportIncompatibleVariableOverride]

    def __iter__(self) -> Iterator[Any]:
        world = World.detect()
        # Read before the workers start, since they count the epoch up.
        _, sample_in_epoch = self.dataset._resume(world, self.dataset.next_epoch)
        assert self.batch_size is not None
        first = sample_in_epoch // (self.batch_size * world.num_ranks)
        for index, batch in enumerate(super().__iter__(), start=first):
            batch[keys.BATCH_INDEX] = torch.full_like(batch[keys.SAMPLE_ID], index)
            yield batch
        # Streaming ends an epoch early when a shard is missing or corrupt, and raises nothing; its event is set.
        event = getattr(self.dataset, '_event', None)
        if event is not None and event.is_set():
            names = ', '.join(f'streams.{bucket.name}' for bucket in self.dataset.buckets)
            raise ValueError(
                f'{names}: the epoch ended early because a shard is missing or corrupt; the log above names it. '
                'Restore it (a corrupt local copy: delete it, it is fetched again) and resume'
            )


def as_spec(loader: BucketedLoader) -> DataSpec:
    """The loader for a Trainer's evaluation: Composer's own splitting warns about a last batch that is short."""
    return DataSpec(loader, split_batch=_split)


def _split(batch: dict[str, torch.Tensor], size: int | float) -> list[dict[str, torch.Tensor]]:
    count = len(batch[keys.SAMPLE_ID])
    starts = range(0, count, int(size))
    return [{name: tensor[start : start + int(size)] for name, tensor in batch.items()} for start in starts]


def default_num_workers(devices_on_node: int) -> int:
    """Workers a device: the cores that this process may use, shared out, one kept for the device's own process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(0, min(8, cores // max(1, devices_on_node) - 1))
