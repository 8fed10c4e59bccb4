"""Decode the images of a batch into one contiguous block of memory, so that collating them copies nothing.

A batch of 16 images of 512 px has 12.6 MB. Copying the images into a batch, and having the kernel zero new memory for
each batch, costs a noticeable fraction of the time to read and decode them (benchmarks/loader.py).
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

from diffusion.compatibility.private_names import private_attribute
from diffusion.models import batch_keys

MAX_FREE = 2
"""Maximum number of unused buffers that are kept for later batches."""


class ImageBlock:
    """Allocator of the memory that the images of the next batch are decoded into.

    A block belongs to the batch that is collated from it. Its memory is reused once no tensor refers to it.

    Args:
        batch_size: Images per batch. Batches of another size or order are copied, as without this class.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._block: Tensor | None = None
        self._used = 0
        self._free = deque[bytearray](maxlen=MAX_FREE)

    def place(self, shape: Sequence[int]) -> Tensor:
        """Return an uninitialized tensor, uint8 [3, H, W], to decode the next image of a batch into.

        Images of a batch are adjacent in memory, so that `collate` makes the batch without copying them.
        """
        # An image of another shape starts a new batch, since batches never mix shapes.
        if self._block is None or self._used == self.batch_size or self._block.shape[1:] != tuple(shape):
            self._block, self._used = self._new_block((self.batch_size, *shape)), 0
        self._used += 1
        return self._block[self._used - 1]

    def collate(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate samples into a batch, images as [B, 3, H, W] without a copy; pass to the loader as `collate_fn`."""
        batch = default_collate([{name: item[name] for name in item if name != batch_keys.IMAGE} for item in items])
        if batch_keys.IMAGE in items[0]:
            batch[batch_keys.IMAGE] = as_batch([item[batch_keys.IMAGE] for item in items])
        # The memory belongs to the batch now: never write another image into it.
        self._block = None
        return batch

    def _new_block(self, shape: Sequence[int]) -> Tensor:
        """Return uninitialized memory for a batch of images: shared in a worker, otherwise recycled if possible."""
        size = math.prod(shape)
        if get_worker_info() is not None:
            # A worker passes its batch through shared memory, and a tensor elsewhere would be copied into it. PyTorch's
            # default_collate allocates there with this private method too. The memory is not recycled, because a worker
            # cannot know when the main process is done with it.
            new_shared = private_attribute(torch.UntypedStorage, '_new_shared')
            return torch.empty(0, dtype=torch.uint8).set_(new_shared(size)).view(*shape)
        # Recycle the buffer of a freed batch: its pages are mapped, so the kernel need not zero new ones.
        memory = bytearray()
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
        if not size <= len(memory) <= 2 * size:
            memory = bytearray(size)
        array = np.frombuffer(memory, np.uint8, count=size)
        # Reuse a buffer only when nothing can read it. torch.from_numpy keeps a reference to the array for as long as
        # any tensor or view uses the memory, and no other reference to the array exists. So its finalizer runs exactly
        # when the last of them is gone. That may be in any thread; append and pop of a deque are atomic, so each buffer
        # is handed out once. At interpreter exit no buffer is needed, hence no `atexit`.
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array).view(*shape)


def as_batch(images: Sequence[Tensor]) -> Tensor:
    """Return images of one shape as a batch: a view if they are adjacent and in order in memory, otherwise a copy."""
    # Compare addresses instead of trusting the call order: a dataset may have decoded an image that it then replaced
    # because the sample was bad, which leaves a gap in the block.
    first = images[0]
    memory, begin, size = first.untyped_storage().data_ptr(), first.storage_offset(), first.numel()
    for number, image in enumerate(images):
        follows = image.untyped_storage().data_ptr() == memory and image.storage_offset() == begin + number * size
        if not (follows and image.is_contiguous() and image.shape == first.shape):
            return default_collate(list(images))
    return first.as_strided((len(images), *first.shape), (size, *first.stride()), begin)
