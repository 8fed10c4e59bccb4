"""Callback that logs the health of the run's GPUs: the worst value of each metric and its rank."""

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
"""Metrics by name, with the function that selects the worst value. Utilization, used memory and clock are fractions of
the maximum, temperature is in degrees Celsius, throttled is 1 if heat or power slows the GPU down, the rest are counts.
"""
FAULTS = ('gpu_ecc_errors', 'gpu_remapped_rows', 'gpu_xid_errors')
"""Metrics that never increase on a healthy GPU."""


class NodeHealth(Callback):
    """Callback that logs, per GPU metric, the worst value over all ranks (`health/NAME`) and its rank.

    The rank is logged as `health/NAME_rank`. A warning is logged when a metric in FAULTS increases.

    Args:
        every: Logging interval in batches.
        seconds: Interval between queries of the GPU driver.
    """

    # NVML is queried in a thread, since some of its queries take 0.1 s; `batch_end` only reads the latest values.

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
            log.warning("node_health: NVML is not available; this GPU's health is not monitored")
            return
        self._done.clear()
        self._thread = threading.Thread(target=self._poll, args=(nvml, uuid), daemon=True)
        self._thread.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every == 0:
            figures = worst_over_ranks(self._latest, state)
            if figures:
                logger.log_metrics(figures)

    def close(self, state: State, logger: Logger) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=self.seconds)
            self._thread = None

    def _poll(self, nvml: Any, uuid: str) -> None:
        """Query the metrics of this rank's GPU until training ends; runs in a thread."""
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)  # not by index, which CUDA_VISIBLE_DEVICES renumbers
            xids = Xids(nvml, gpu)
            while not self._done.is_set():
                self._update(query_metrics(nvml, gpu) | xids.wait(self.seconds, self._done))
        except nvml.NVMLError as error:
            log.warning('node_health: %s: %s: %s; monitoring stopped', socket.gethostname(), uuid, error)
            self._latest = {}

    def _update(self, figures: dict[str, float]) -> None:
        """Store the latest metrics, and log a warning for each metric in FAULTS that has increased."""
        before, self._latest = self._latest, figures
        for name in FAULTS:
            if name in before and name in figures and figures[name] > before[name]:
                host, rank = socket.gethostname(), dist.get_global_rank()
                log.warning('%s rank %d: %s rose from %.0f to %.0f', host, rank, name, before[name], figures[name])


class Xids:
    """Counter of the critical errors (Xids) that the driver reports for a GPU.

    Args:
        nvml: The module pynvml, or a substitute.
        gpu: NVML's handle of the GPU.
    """

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._events, self._count = nvml, None, 0
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:  # not supported, or not allowed in this container
            self._events = None

    def wait(self, seconds: float, done: threading.Event) -> dict[str, float]:
        """Check for an error, else wait up to `seconds` or until `done`; return the count as a metric, if supported."""
        if self._events is None:
            done.wait(seconds)
            return {}
        # Polled with a timeout of 0: a wait inside NVML could not be interrupted by `done` when training ends.
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            self._count += 1
            log.warning(
                '%s: Xid %d on the GPU of rank %d', socket.gethostname(), event.eventData, dist.get_global_rank()
            )
        except self._nvml.NVMLError_Timeout:
            done.wait(seconds)
        return {'gpu_xid_errors': float(self._count)}


def query_metrics(nvml: Any, gpu: Any) -> dict[str, float]:
    """Return the current health metrics of a GPU by name, such as its temperature, except unsupported ones."""

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

    queries = {
        'gpu_utilization': lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
        'gpu_memory_used': memory_used,
        'gpu_temperature': lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        'gpu_clock': clock,
        'gpu_throttled': throttled,
        'gpu_ecc_errors': ecc_errors,
        'gpu_remapped_rows': lambda: sum(nvml.nvmlDeviceGetRemappedRows(gpu)[:2]),
    }
    found = {}
    for name, query in queries.items():
        try:
            found[name] = float(query())
        except nvml.NVMLError_NotSupported:
            continue
    return found


def worst_over_ranks(own: Mapping[str, float], state: State) -> dict[str, float]:
    """Return the worst value of each metric over all ranks and its rank; a collective, which every rank must call."""
    # A fixed row of numbers with NaN for missing metrics, since the ranks' GPUs may support different ones.
    row = torch.tensor([own.get(name, math.nan) for name in WORST], dtype=torch.float64)
    rows = [each.tolist() for each in dist.all_gather(state.device.tensor_to_device(row))]
    found: dict[str, float] = {}
    for column, (name, worst) in enumerate(WORST.items()):
        values = [(row[column], rank) for rank, row in enumerate(rows) if not math.isnan(row[column])]
        if values:
            value, rank = worst(values, key=lambda pair: pair[0])
            found |= {f'health/{name}': value, f'health/{name}_rank': float(rank)}
    return found
