"""Callback that logs the health of the run's GPUs, and can end the run to restart it without a faulty machine."""

import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.callbacks.preemption import save_now
from diffusion.compatibility.nvml import load_nvml
from diffusion.data.epoch_position import is_last_batch
from diffusion.errors import UserError
from diffusion.exit_codes import HardwareFault, Preempted
from diffusion.runs.environment import machine_name
from diffusion.runs.heartbeats import report_hardware_fault

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
the maximum, temperature is in degrees Celsius, throttled is 1 if heat or power limits slow the GPU down; the rest are
counts.
"""
FAULTS = {
    'gpu_ecc_errors': 'uncorrected memory errors',
    'gpu_remapped_rows': 'remapped memory rows',
    'gpu_xid_errors': 'critical errors (Xids)',
}
"""Metrics that never increase on a healthy GPU, with descriptions; each increase is logged as a warning."""
HARDWARE_XIDS = {
    48: 'double-bit memory error',
    62: 'halt of the internal microcontroller',
    64: 'failed row remapping',
    74: 'NVLink error',
    79: 'GPU has fallen off the bus',
    94: 'contained memory error',
    95: 'uncontained memory error',
    119: 'timeout of the GPU system processor',
    120: 'error of the GPU system processor',
    140: 'unrecovered memory error',
}
"""Xids (driver errors) that NVIDIA's catalog attributes to hardware; a program may cause others, such as 13 and 31."""
SLOW_SHARE = 0.7
"""A GPU counts as slow if its clock, as a fraction of its maximum, is below this fraction of the median GPU's."""
SLOW_SECONDS = 300.0
"""Seconds that a GPU must be slow (see SLOW_SHARE) without interruption before it counts as faulty."""
_FAULT = 'fault'
"""Column in a rank's row of metrics: 1 if its GPU has a fault, else 0."""


class NodeHealth(Callback):
    """Callback that logs the worst value of each GPU metric over all ranks (`health/NAME`) and its rank.

    The rank is logged as `health/NAME_rank`. A warning is logged when a metric in FAULTS increases. With action
    `leave`, a fault makes all ranks save a checkpoint and end the run. The faulty node exits with status 76, so that
    the scheduler restarts the run on other machines. Faults are uncorrected memory errors, a failed or pending row
    remapping, an Xid in HARDWARE_XIDS, and a clock below SLOW_SHARE of the median of all GPUs for SLOW_SECONDS.

    Args:
        every: Interval in batches at which the ranks compare their metrics and act on faults.
        seconds: Interval between queries of the GPU driver.
        action: `log` only logs faults; `leave` also ends the run, so that it restarts on other machines.
    """

    # NVML is queried in a thread, since some queries take 0.1 s; `batch_end` only reads the latest values.

    def __init__(self, every: int = 100, seconds: float = 5.0, action: Literal['log', 'leave'] = 'log') -> None:
        if every < 1 or seconds <= 0:
            raise UserError(f'node_health: every={every} and seconds={seconds} must be positive')
        if action not in ('log', 'leave'):
            raise UserError(f'node_health: action={action!r} is unknown; use log or leave')
        self.every, self.seconds, self.action = every, seconds, action
        self._latest: dict[str, float] = {}
        self._fault = ''
        self._slow_since: float | None = None
        self._leaving = False
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._thread is not None:
            return
        found = current_gpu()
        if found is None:
            return
        self._done.clear()
        self._thread = threading.Thread(target=self._poll, args=found, daemon=True)
        self._thread.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every:
            return
        rows = rows_of_all_ranks({**self._latest, _FAULT: float(bool(self._fault))}, state)
        figures = worst_of_rows(rows)
        if figures:
            logger.log_metrics(figures)
        self._check_clock([row['gpu_clock'] for row in rows])
        # All ranks have the same `rows`, so all of them end the run together.
        self._leaving = self.action == 'leave' and any(row[_FAULT] > 0 for row in rows)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        # End the run at this event, as Preemption does: it comes after the batch's evaluation, if any, and before
        # Composer's CheckpointSaver runs.
        if self._leaving and not is_last_batch(state):
            self._leave(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=self.seconds)
            self._thread = None

    def _leave(self, state: State, logger: Logger) -> None:
        """Save a checkpoint, then raise HardwareFault on ranks with a faulty GPU and Preempted on the others."""
        machine = machine_name(os.environ)
        own = f'{machine}: rank {dist.get_global_rank()}: {self._fault}' if self._fault else ''
        found = '; '.join(each for each in dist.all_gather_object(own) if each)
        saved = save_now(state, logger)
        report_hardware_fault(found)
        after = f'{saved} is saved, the same command resumes from it' if saved else 'nothing is saved'
        message = f'stopped at batch {state.timestamp.batch.value} on a hardware fault ({found}); {after}'
        raise (HardwareFault if own else Preempted)(message)

    def _check_clock(self, clocks: Sequence[float]) -> None:
        """Record a fault if this rank's clock has been far below the median of all ranks for SLOW_SECONDS."""
        own, known = clocks[dist.get_global_rank()], [clock for clock in clocks if not math.isnan(clock)]
        middle = statistics.median(known) if known else math.nan
        if not own < SLOW_SHARE * middle:
            self._slow_since = None
            return
        now = time.monotonic()
        self._slow_since = now if self._slow_since is None else self._slow_since
        if now - self._slow_since >= SLOW_SECONDS:
            minutes = (now - self._slow_since) / 60
            self._record_fault(
                f'clock at {own:.0%} of its maximum for {minutes:.0f} min, the median GPU at {middle:.0%}'
            )

    def _record_fault(self, text: str) -> None:
        """Log a fault of this rank's GPU, and keep the first fault; ranks act on it when they next compare metrics."""
        log.warning('%s rank %d: %s', machine_name(os.environ), dist.get_global_rank(), text)
        self._fault = self._fault or text

    def _poll(self, nvml: Any, uuid: str) -> None:
        """Query the metrics of this rank's GPU until training ends; runs in a thread."""
        try:
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)  # use the UUID: CUDA_VISIBLE_DEVICES renumbers the indices
            xids = Xids(nvml, gpu)
            while not self._done.is_set():
                self._update(query_metrics(nvml, gpu) | xids.wait(self.seconds, self._done))
                fault = row_remapping_fault(nvml, gpu) or xids.fault
                if fault and not self._fault:
                    self._record_fault(fault)
        except nvml.NVMLError as error:
            log.warning('node_health: %s: %s: %s; monitoring stopped', machine_name(os.environ), uuid, error)
            self._latest = {}

    def _update(self, figures: dict[str, float]) -> None:
        """Store the latest metrics, and log a warning for each metric in FAULTS that has increased."""
        before, self._latest = self._latest, figures
        for name in FAULTS:
            if name in before and name in figures and figures[name] > before[name]:
                text = f'{FAULTS[name]} rose from {before[name]:.0f} to {figures[name]:.0f}'
                # Only memory errors prove a fault: remapped rows are repaired memory, and programs can cause Xids.
                if name == 'gpu_ecc_errors':
                    self._record_fault(text)
                else:
                    log.warning('%s rank %d: %s', machine_name(os.environ), dist.get_global_rank(), text)


