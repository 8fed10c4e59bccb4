"""Check a node's GPUs through NVML, and format the results of all node checks as a table, JSON or exit status."""

import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED
from diffusion.launch.rank_discovery import visible_gpus
from diffusion.planning.gpus import load_gpus

MIN_FREE_SHARE = 0.9
"""Minimum fraction of a GPU's memory that must be free."""
MIN_NOMINAL_SHARE = 0.9
"""Minimum fraction of its nominal memory that a GPU must report; the driver reserves the rest."""
RELEASE_SECONDS = 20.0
"""Maximum time to wait until killed processes have released their GPU memory."""
RECOVERY_ACTIONS = {
    1: 'a GPU reset',
    2: 'a node reboot',
    3: 'a drain of its peers',
    4: 'a drain and a reset',
    5: 'a recovery of its IMEX domain',
    6: 'a bus reset',
    7: 'a system reboot',
}
"""Names of the actions of nvmlGpuRecoveryAction_t."""


@dataclass(frozen=True)
class Finding:
    """Result of one check on a node or on one of its processes."""

    check: str
    ok: bool
    detail: str
    """The measured value, or the fault and how to fix it."""
    status: int = BAD_HARDWARE
    """Exit status if the check failed: 76 for a fault of this node; 78 for a user mistake, with which every node would
    fail; 1 for a fault that may be temporary."""
    where: str = ''
    """Name of the host, and the rank if the check is per rank."""
    warns: bool = False
    """True if the check passed but the detail warns of a risk."""


def findings_exit_status(findings: Iterable[Finding]) -> int:
    """Return one exit status for all findings: user error (78), else bad hardware (76), other fault (1), or 0."""
    found = {finding.status for finding in findings if not finding.ok}
    return next((status for status in (CONFIG_ERROR, BAD_HARDWARE, FAILED) if status in found), 0)


def downgrade_shared_faults(findings: Sequence[Finding], nodes: int) -> list[Finding]:
    """If a check failed on every one of several nodes, change its status from bad hardware (76) to failure (1)."""
    # A failure on all nodes points to something that they share, such as a disk. With BAD_HARDWARE, the scheduler would
    # exclude every node of the job, and might have none left.
    hosts: dict[str, set[str]] = {}
    for each in findings:
        if not each.ok and each.status == BAD_HARDWARE:
            hosts.setdefault(each.check, set()).add(each.where.split(' ')[0])
    failed_everywhere = {check for check, names in hosts.items() if len(names) == nodes > 1}
    return [
        replace(each, status=FAILED, detail=f'{each.detail} (on all nodes)')
        if not each.ok and each.status == BAD_HARDWARE and each.check in failed_everywhere
        else each
        for each in findings
    ]


def findings_table(findings: Sequence[Finding]) -> str:
    """Format the findings as a table with one line each: passed checks, then warnings, then failures."""
    ordered = sorted(findings, key=lambda finding: (not finding.ok, finding.warns, finding.check, finding.where))
    widths = [max((len(getattr(each, name)) for each in ordered), default=0) for name in ('check', 'where')]
    marks = ['BAD' if not each.ok else 'WARN' if each.warns else 'ok' for each in ordered]
    return '\n'.join(
        f'{mark:4} {each.check:{widths[0]}}  {each.where:{widths[1]}}  {each.detail}'
        for mark, each in zip(marks, ordered, strict=True)
    )


def findings_json(findings: Sequence[Finding]) -> str:
    content = {'status': findings_exit_status(findings), 'findings': [asdict(each) for each in findings]}
    return json.dumps(content, indent=1) + '\n'


