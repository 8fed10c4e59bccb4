"""How the GPUs of a run are: of each figure the worst of all ranks, and whose it is."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.preflight.gpus import load_nvml

WORST: dict[str, str] = {
    'utilisation': 'min',
    'memory_share': 'max',
    'temperature': 'max',
    'clock_share': 'min',
    'throttled': 'max',
    'ecc_errors': 'max',
    'remapped_rows': 'max',
}
"""Figures by name, and which end of them is bad."""


class NodeHealth(Callback):
    """Logs `health/NAME`, the worst of all ranks, and `health/NAME_rank`, the rank it is of, every so many batches.

    NVML is asked in a thread: some of its answers take a tenth of a second.

    Args:
        every: Batches between two.
        seconds: Between two questions to NVML.
    """

    def __init__(self, every: int = 100, seconds: float = 5.0) -> None:
        self.every, self.seconds = every, seconds
        self.latest: dict[str, float] = {}
        self._nvml: Any = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        self._nvml = load_nvml() if torch.cuda.is_available() else None
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._ask, args=(torch.cuda.current_device(),), daemon=True)
            self._thread.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every == 0:
            figures = worst_of_all(self.latest)
            if figures:
                logger.log_metrics(figures)

    def close(self, state: State, logger: Logger) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=self.seconds)
            self._thread = None

    def _ask(self, device: int) -> None:
        # Not by index: CUDA_VISIBLE_DEVICES renumbers.
        gpu = self._nvml.nvmlDeviceGetHandleByUUID(f'GPU-{torch.cuda.get_device_properties(device).uuid}')
        while not self._done.wait(self.seconds):
            self.latest = figures_of(self._nvml, gpu)


def figures_of(nvml: Any, gpu: Any) -> dict[str, float]:
    """What NVML says of a GPU; what it does not support is left out."""
    questions = {
        'utilisation': lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        'memory_share': lambda: (memory := nvml.nvmlDeviceGetMemoryInfo(gpu)).used / memory.total,
        'temperature': lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        'clock_share': lambda: (
            nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            / nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
        ),
        'throttled': lambda: float(
            bool(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
                & (nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown)
            )
        ),
        'ecc_errors': lambda: nvml.nvmlDeviceGetTotalEccErrors(
            gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        'remapped_rows': lambda: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
    }
    found = {}
    for name, question in questions.items():
        try:
            found[name] = float(question())
        except nvml.NVMLError:
            continue
    return found


def worst_of_all(own: Mapping[str, float]) -> dict[str, float]:
    """Of each figure that any rank has, the worst and its rank."""
    found: dict[str, float] = {}
    everyone = dist.all_gather_object(dict(own))
    for name, end in WORST.items():
        given = [(figures[name], rank) for rank, figures in enumerate(everyone) if name in figures]
        if given:
            value, rank = (min if end == 'min' else max)(given, key=lambda pair: pair[0])
            found |= {f'health/{name}': value, f'health/{name}_rank': float(rank)}
    return found
