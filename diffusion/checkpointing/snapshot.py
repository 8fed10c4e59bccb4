"""Snapshots of a trainer's state in host memory, so that training continues while the state is written.

The memory is allocated once and used again by every snapshot. It grows when there are more tensors, as when averaging
of weights starts.
"""

import copy
import ctypes
import logging
import mmap
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes; each tensor of a snapshot starts at a multiple of it."""
State = TypeVar('State')
Key = tuple[object, ...]


class SnapshotBuffers:
    """Host memory for one snapshot at a time of this rank's state.

    For a state on a GPU the memory is pinned, so that the GPU copies into it at the speed of its bus.
    """

    # One block for all tensors instead of a tensor each: torch's allocator of pinned memory rounds sizes up to powers
    # of two, and a block that grows is freed before the larger one is allocated.
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = 0

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes."""
        return 0 if self._memory is None else len(self._memory)

    def missing_bytes(self, state: object) -> int:
        """Return the bytes that have to be allocated in addition for a snapshot of a state."""
        return max(0, snapshot_bytes(state) - self.nbytes)

    def reserve(self, state: object) -> bool:
        """Allocate the memory for a snapshot of a state; return False if the kernel refuses it.

        The snapshot before must not be in use any more if the memory has to grow.
        """
        need = snapshot_bytes(state)
        if need <= self.nbytes:
            return True
        self.release()
        try:
            memory = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:  # no storage fault, although it is an OSError
            log.warning('%.2f GiB of memory for snapshots cannot be allocated (%s)', need / 2**30, error)
            return False
        if sys.platform == 'linux':
            # Loader workers, which are forked, must not keep copies of the pages that the next snapshot changes; and
            # the first snapshot must not take a page fault for each 4 KiB.
            for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(advice)
        self._memory = memory
        if any(tensor.is_cuda for tensor in _views(state).values()):
            self._pin()
        return True

    def copy(self, state: State) -> State:
        """Return a copy of a state of nested containers, whose tensors are in this memory, on the CPU.

        Tensors with the same content (tied weights) share a copy. Everything else is copied too, so that nothing that
        training changes later reaches the snapshot. `reserve` must have returned True for this state.
        """
        views = _views(state)
        copies: dict[Key, Tensor] = {}
        streams: dict[torch.device, Any] = {}
        offset = 0
        with torch.no_grad():
            for key, view in views.items():
                if view.is_cuda and view.device not in streams:
                    streams[view.device] = torch.cuda.Stream(view.device)
                    streams[view.device].wait_stream(torch.cuda.current_stream(view.device))
                copies[key] = self._place(view, offset)
                offset += _aligned(view.nbytes)
                with torch.cuda.stream(streams[view.device]) if view.is_cuda else nullcontext():
                    copies[key].copy_(view, non_blocking=view.is_cuda)
        for stream in streams.values():
            stream.synchronize()
        memo: dict[int, Any] = {id(tensor): copies[_key(tensor)] for tensor in _tensors(state)}
        return copy.deepcopy(state, memo)

    def release(self) -> None:
        """Free the memory, as soon as no tensor of a snapshot uses it any more."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._pinned)
        self._memory, self._pinned = None, 0

    def _place(self, view: Tensor, offset: int) -> Tensor:
        """Return an uninitialized tensor like `view` in the memory, from an offset."""
        # In the memory format of the tensor, such as channels_last, as it would be saved.
        strides = torch.empty_like(view, device='meta').stride()
        if not view.nbytes:
            return torch.empty_strided(view.shape, strides, dtype=view.dtype)
        assert self._memory is not None and offset + view.nbytes <= self.nbytes
        # A storage of its own: torch.save writes the whole storage of a tensor.
        block = torch.frombuffer(self._memory, dtype=torch.uint8, count=view.nbytes, offset=offset)
        return torch.empty(0, dtype=view.dtype).set_(block.untyped_storage(), 0, view.shape, strides)

    def _pin(self) -> None:
        """Pin the memory for copies by the GPU; without it copies are slower, but correct."""
        assert self._memory is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        result = int(_cuda_runtime().cudaHostRegister(address, self.nbytes, 0))
        if result:
            log.warning('memory for snapshots is not pinned (CUDA error %d): saves block training longer', result)
            return
        self._pinned = address


def _cuda_runtime() -> Any:
    """Return the functions of the CUDA runtime that torch exposes."""
    return torch.cuda.cudart()


def snapshot_bytes(state: object) -> int:
    """Return the bytes of memory that a snapshot of a state needs."""
    return sum(_aligned(view.nbytes) for view in _views(state).values())


def _aligned(size: int) -> int:
    """Return a size rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _tensors(state: object) -> Iterator[Tensor]:
    """Yield the dense tensors in nested containers; others, such as sparse ones, are copied like other objects."""
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not isinstance(leaf, DTensor):
            yield leaf


def _views(state: object) -> Mapping[Key, Tensor]:
    """Return the distinct tensors in nested containers, detached."""
    return {_key(tensor): tensor.detach() for tensor in _tensors(state)}


def _key(tensor: Tensor) -> Key:
    """Return a value that is equal for tensors with the same place in memory, shape and type."""
    place = tensor.data_ptr() if tensor.nbytes else id(tensor)
    return (place, tensor.device, tensor.dtype, tensor.shape, tensor.stride())
