"""Snapshots of a trainer's state in host memory, so that training continues while the state is written.

The memory is allocated once and reused by every snapshot. It grows when there are more tensors, for example once weight
averaging starts.
"""

import copy
import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from composer.utils import dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from diffusion.compatibility.private_names import private_attribute, tree_leaves
from diffusion.config.byte_sizes import bytes_text
from diffusion.runs import environment
from diffusion.storage.host_memory import available_memory

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**22
ALIGNMENT = 64
MAX_THREADS = 4
"""Maximum number of threads that copy CPU tensors; two or three saturate the memory bandwidth."""
NICENESS = 10
"""Nice value of threads that work while training continues, from 0 (same as training) to 19 (lowest priority)."""
_TOUCHED_BYTES = 2**26
State = TypeVar('State')
Key = tuple[object, ...]
SPARE_FRACTION = 0.1
"""Fraction of a node's available memory that snapshots must leave free."""


class TensorCopies:
    """Background copies of tensors into CPU tensors of the same shapes: `start` begins them, `wait` waits for them.

    The copies have the values at the time of `start`, provided that nothing changes the tensors before
    `wait_before_change` returns.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], threads: int) -> None:
        self._pairs = list(pairs)
        self._threads = threads
        self._running: list[threading.Thread] = []
        self._streams: dict[torch.device, Any] = {}
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._versions = 0

    def start(self) -> None:
        """Start the copies, unless they have already been started or were given up."""
        if self._started.is_set():
            return
        self._versions = self._sum_of_versions()
        on_gpu, rest, pieces = self._divided()
        for device in {source.device for _, source in on_gpu}:
            # Copy on a separate stream, which starts after the work that is queued now.
            stream = self._streams[device] = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
        # memmove is 1.4 times as fast as torch's copy and also releases the GIL.
        work = [partial(_move, pieces[number :: self._threads]) for number in range(min(self._threads, len(pieces)))]
        if on_gpu or rest:
            work.append(partial(self._copy, [*on_gpu, *rest]))
        for each in work:
            thread = threading.Thread(target=self._guarded, args=(each,), name='copies for a snapshot', daemon=True)
            self._running.append(thread)
            thread.start()
        self._started.set()

    def wait_before_change(self) -> bool:
        """Wait until the tensors may be changed. Return False if they were changed too early.

        On GPUs, the training stream waits for the copies instead of this thread. The method returns True immediately if
        the copies have not been started, or if it was called before.
        """
        if not self._started.is_set() or not self._pairs:
            return True
        self._join()
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        unchanged = self._versions == self._sum_of_versions()
        self._pairs = []
        return unchanged

    def wait(self) -> None:
        """Wait for `start` and all copies; raise the error of a copy that failed. Callable from any thread."""
        self._started.wait()
        self._join()
        for stream in self._streams.values():
            stream.synchronize()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Cancel the copies if they have not been started; otherwise wait until they are complete."""
        if not self._started.is_set():
            self._pairs = []
            self._started.set()
        self._join()
        for stream in self._streams.values():
            stream.synchronize()

    def _join(self) -> None:
        for thread in self._running:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def _divided(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]], list[tuple[int, int, int]]]:
        """Divide the pairs into copies from a GPU, other copies by torch, and memmove pieces (to, from, size)."""
        on_gpu, rest, pieces = [], [], []
        for target, source in self._pairs:
            if source.is_cuda:
                on_gpu.append((target, source))
            elif source.device.type != 'cpu' or source.stride() != target.stride():
                rest.append((target, source))
            else:
                # Copy bytes, in pieces that can be divided among threads: both tensors have the same dense layout.
                starts = range(0, source.nbytes, _PIECE_BYTES)
                to, origin, size = target.data_ptr(), source.data_ptr(), source.nbytes
                pieces += [(to + start, origin + start, min(_PIECE_BYTES, size - start)) for start in starts]
        return on_gpu, rest, pieces

    @torch.no_grad()
    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            with torch.cuda.stream(self._streams.get(source.device)):
                target.copy_(source, non_blocking=True)

    def _sum_of_versions(self) -> int:
        """Return a number that increases with every in-place change of one of the source tensors."""
        # Skip inference tensors, which do not count their changes.
        counted = [source for _, source in self._pairs if not source.is_inference()]
        if counted:
            private_attribute(counted[0], '_version')  # raises UserError if this PyTorch has no such counter
        return sum(map(attrgetter('_version'), counted))


def _move(pieces: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)


