"""Callback that logs the health of the run's GPUs: the worst value of each metric, and the rank that has it."""

import logging
import math
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.errors import UserError
from diffusion.launch.gpu_health import load_nvml

log = logging.getLogger(__name__)

WORST: dict[str, Callable[..., tuple[float, int]]] = {
    'gpu_utilization': min,
    'gpu_memory_used': max,
    'gpu_temperature': max,
    'gpu_clock': min,
    'gpu_throttled': max,
    'gpu_ecc_errors': max,
    'gpu_remapped_rows': max,
    'gpu_xid_errors': max,
}
"""Metrics by name, with the function that finds the worst. Utilization, memory in use and the clock are shares of the
maximum, temperature is in degrees Celsius, throttled is 1 if heat or power slows the GPU down, the rest are counts."""
FAULTS = ('gpu_ecc_errors', 'gpu_remapped_rows', 'gpu_xid_errors')
"""Metrics that never grow on a healthy GPU."""


class NodeHealth(Callback):
    """Logs `health/NAME`, the worst value of all ranks, and `health/NAME_rank`, the rank that has it.

    NVML is queried in a thread, because some queries take a tenth of a second. A growing count of faults is a warning.

    Args:
        every: Interval of logging, in batches.
        seconds: Interval of the queries.
    """

    def __init__(self, every: int = 100, seconds: float = 5.0) -> None:
        if every < 1 or seconds <= 0:
            raise UserError(f'node_health: every={every} and seconds={seconds} must be positive')
        self.every, self.seconds = every, seconds
        self._latest: dict[str, float] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if not torch.cuda.is_available() or self._thread is not None:
            return
        uuid = f'GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}'
        nvml = load_nvml()
        if nvml is None:
            log.warning('node_health: NVML does not answer; nothing is known of this GPU')
            return
        self._done.clear()
        self._thread = threading.Thread(target=self._ask, args=(nvml, uuid), daemon=True)
        self._thread.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every == 0:
            figures = worst_of_all(self._latest, state)
            if figures:
                logger.log_metrics(figures)

    def close(self, state: State, logger: Logger) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=self.seconds)
            self._thread = None

    def _ask(self, nvml: Any, uuid: str) -> None:
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)  # not by index: CUDA_VISIBLE_DEVICES renumbers
            xids = Xids(nvml, gpu)
            while not self._done.is_set():
                self._take(figures_of(nvml, gpu) | xids.wait(self.seconds, self._done))
        except nvml.NVMLError as error:
            log.warning('node_health: %s: %s: %s; it is not asked again', socket.gethostname(), uuid, error)
            self._latest = {}

    def _take(self, figures: dict[str, float]) -> None:
        before, self._latest = self._latest, figures
        for name in FAULTS:
            if name in before and name in figures and figures[name] > before[name]:
                host, rank = socket.gethostname(), dist.get_global_rank()
                log.warning('%s rank %d: %s went from %.0f to %.0f', host, rank, name, before[name], figures[name])


class Xids:
    """Counts the critical errors (Xids) that the driver reports of a GPU.

    Args:
        nvml: The module pynvml, or a substitute.
        gpu: Handle of the GPU.
    """

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._events, self._count = nvml, None, 0
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:  # not supported, or not allowed in this container
            self._events = None

    def wait(self, seconds: float, done: threading.Event) -> dict[str, float]:
        """Wait up to `seconds` for events, or until `done` is set; return the metric, empty if not supported."""
        if self._events is None:
            done.wait(seconds)
            return {}
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            self._count += 1
            log.warning(
                '%s: Xid %d on the GPU of rank %d', socket.gethostname(), event.eventData, dist.get_global_rank()
            )
        except self._nvml.NVMLError_Timeout:
            done.wait(seconds)
        return {'gpu_xid_errors': float(self._count)}


def figures_of(nvml: Any, gpu: Any) -> dict[str, float]:
    """Query the metrics of a GPU; those that it does not support are left out."""

    def throttled() -> bool:
        slowed = nvml.nvmlClocksThrottleReasonHwSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        return bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu) & slowed)

    def memory_used() -> float:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return memory.used / memory.total

    def clock() -> float:
        kind = nvml.NVML_CLOCK_SM
        return nvml.nvmlDeviceGetClockInfo(gpu, kind) / nvml.nvmlDeviceGetMaxClockInfo(gpu, kind)

    def ecc_errors() -> int:
        kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since)

    questions = {
        'gpu_utilization': lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        'gpu_memory_used': memory_used,
        'gpu_temperature': lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        'gpu_clock': clock,
        'gpu_throttled': throttled,
        'gpu_ecc_errors': ecc_errors,
        'gpu_remapped_rows': lambda: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
    }
    found = {}
    for name, question in questions.items():
        try:
            found[name] = float(question())
        except nvml.NVMLError_NotSupported:
            continue
    return found


def worst_of_all(own: Mapping[str, float], state: State) -> dict[str, float]:
    """Return the worst value of each metric and its rank; a collective, which all ranks must call."""
    mine = torch.tensor([own.get(name, math.nan) for name in WORST], dtype=torch.float64)
    everyone = [each.tolist() for each in dist.all_gather(state.device.tensor_to_device(mine))]
    found: dict[str, float] = {}
    for column, (name, worse) in enumerate(WORST.items()):
        given = [(row[column], rank) for rank, row in enumerate(everyone) if not math.isnan(row[column])]
        if given:
            value, rank = worse(given, key=lambda pair: pair[0])
            found |= {f'health/{name}': value, f'health/{name}_rank': float(rank)}
    return found
