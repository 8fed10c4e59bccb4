"""Copy of a small tensor from the device to the host, which is made while the host goes on and read later."""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Values of a tensor on their way from the device to the host.

    `tensor.tolist()` makes the host wait until the GPU has finished all of its work, and the GPU is idle until the host
    has found new work for it. A copy that is read after something else has waited costs nothing.

    Args:
        tensor: A tensor of the device; it must not be changed until the copy is read, unless by later kernels.
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
        """True if `read` does not wait."""
        return self._event is None or self._event.query()

    def read(self) -> Any:
        """Return the values as numbers or nested lists, after the copy has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
