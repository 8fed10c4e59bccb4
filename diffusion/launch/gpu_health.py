"""Health of a node's GPUs as the driver reports it through NVML."""

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch.findings import Finding
from diffusion.launch.rank_discovery import visible_gpus
from diffusion.planning.gpus import load_gpus

MIN_FREE_SHARE = 0.9
"""Share of a GPU's memory that must be free."""
MIN_NOMINAL_SHARE = 0.9
"""Share of its nominal memory that a GPU must report; the driver takes some."""
RELEASE_SECONDS = 20.0
"""Longest time for which a killed process may still hold GPU memory."""
RECOVERY_ACTIONS = {
    1: 'a reset of the GPU',
    2: 'a reboot',
    3: 'draining its peers',
    4: 'draining it, and a reset',
    5: 'a recovery of its IMEX domain',
    6: 'a reset of its bus',
    7: 'a reboot of the system',
}
"""Actions of nvmlGpuRecoveryAction_t in words."""


def load_nvml() -> Any | None:
    """Initialize NVML and return its module; None if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def check_gpus(nvml: Any, kind: str, count: int) -> Iterator[Finding]:
    """Check a node's GPUs before any process of the job uses one.

    Args:
        nvml: The module pynvml, or a substitute; None if there is no driver.
        kind: The required GPU as in planning/gpus.yaml, such as h100-sxm; `any` accepts all, `none` is a CPU.
        count: Number of GPUs that the job uses.
    """
    if kind == 'none':
        return
    if nvml is None:
        yield Finding('gpu', False, 'NVML does not answer; is the driver loaded, and the container given its GPUs?')
        return
    # Other jobs may use the GPUs that this one cannot see.
    names = visible_gpus(os.environ, int(nvml.nvmlDeviceGetCount()))
    yield Finding('gpu count', len(names) >= count, f'{len(names)} of {count}')
    until = time.monotonic() + RELEASE_SECONDS
    for name in names:
        try:
            by_index = isinstance(name, int)
            gpu = nvml.nvmlDeviceGetHandleByIndex(name) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            yield from _check_one(nvml, gpu, f'gpu {name}', kind, until)
        except nvml.NVMLError as error:
            # One that has fallen off the bus answers nothing.
            yield Finding('gpu', False, f'gpu {name}: {error}')


def _check_one(nvml: Any, gpu: Any, name: str, kind: str, until: float) -> Iterator[Finding]:
    product = _text(nvml.nvmlDeviceGetName(gpu))
    family = kind.split('-')[0]
    same = kind == 'any' or re.sub('[^a-z0-9]', '', family) in re.sub('[^a-z0-9]', '', product.lower())
    yield Finding('gpu kind', same, f'{name}: {product}' + ('' if same else f', asked for {kind}'), CONFIG_ERROR)
    foreign, share, total = _use(nvml, gpu)
    known = load_gpus().get(kind)
    if known is not None and total < MIN_NOMINAL_SHARE * known.memory_gib * 2**30:
        what = f'{name}: {total / 2**30:.0f} GiB of memory, {kind} has {known.memory_gib:.0f}'
        yield Finding('gpu kind', False, what, CONFIG_ERROR)
    while (foreign or share < MIN_FREE_SHARE) and time.monotonic() < until:
        time.sleep(0.5)
        foreign, share, total = _use(nvml, gpu)
    # In a container the process ids are the host's, or not visible at all.
    on_it = f'process {", ".join(map(str, foreign))} is on it; end it' if foreign else 'nobody on it'
    yield Finding('gpu processes', not foreign, f'{name}: {on_it}')
    yield Finding('gpu memory', share >= MIN_FREE_SHARE, f'{name}: {share:.0%} of {total / 2**30:.0f} GiB free')
    yield from _check_health(nvml, gpu, name)


def _use(nvml: Any, gpu: Any) -> tuple[list[int], float, int]:
    """Return the processes on a GPU, the free share of its memory, and its total memory in bytes."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    processes = [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    return processes, memory.free / memory.total, memory.total


def _check_health(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    """Check memory errors and the recovery that the driver asks for, if the GPU supports the query."""
    rows = _if_supported(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
    if rows is not None:
        _, _, pending, failed = rows
        what = 'rows could not be remapped; replace it' if failed else 'a reset is due' if pending else 'no row waits'
        yield Finding('gpu rows', not (failed or pending), f'{name}: {what}')
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _if_supported(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since))
    if errors is not None:
        yield Finding('gpu ecc', errors == 0, f'{name}: {errors} uncorrected errors since the driver was loaded')
    action = _if_supported(nvml, lambda: _recovery_action(nvml, gpu))
    if action is not None:
        what = f'the driver asks for {RECOVERY_ACTIONS.get(action, f"action {action}")}' if action else 'needs nothing'
        yield Finding('gpu recovery', not action, f'{name}: {what}')


def _recovery_action(nvml: Any, gpu: Any) -> int | None:
    (answer,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    # A driver that does not know the field says so in the answer.
    return None if answer.nvmlReturn else int(answer.value.uiVal)


def _if_supported(nvml: Any, ask: Callable[[], Any]) -> Any | None:
    try:
        return ask()
    except nvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
