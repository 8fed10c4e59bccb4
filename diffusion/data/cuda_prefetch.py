"""Data loader that copies the next batch to the GPU while the model trains on the current one."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffusion.data.loader import BucketedLoader

Item = TypeVar('Item')
Started = TypeVar('Started')


class CudaPrefetchLoader(BucketedLoader):
    """Data loader that copies the next batch from pinned memory to the GPU during a step, on a separate CUDA stream.

    The loader is one batch ahead of the trainer. This does not affect the data position in a checkpoint, because
    Composer counts only samples already trained on.
    """

    def __iter__(self) -> Iterator[Any]:
        copies = HostToDeviceCopier(torch.device('cuda', torch.cuda.current_device()))
        return prefetch_one(super().__iter__(), copies.start, copies.finish)


class HostToDeviceCopier:
    """Copies batches to a GPU asynchronously, on a CUDA stream separate from the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)

    def start(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Start copying a batch to the GPU; return the copy, to be used only after `finish`, and its CUDA event."""
        with torch.cuda.stream(self.stream):
            copied = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
            return copied, self.stream.record_event()

    def finish(self, started: tuple[dict[str, Any], Any]) -> dict[str, Any]:
        """Make the current CUDA stream, but not the host, wait for a copy begun by `start`; return the copied batch."""
        batch, done = started
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for value in batch.values():
            if isinstance(value, Tensor):
                # The memory belongs to the copy stream. Without this, the caching allocator would give it to the next
                # batch as soon as Python drops the tensor, although queued kernels may still read it.
                value.record_stream(current)
        return batch


def prefetch_one(
    items: Iterator[Item], start: Callable[[Item], Started], finish: Callable[[Started], Item]
) -> Iterator[Item]:
    """Yield `finish(start(item))` for each item, calling `start` for the next item before each yield.

    `start` must return at once. If `items` or `start` raises, all earlier items are yielded before the error.
    """
    # The item that `start` was last called for; empty before the first item.
    started: list[Started] = []
    while True:
        upcoming, error = [], None
        try:
            upcoming = [start(next(items))]
        except StopIteration:
            pass
        except Exception as caught:
            # Raise this error only after the item already started has been yielded: that item is valid.
            error = caught
        yield from map(finish, started)
        if error is not None:
            raise error
        if not upcoming:
            return
        started = upcoming