def current_gpu() -> tuple[Any, str] | None:
    """Return NVML and the UUID of this rank's GPU, or None without a GPU or without NVML."""
    if not torch.cuda.is_available():
        return None
    nvml = load_nvml()
    if nvml is None:
        log.warning("node_health: NVML is not available; this GPU's health is not monitored")
        return None
    return nvml, f'GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}'


def row_remapping_fault(nvml: Any, gpu: Any) -> str:
    """Return a description of a failed or pending row remapping of a GPU, or an empty string."""
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    except nvml.NVMLError_NotSupported:
        return ''
    return 'row remapping failed' if failed else 'row remapping is pending until a reset' if pending else ''


class Xids:
    """Counter of the critical errors (Xids) that the driver reports for a GPU; `nvml` is pynvml or a substitute."""

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._events, self._count = nvml, None, 0
        self.fault = ''
        """Description of the last Xid that NVIDIA attributes to hardware; empty if there was none."""
        try:
            self._events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:  # Xids are not supported, or not allowed in this container
            self._events = None

    def wait(self, seconds: float, done: threading.Event) -> dict[str, float]:
        """Return the number of Xids so far as `gpu_xid_errors`, or {} if Xids are not supported.

        Each call counts at most one pending Xid. If none is pending, it first waits `seconds`, or until `done` is set.
        """
        if self._events is None:
            done.wait(seconds)
            return {}
        # Poll with a timeout of 0: `done` could not interrupt a wait inside NVML when training ends.
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            self._count += 1
            rank, machine = dist.get_global_rank(), machine_name(os.environ)
            log.warning('%s: Xid %d on the GPU of rank %d', machine, event.eventData, rank)
            if event.eventData in HARDWARE_XIDS:
                self.fault = f'Xid {event.eventData} ({HARDWARE_XIDS[event.eventData]})'
        except self._nvml.NVMLError_Timeout:
            done.wait(seconds)
        return {'gpu_xid_errors': float(self._count)}


def query_metrics(nvml: Any, gpu: Any) -> dict[str, float]:
    """Return a GPU's current health metrics by name, such as its temperature; unsupported metrics are omitted."""

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


def rows_of_all_ranks(own: Mapping[str, float], state: State) -> list[dict[str, float]]:
    """Return the metrics of each rank, with NaN for those that its GPU does not support; a collective."""
    # Each row has a number for every metric, since the ranks' GPUs may support different metrics.
    names = [*WORST, _FAULT]
    row = torch.tensor([own.get(name, math.nan) for name in names], dtype=torch.float64)
    return [
        dict(zip(names, each.tolist(), strict=True)) for each in dist.all_gather(state.device.tensor_to_device(row))
    ]


def worst_of_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's worst value over all ranks as `health/NAME`, and the rank with this value as `..._rank`."""
    found: dict[str, float] = {}
    for name, worst in WORST.items():
        values = [(row[name], rank) for rank, row in enumerate(rows) if not math.isnan(row[name])]
        if values:
            value, rank = worst(values, key=lambda pair: pair[0])
            found |= {f'health/{name}': value, f'health/{name}_rank': float(rank)}
    return found
