"""Copies of batches to the device ahead of the step that uses them."""

from collections.abc import Iterator
from typing import Any

import torch

from diffusion.data.cuda_prefetch import HostToDeviceCopier, prefetch_one

BATCHES, ELEMENTS = 20, 2**20


def batches(device: str) -> Iterator[dict[str, Any]]:
    """Yield batches that are filled with their number, from the pinned memory that a loader for a GPU uses."""
    for number in range(BATCHES):
        values = torch.full((ELEMENTS,), float(number))
        yield {'values': values.pin_memory() if device == 'cuda' else values, 'key': f'{number}'}


def test_every_batch_that_is_copied_ahead_arrives_whole(device):
    """Drop each batch on the host while its work is queued: its memory must not be used again before that work."""
    copies: Any = HostToDeviceCopier(torch.device('cuda', 0)) if device == 'cuda' else None
    start, finish = (copies.start, copies.finish) if copies else (lambda batch: batch, lambda batch: batch)
    square = torch.rand(1024, 1024, device=device)
    sums, keys = [], []
    for batch in prefetch_one(batches(device), start, finish):
        assert batch['values'].device.type == device
        # On a GPU, the sum waits behind this work while the host goes on to the next batches.
        delayed = square
        for _ in range(20 if device == 'cuda' else 0):
            delayed = delayed @ square / 512
        sums.append((batch['values'] + 0 * delayed.sum()).double().mean())
        keys.append(batch['key'])
        del batch
    assert [float(each) for each in sums] == list(range(BATCHES))
    assert keys == [f'{number}' for number in range(BATCHES)]
