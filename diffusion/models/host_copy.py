"""Asynchronous copy of a small tensor from the device to the host."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Values of a tensor that are being copied from the device to the host.

    `tensor.tolist()` makes the host wait until the GPU has finished all of its work; then the GPU is idle until the
    host launches more. Reading an asynchronous copy is free if the host has meanwhile waited for the GPU for another
    reason. Before the read, the tensor may only be changed by kernels launched after the copy.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        if not tensor.is_cuda:
            self._values = tensor
            return
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._values.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def has_arrived(self) -> bool:
        """True if `read` would return without waiting."""
        return self._event is None or self._event.query()

    def read(self) -> Any:
        """Wait for the copy, and return the values as numbers or nested lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
