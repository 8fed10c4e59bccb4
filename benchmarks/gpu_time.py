"""Time for which a GPU computes during a step, and the number of its kernels, by PyTorch's profiler."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import profile


class GpuTime(NamedTuple):
    """Work of a GPU during a step."""

    seconds: float
    """Time for which at least one kernel or copy ran."""
    kernels: int
    """Number of kernels and copies, each of which the host launches, unless a CUDA graph does."""


def gpu_time(step: Callable[[], object]) -> GpuTime:
    """Run a step under the profiler, which makes it slower, and return what the GPU did during it."""
    with profile() as recorded:  # of every kind of device that is there
        step()
        torch.cuda.synchronize()
    events = [each for each in recorded.events() or () if each.device_type.name == 'CUDA']
    spans = [(each.time_range.start, each.time_range.end) for each in events]
    return GpuTime(covered(spans) / 1e6, len(spans))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each given as its start and end."""
    total, reached = 0.0, float('-inf')
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
