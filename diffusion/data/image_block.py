"""Decode the images of a batch side by side in one block of memory, so that collating them copies nothing.

A batch of 16 images of 512 px has 12.6 MB. To copy them together, and to have the kernel clear new memory for each
batch, takes a noticeable part of the time in which they are read and decoded (benchmarks/loader.py).
"""

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from diffusion.models import batch_keys

MAX_FREE = 2
"""Freed buffers that are kept."""


class ImageBlock:
    """The memory that the images of the next batch are decoded into.

    A block belongs to the batch that is made of it; its memory is used again when no tensor uses it any more.

    Args:
        batch_size: Images per batch. Batches of another size, and of images in another order, are copied as usual.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._block: Tensor | None = None
        self._used = 0
        self._free = deque[bytearray](maxlen=MAX_FREE)

    def place(self, shape: Sequence[int]) -> Tensor:
        """Return uninitialized memory for an image, uint8 [3, H, W], directly behind that of the image before."""
        if self._block is None or self._used == self.batch_size or self._block.shape[1:] != tuple(shape):
            self._block, self._used = self._new_block((self.batch_size, *shape)), 0
        self._used += 1
        return self._block[self._used - 1]

    def collate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of these samples, with images [B, 3, H, W]."""
        batch = default_collate([{name: item[name] for name in item if name != batch_keys.IMAGE} for item in items])
        if batch_keys.IMAGE in items[0]:
            batch[batch_keys.IMAGE] = as_batch([item[batch_keys.IMAGE] for item in items])
        self._block = None
        return batch

    def _new_block(self, shape: Sequence[int]) -> Tensor:
        size = math.prod(shape)
        if get_worker_info() is not None:
            # A worker's batch has to be in shared memory, where default_collate puts it too, or is copied there.
            return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size)).view(*shape)
        memory = bytearray()
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
        if not size <= len(memory) <= 2 * size:
            memory = bytearray(size)
        array = np.frombuffer(memory, np.uint8, count=size)
        # PyTorch holds the array, which is nowhere else, for as long as a tensor uses its memory. Whichever thread lets
        # go of the last one: the queue takes and gives each buffer once.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array).view(*shape)


def as_batch(images: Sequence[Tensor]) -> Tensor:
    """Return images of one shape as a batch: a view where they lie one behind the other in a block, else a copy."""
    first = images[0]
    memory, begin, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    for number, image in enumerate(images):
        follows = image.untyped_storage().data_ptr() == memory and image.storage_offset() == begin + number * size
        if not (follows and image.is_contiguous() and image.shape == first.shape):
            return default_collate(list(images))
    return first.as_strided((len(images), *first.shape), (size, *first.stride()), begin)
