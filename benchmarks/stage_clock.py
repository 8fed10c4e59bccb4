"""Clock of the stages of a training step: CUDA events on a GPU, the host's clock on a CPU."""

import time
from typing import Any

import torch


class StageClock:
    """Measures the seconds of each stage of one step.

    Args:
        on_gpu: True measures on the GPU's time line; the GPU's idle time counts towards the stage before it.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        # CUDA events on a GPU, else seconds of the host's clock.
        self._marks: list[tuple[str, Any]] = []
        self.mark('')

    def mark(self, stage: str) -> None:
        """End a stage, which began at the mark before; does not wait for the GPU."""
        moment: Any = time.perf_counter()
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self._marks.append((stage, moment))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage; on a GPU, call after `torch.cuda.synchronize()`."""
        found: dict[str, float] = {}
        for (_, before), (stage, after) in zip(self._marks, self._marks[1:], strict=False):
            passed = before.elapsed_time(after) / 1e3 if self._on_gpu else after - before
            found[stage] = found.get(stage, 0.0) + passed
        return found
