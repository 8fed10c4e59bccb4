"""Batches that are on the GPU when they are asked for: the next one is copied while this one is computed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffusion.data.loader import BucketedLoader

Given = TypeVar('Given')
Ready = TypeVar('Ready')


class AheadLoader(BucketedLoader):
    """A BucketedLoader whose batches come from pinned memory to the current GPU on a stream of their own.

    A batch is asked of the workers when the one before it is handed out. The place in the data that a checkpoint holds
    is not affected: Composer counts the samples that were trained on.
    """

    def __iter__(self) -> Iterator[Any]:
        copies = Copies(torch.device('cuda', torch.cuda.current_device()))
        return one_ahead(super().__iter__(), copies.start, copies.finish)


class Copies:
    """Copies of batches to a GPU, beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)

    def start(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Begin to copy a batch, and the event of its end; it may be used after `finish`."""
        with torch.cuda.stream(self.stream):
            copied = {name: self._copy(value) for name, value in batch.items()}
            return copied, self.stream.record_event()

    def finish(self, started: tuple[dict[str, Any], Any]) -> dict[str, Any]:
        """The batch, for whatever is queued from now on; the host does not wait."""
        batch, done = started
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for value in batch.values():
            if isinstance(value, Tensor):
                value.record_stream(current)  # or its memory could be the next batch's while it is in use
        return batch

    def _copy(self, value: Any) -> Any:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value


def one_ahead(
    items: Iterator[Given], start: Callable[[Given], Ready], finish: Callable[[Ready], Given]
) -> Iterator[Given]:
    """The items in order; when one is handed out, the next has been started. What the iterator raises comes in turn."""
    started: list[Ready] = []
    while True:
        error: Exception | None = None
        ended = False
        try:
            upcoming = [start(next(items))]
        except StopIteration:
            upcoming, ended = [], True
        except Exception as caught:
            upcoming, error = [], caught
        for each in started:
            yield finish(each)
        if error is not None:
            raise error
        if ended:
            return
        started = upcoming
