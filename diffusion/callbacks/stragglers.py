"""Callback that logs the slowest rank, and how much slower it is than the median rank."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from diffusion.callbacks.reduce_once import fsdp_modules
from diffusion.data.loader import BucketedLoader

EVERY = 100
"""Logging interval in batches."""


class HostTimer:
    """Accumulated host time between start and stop."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._seconds = 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self) -> None:
        if self._begin is not None:
            self._seconds += time.perf_counter() - self._begin
            self._begin = None

    def take(self) -> float:
        """Return the accumulated seconds and reset them to zero."""
        found, self._seconds = self._seconds, 0.0
        return found


class CudaTimer:
    """Accumulated GPU time between start and stop, measured with CUDA events so that the host need not wait."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()

    def stop(self) -> None:
        if self._begin is not None:
            end: Any = torch.cuda.Event(enable_timing=True)
            end.record()
            self._pairs.append((self._begin, end))
            self._begin = None

    def take(self) -> float:
        """Return the accumulated seconds and reset them to zero; waits for the last CUDA event."""
        pairs, self._pairs = self._pairs, []
        if pairs:
            pairs[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


class Stragglers(Callback):
    """Callback that logs the slowest rank (`straggler/slowest_rank`) and its factor (`straggler/slowest_factor`).

    The factor is the slowest rank's time per batch divided by the median rank's. Only time without waiting for other
    ranks counts: loading data, and the forward pass up to its first collective. Under DDP that is the whole forward
    pass. Under FSDP, ranks wait for each other in every sharded module, so only the part before the first sharded
    module counts, such as the VAE. With FSDP and precomputed latents only data loading remains; `node_health` then
    reveals slow GPUs by their clock speed.
    """

    # Whole batches are not timed: they take equally long on all ranks, since each rank waits for the slowest one in the
    # gradient all-reduce. The first batch does not count. The cost is one small collective every EVERY batches, without
    # device synchronization beyond Composer's own.

    def __init__(self) -> None:
        self._waited = 0.0
        self._first = True
        self._timer: HostTimer | CudaTimer | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_world_size() == 1 or self._timer is not None:
            return
        timer = self._timer = CudaTimer() if state.device.name == 'gpu' else HostTimer()
        for module in fsdp_modules(state.model):
            assert isinstance(module, nn.Module)
            # This hook must run first: FSDP's own hook gathers weights and therefore waits for other ranks.
            module.register_forward_pre_hook(lambda *_: timer.stop(), prepend=True)

    def before_forward(self, state: State, logger: Logger) -> None:
        if self._timer is not None:
            self._timer.start()

    def after_forward(self, state: State, logger: Logger) -> None:
        if self._timer is not None:
            self._timer.stop()

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._timer is None:
            return
        loader = state.train_dataloader
        assert isinstance(loader, BucketedLoader)
        if self._first:
            # Skip the first batch: compilation and the start of loader workers take different times on different ranks.
            self._first = False
            self._timer.take()
            self._waited = loader.wait_seconds
            return
        if state.timestamp.batch.value % EVERY:
            return
        waited, self._waited = loader.wait_seconds - self._waited, loader.wait_seconds
        own = torch.tensor([waited + self._timer.take()], dtype=torch.float64)
        seconds = [each.item() for each in dist.all_gather(state.device.tensor_to_device(own))]
        rank, factor = slowest(seconds)
        logger.log_metrics({'straggler/slowest_rank': float(rank), 'straggler/slowest_factor': factor})


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """Return the slowest rank, and its time divided by the median time of all ranks (1 if the median is 0)."""
    rank = max(range(len(seconds)), key=lambda each: seconds[each])
    # Use the lower median: of two ranks it is the faster one.
    middle = statistics.median_low(seconds)
    return rank, seconds[rank] / middle if middle > 0 else 1.0