def check_gpus(nvml: Any, kind: str, count: int) -> Iterator[Finding]:
    """Yield the findings about this node's GPUs; call this before any process of the job uses a GPU.

    Args:
        nvml: The module pynvml or a substitute; None without an NVIDIA driver.
        kind: The required GPU as in planning/gpus.yaml, such as h100-sxm; `any` accepts all, `none` skips all checks.
        count: Minimum number of visible GPUs.
    """
    if kind == 'none':
        return
    if nvml is None:
        yield Finding('gpu', False, 'NVML does not respond; check that the driver is loaded and the container has GPUs')
        return
    # Only visible GPUs are checked; other jobs may use the rest.
    names = visible_gpus(os.environ, int(nvml.nvmlDeviceGetCount()))
    yield Finding('gpu count', len(names) >= count, f'{len(names)} of {count}')
    # Use one deadline for all GPUs, because the processes of a killed attempt release them simultaneously.
    until = time.monotonic() + RELEASE_SECONDS
    for name in names:
        try:
            by_index = isinstance(name, int)
            gpu = nvml.nvmlDeviceGetHandleByIndex(name) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
            yield from _check_one(nvml, gpu, f'gpu {name}', kind, until)
        except nvml.NVMLError as error:
            # A GPU that has fallen off the bus fails every query.
            yield Finding('gpu', False, f'gpu {name}: {error}')


def _check_one(nvml: Any, gpu: Any, name: str, kind: str, until: float) -> Iterator[Finding]:
    product = nvml.nvmlDeviceGetName(gpu)
    # Compare only the GPU family by name, since the driver reports product names such as `NVIDIA H100 80GB HBM3`. The
    # check of the memory size below tells the variants of a family apart.
    family = kind.split('-')[0]
    same = kind == 'any' or re.sub('[^a-z0-9]', '', family) in re.sub('[^a-z0-9]', '', product.lower())
    yield Finding('gpu kind', same, f'{name}: {product}' + ('' if same else f', expected {kind}'), CONFIG_ERROR)
    foreign, free, total = _processes_and_memory(nvml, gpu)
    known = load_gpus().get(kind)
    if known is not None and total < MIN_NOMINAL_SHARE * known.memory_gib * 2**30:
        detail = f'{name}: {total / 2**30:.0f} GiB of memory, {kind} has {known.memory_gib:.0f}'
        yield Finding('gpu kind', False, detail, CONFIG_ERROR)
    # The processes of a killed attempt may take some seconds to release the GPU.
    while (foreign or free < MIN_FREE_SHARE) and time.monotonic() < until:
        time.sleep(0.5)
        foreign, free, total = _processes_and_memory(nvml, gpu)
    # Check the free memory too: in a container, NVML reports the host's process ids or none at all.
    users = f'in use by process {", ".join(map(str, foreign))}; stop it' if foreign else 'no other process'
    yield Finding('gpu processes', not foreign, f'{name}: {users}')
    yield Finding('gpu memory', free >= MIN_FREE_SHARE, f'{name}: {free:.0%} of {total / 2**30:.0f} GiB free')
    yield from _check_health(nvml, gpu, name)


def _processes_and_memory(nvml: Any, gpu: Any) -> tuple[list[int], float, int]:
    """Return the ids of the processes on a GPU, the free fraction of its memory, and its total memory in bytes."""
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    processes = [each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
    return processes, memory.free / memory.total, memory.total


def _check_health(nvml: Any, gpu: Any, name: str) -> Iterator[Finding]:
    """Yield findings about a GPU's memory errors and the recovery action that the driver requests, where supported."""
    rows = _if_supported(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(gpu))
    if rows is not None:
        _, _, pending, failed = rows
        state = 'failed; replace the GPU' if failed else 'pending; reset the GPU' if pending else 'not pending'
        yield Finding('gpu rows', not (failed or pending), f'{name}: row remapping {state}')
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _if_supported(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since))
    if errors is not None:
        yield Finding('gpu ecc', errors == 0, f'{name}: {errors} uncorrected errors since driver load')
    action = _if_supported(nvml, lambda: _recovery_action(nvml, gpu))
    if action is not None:
        needed = RECOVERY_ACTIONS.get(action, f'action {action}') if action else 'no action'
        yield Finding('gpu recovery', not action, f'{name}: driver requests {needed}')


def _recovery_action(nvml: Any, gpu: Any) -> int | None:
    """Return the recovery action that the driver requests for a GPU, 0 for none, or None if the driver is too old."""
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    # An older driver does not know this field: it raises no error but sets nvmlReturn.
    return None if field.nvmlReturn else int(field.value.uiVal)


def _if_supported(nvml: Any, query: Callable[[], Any]) -> Any | None:
    try:
        return query()
    except nvml.NVMLError_NotSupported:
        return None