class StateTensors:
    """Dense tensors of a state, identified by address, so the state must stay alive while this object is used."""

    def __init__(self, state: object) -> None:
        self.views: dict[Key, Tensor] = {}
        """The distinct tensors, detached, by `_key`."""
        self.keys: dict[int, Key] = {}
        """Key in `views` of each tensor object, by the object's `id`."""
        for tensor in tree_leaves(state):
            # Other tensors, such as sparse ones, are copied like other objects.
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and not isinstance(tensor, DTensor):
                key = self.keys[id(tensor)] = _key(tensor)
                self.views[key] = tensor.detach()
        sizes = [view.nbytes for view in self.views.values()]
        self.content_bytes = sum(sizes)
        self.nbytes = sum(map(_aligned, sizes))
        """Size in bytes of the memory that a snapshot of the tensors needs."""

    @property
    def on_gpu(self) -> bool:
        return any(view.is_cuda for view in self.views.values())


class SnapshotBuffers:
    """Host memory for snapshots of this rank's state; it holds one snapshot at a time.

    If the state is on a GPU, the memory is pinned, so that the GPU copies into it at full bus speed.
    """

    # All tensors share one block: torch's pinned-memory allocator would round the size of each tensor up to a power of
    # two. When the block must grow, it is freed before the larger one is allocated.
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._gpu: int | None = None
        self._pinned = 0
        self._places: dict[tuple[object, ...], Tensor] = {}
        self.reductions: dict[int, Any] = {}
        """Result of `__reduce_ex__` for each tensor of a snapshot, by the tensor's `id`; None if not known yet."""
        self._preparing: threading.Thread | None = None
        self._needed_now = threading.Event()

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def reserve(self, need: int, *, pinned: bool = False) -> bool:
        """Ensure that at least `need` bytes (`StateTensors.nbytes`) are allocated; return False if the kernel refuses.

        If the memory has to grow, the previous snapshot must no longer be in use. If `pinned`, the memory is pinned
        later, by `prepare` or the first copy.
        """
        if need <= self.nbytes:
            return True
        self.release()
        try:
            memory = mmap.mmap(-1, need, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:  # an OSError here is not a storage fault
            log.warning('%.2f GiB of memory for snapshots cannot be allocated (%s)', need / 2**30, error)
            return False
        if sys.platform == 'linux':
            # Forked loader workers must not keep copies of pages that the next snapshot changes, and the first snapshot
            # must not take a page fault for every 4 KiB.
            for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
                with suppress(OSError):  # some kernels do not support huge pages
                    memory.madvise(advice)
        self._memory = memory
        self._gpu = torch.cuda.current_device() if pinned else None
        return True

    def prepare(self) -> None:
        """Touch all of the memory in a thread, and pin it, so that the first snapshot does not have to wait."""
        # The kernel clears new pages at 0.4 to 3 GB/s, a tenth of the speed of a copy. Pinning memory that has no pages
        # yet would also clear them, at training's priority.
        memory = self._memory
        if memory is None or self._pinned:
            return

        def work() -> None:
            lower_priority()
            for offset in range(0, len(memory), _TOUCHED_BYTES):
                if self._needed_now.is_set():
                    return
                count = min(_TOUCHED_BYTES, len(memory) - offset)
                torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=offset).zero_()
            if self._gpu is not None:
                self._pin()

        self._needed_now.clear()
        self._preparing = threading.Thread(target=work, name='memory for snapshots', daemon=True)
        self._preparing.start()

    def copy(self, state: State, tensors: StateTensors, later: Collection[int] = ()) -> tuple[State, TensorCopies]:
        """Return a copy of a state (nested containers) with its tensors copied into this memory.

        Tied weights share a copy. Everything else is copied too, so that later changes by training do not reach the
        snapshot. `reserve` must have returned True for this state's size. Tensors with addresses in `later` are copied
        only when the caller starts the returned TensorCopies.
        """
        self._end_preparation()  # stop `prepare`: the copies touch the memory too
        if self._gpu is not None and not self._pinned:
            self._pin()
        copies = self.place(tensors.views)
        now: list[tuple[Tensor, Tensor]] = []
        then: list[tuple[Tensor, Tensor]] = []
        for key, view in tensors.views.items():
            (then if key[0] in later else now).append((copies[key], view))
        # Use all copying threads: training waits for these copies, so its cores are free.
        running = TensorCopies(now, copying_threads())
        running.start()
        # deepcopy takes the tensors in this memory from its memo; `running` and `rest` fill them with values.
        memo: dict[int, Any] = {number: copies[key] for number, key in tensors.keys.items()}
        copied = copy.deepcopy(state, memo)
        running.wait()
        rest = TensorCopies(then, max(1, copying_threads() - 1))
        if not then:
            rest.start()
        return copied, rest

    def release(self) -> None:
        """Free the memory as soon as no tensor of a snapshot uses it."""
        self._end_preparation()
        if self._pinned:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._pinned)
        self._memory, self._gpu, self._pinned = None, None, 0
        self._places, self.reductions = {}, {}

    def place(self, views: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Return a tensor in this memory for each view, by key; reuse matching tensors of the previous call."""
        # Keep the tensors for the next snapshot. Otherwise thousands of new small objects would end up in the heap,
        # where each step frees and allocates gradients; page faults then lengthen the step after a snapshot by a
        # quarter.
        kept, self._places = self._places, {}
        copies: dict[Key, Tensor] = {}
        offset = 0
        for key, view in views.items():
            where = (offset, view.dtype, view.shape, view.stride())
            found = kept.get(where)
            copies[key] = self._places[where] = self._new_place(view, offset) if found is None else found
            offset += _aligned(view.nbytes)
        # Drop cached `__reduce_ex__` results of tensors that are no longer kept: a new object may get the same `id`.
        known = {id(place): self.reductions.get(id(place)) for place in kept.values()}
        self.reductions = {id(place): known.get(id(place)) for place in self._places.values()}
        return copies

    def _new_place(self, view: Tensor, offset: int) -> Tensor:
        # Keep the tensor's memory format, such as channels_last, so that it is also saved in this format.
        strides = torch.empty_like(view, device='meta').stride()
        if not view.nbytes:
            return torch.empty_strided(view.shape, strides, dtype=view.dtype)
        assert self._memory is not None and offset + view.nbytes <= self.nbytes
        # Each tensor needs its own storage: torch.save writes a tensor's entire storage.
        block = torch.frombuffer(self._memory, dtype=torch.uint8, count=view.nbytes, offset=offset)
        return torch.empty(0, dtype=view.dtype).set_(block.untyped_storage(), 0, view.shape, strides)

    def _end_preparation(self) -> None:
        """Stop the thread of `prepare` once it has touched its current piece of memory, and wait for it."""
        if self._preparing is not None:
            self._needed_now.set()
            self._preparing.join()
            self._preparing = None

    def _pin(self) -> None:
        """Pin the memory for copies by the GPU; without pinning, copies are slower but still correct."""
        assert self._memory is not None and self._gpu is not None
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Select the GPU: a new thread uses the first one by default, which may belong to another rank.
        with torch.cuda.device(self._gpu):
            runtime: Any = torch.cuda.cudart()
            result = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if result:
            log.warning('memory for snapshots is not pinned (CUDA error %d): saves block training longer', result)
            self._gpu = None
            return
        self._pinned = address


def copying_threads() -> int:
    """Return the number of threads that copy CPU tensors: this rank's share of the cores, up to MAX_THREADS."""
    return max(1, min(MAX_THREADS, cores_per_rank()))


def cores_per_rank() -> int:
    """Return this rank's share of the CPU cores available to its process, rounded down."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1
    return cores // dist.get_local_world_size()


def lower_priority() -> None:
    """Give this thread a low priority, so that training gets the CPU first; on Linux only."""
    if sys.platform == 'linux':  # on other systems this would change the priority of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _key(tensor: Tensor) -> Key:
    """Return a key that is equal for tensors with the same device, memory address, dtype, shape and strides."""
    place = tensor.data_ptr() if tensor.nbytes else id(tensor)
    return (place, tensor.device, tensor.dtype, tensor.shape, tensor.stride())


def reserve_on_all_ranks(buffers: SnapshotBuffers, tensors: StateTensors) -> bool:
    """Allocate memory for a snapshot on all ranks; return False if a machine does not have enough. A collective."""
    machine, need = environment.machine_name(os.environ), tensors.nbytes
    figures = dist.all_gather_object((machine, max(0, need - buffers.nbytes), available_memory()))
    if not any(each for _, each, _ in figures):
        return True
    needs = {name: sum(each for place, each, _ in figures if place == name) for name, _, _ in figures}
    for name, _, free in figures:
        if free is not None and needs[name] > (1 - SPARE_FRACTION) * free:
            if dist.get_global_rank() == 0:
                log.warning(
                    'saves block training: a snapshot needs %s of memory on %s, where %s are available. To fix: '
                    'lower loader.num_workers or loader.prefetch_factor, or set checkpointing.asynchronous: false',
                    *(bytes_text(needs[name]), name, bytes_text(free)),
                )
            return False
    return all(dist.all_gather_object(buffers.reserve(need, pinned=tensors.on_gpu)))


def has_room_on_all_nodes(needed_bytes: int) -> bool:
    """Return True if every node has `needed_bytes` for each of its ranks and SPARE_FRACTION to spare; a collective."""
    figures = dist.all_gather_object((environment.machine_name(os.environ), needed_bytes, available_memory()))
    needs = {name: sum(each for place, each, _ in figures if place == name) for name, _, _ in figures}
    return all(free is None or needs[name] <= (1 - SPARE_FRACTION) * free for name, _, free in figures)
