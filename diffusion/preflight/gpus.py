"""What the driver says of a node's GPUs, through NVML."""

import os
import re
from collections.abc import Iterator
from typing import Any

from diffusion.exits import CONFIG_ERROR
from diffusion.preflight.findings import Finding

FREE = 0.9
"""Share of a GPU's memory that must be free."""


def load_nvml() -> Any | None:
    """NVML, started; None where there is none."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def check_gpus(nvml: Any, kind: str, count: int) -> Iterator[Finding]:
    """All checks of a node's GPUs.

    Args:
        nvml: The module pynvml, or what behaves like it.
        kind: As in planning/gpus.yaml, such as h100-sxm; `none` is a CPU.
        count: How many the job uses.
    """
    if kind == 'none':
        return
    if nvml is None:
        yield Finding('gpu', False, 'NVML does not answer; is the driver loaded, and the container given its GPUs?')
        return
    there = int(nvml.nvmlDeviceGetCount())
    yield Finding('gpu count', there >= count, f'{there} of {count}')
    for index in range(there):
        try:
            yield from _check_one(nvml, nvml.nvmlDeviceGetHandleByIndex(index), f'gpu {index}', kind)
        except nvml.NVMLError as error:
            # One that has fallen off the bus answers nothing.
            yield Finding('gpu', False, f'gpu {index}: {error}')


def _check_one(nvml: Any, gpu: Any, name: str, kind: str) -> Iterator[Finding]:
    product = _text(nvml.nvmlDeviceGetName(gpu))
    family = kind.split('-')[0]
    same = re.sub('[^a-z0-9]', '', family) in re.sub('[^a-z0-9]', '', product.lower())
    yield Finding('gpu kind', same, f'{name}: {product}' + ('' if same else f', asked for {kind}'), CONFIG_ERROR)
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    share = memory.free / memory.total
    yield Finding('gpu memory', share >= FREE, f'{name}: {share:.0%} of {memory.total / 2**30:.0f} GiB free')
    foreign = [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu) if each.pid != os.getpid()]
    yield Finding('gpu processes', not foreign, f'{name}: {", ".join(map(str, foreign)) or "none"} on it')
    yield from _check_health(nvml, gpu, name)


def _check_health(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    """Memory errors; what a GPU does not have, such as rows to remap before Ampere, it says it does not support."""
    try:
        _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(gpu)
    except nvml.NVMLError as error:
        if not isinstance(error, nvml.NVMLError_NotSupported):
            raise
    else:
        what = 'rows could not be remapped' if failed else 'a reset is due' if pending else 'no row waits'
        yield Finding('gpu rows', not (failed or pending), f'{name}: {what}')
    try:
        errors = nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    except nvml.NVMLError as error:
        if not isinstance(error, nvml.NVMLError_NotSupported):
            raise
    else:
        yield Finding('gpu ecc', errors == 0, f'{name}: {errors} uncorrected errors since the driver was loaded')


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
