"""What only all processes together can find out: who is slow, who computes wrongly, whether they hear each other."""

import datetime
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.version import cuda

from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch import environment
from diffusion.launch.findings import Finding

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'diffusion')
TIMEOUT = datetime.timedelta(minutes=2)
"""For a sum over all processes, whose first one finds the ways between them; then NCCL ends the process."""
SKEW_SECONDS = 5.0
"""Between two clocks; signatures of requests to object stores allow minutes, and logs should be in order."""


@dataclass(frozen=True)
class CollectiveLimits:
    """What is still fit.

    Attributes:
        speed: Share of the median of all processes that each must reach, in computing and in sending.
        matrix: Side of the matrices that are multiplied.
        message_bytes: That are summed over all processes.
        repeats: Of each, of which the fastest counts.
        seconds: To go on multiplying for, so that the GPU gets hot; the last of that counts.
        links: Whether every process also sends to those of the nodes beside its own.
    """

    speed: float
    matrix: int
    message_bytes: int
    repeats: int
    seconds: float
    links: bool

    @staticmethod
    def of(device: str, *, deep: bool = False) -> 'CollectiveLimits':
        """Processes on CPUs share cores with others, GPUs are alone; deep takes minutes, in which a GPU gets hot."""
        speed, matrix, message, heat = (0.9, 8192, 2**28, 120.0) if device == 'cuda' else (0.25, 512, 2**22, 2.0)
        return CollectiveLimits(speed, matrix, message, 100 if deep else 5, heat if deep else 0.0, links=deep)


@dataclass(frozen=True)
class RankMeasurements:
    """What a process knows of itself."""

    rank: int
    host: str
    clock: float
    versions: tuple[str, ...]
    teraflops: float
    product: int
    """Of matrices that are the same everywhere: a checksum."""
    sum_is_right: bool
    bus: float
    """Bytes/s of a sum over all processes, as 2 (n - 1) / n of those that each one gives."""
    node_bus: float | None = None
    """The same over the processes of its node; None where it has one."""
    link: float | None = None
    """Bytes/s to a node beside its own, and back: the faster of both, since a slow one makes two slow."""


def check_together(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> list[Finding]:
    """All checks of a job's processes; every process gets the same findings.

    Args:
        device: cpu or cuda.
        limits: What is still fit.
        group: Of all processes, which can send what is on the device.
    """
    rank, node = dist.get_rank(), int(os.environ['LOCAL_WORLD_SIZE'])
    teraflops, product = multiply(device, limits)
    right, bus = add_up(device, limits, group)
    node_bus = _within_node(device, limits, node) if 1 < node < dist.get_world_size() else None
    link = _to_neighbours(device, limits, node, group) if limits.links and node < dist.get_world_size() else None
    dist.barrier()
    clock = time.time()
    own = RankMeasurements(
        rank,
        environment.machine_name(os.environ),
        clock,
        versions(device),
        teraflops,
        product,
        right,
        bus,
        node_bus,
        link,
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return judge(everyone, limits)


def judge(everyone: Sequence[RankMeasurements], limits: CollectiveLimits) -> list[Finding]:
    """What is wrong with whom; a process that is alone has nobody to be compared with."""
    if len(everyone) == 1:
        speed = Finding('speed', True, f'{everyone[0].teraflops:.3g} TFLOP/s, one process: nothing to compare it with')
        return [*_same_versions(everyone), *_products(everyone), speed]
    return [
        *_same_versions(everyone),
        *_clocks(everyone),
        *_products(everyone),
        *_sums(everyone),
        *_slow('speed', everyone, [each.teraflops for each in everyone], 'TFLOP/s', limits),
        *_slow('node bus', everyone, [_giga(each.node_bus) for each in everyone], 'GB/s within its node', limits),
        *_slow('link', everyone, [_giga(each.link) for each in everyone], 'GB/s to its neighbours', limits),
    ]


def multiply(device: str, limits: CollectiveLimits) -> tuple[float, int]:
    """TFLOP/s of a product of matrices, and its checksum, -1 where it was not always the same.

    The numbers are small whole ones, so that every order of sums gives the same.
    """
    side, generator = limits.matrix, torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if device == 'cuda' else torch.float32
    left, right = (torch.randint(-2, 3, (side, side), generator=generator).to(device, kind) for _ in range(2))
    # A CPU is shared: only the time that it worked for this process says how fast it is.
    clock = time.perf_counter if device == 'cuda' else time.process_time
    seconds, checksums, until = [], set(), time.monotonic() + limits.seconds
    while len(seconds) <= limits.repeats or time.monotonic() < until:
        _wait(device)
        begin = clock()
        product = left @ right
        _wait(device)
        seconds.append(clock() - begin)
        if len(seconds) % 50 == 1:
            # bfloat16 rounds the sums, alike on every GPU of a kind.
            checksums.add(int(product.double().abs().sum().item()))
    # Once it is hot, where there was time for that.
    usual = statistics.median(seconds[-len(seconds) // 4 :]) if limits.seconds else min(seconds[1:])
    return 2 * side**3 / usual / 1e12, checksums.pop() if len(checksums) == 1 else -1


def add_up(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> tuple[bool, float]:
    """Whether a sum over the processes of a group is right, and bytes/s on the bus."""
    members = dist.get_process_group_ranks(group)
    seconds, right = [], True
    for _ in range(1 + limits.repeats):
        message = torch.full((limits.message_bytes // 4,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # all begin at once
        _wait(device)
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        right = right and bool((message == sum(members) + len(members)).all().item())
    return right, 2 * (len(members) - 1) / len(members) * limits.message_bytes / min(seconds[1:])


def _within_node(device: str, limits: CollectiveLimits, processes: int) -> float:
    backend = 'nccl' if device == 'cuda' else 'gloo'
    own, _ = dist.new_subgroups(processes, timeout=TIMEOUT, backend=backend)
    assert own is not None
    return add_up(device, limits, own)[1]


def _to_neighbours(device: str, limits: CollectiveLimits, processes: int, group: dist.ProcessGroup) -> float:
    """Bytes/s between a process and those of the same place on the nodes before and after its own, the faster."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    node, found = rank // processes, []
    for first in (0, 1):  # even nodes with those after them, then odd ones
        partner = rank + processes if node % 2 == first else rank - processes
        dist.barrier()
        if 0 <= partner < ranks:
            found.append(_send_both_ways(device, limits, partner, group))
    return max(found)


def _send_both_ways(device: str, limits: CollectiveLimits, partner: int, group: dist.ProcessGroup) -> float:
    sent = torch.zeros(limits.message_bytes // 4, device=device)
    received, seconds = torch.empty_like(sent), []
    for _ in range(1 + min(limits.repeats, 20)):
        _wait(device)
        begin = time.perf_counter()
        sending = dist.P2POp(dist.isend, sent, partner, group)
        receiving = dist.P2POp(dist.irecv, received, partner, group)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return limits.message_bytes / min(seconds[1:])


def versions(device: str) -> tuple[str, ...]:
    """Of what must be the same everywhere."""
    found = (f'Python {platform.python_version()}', *(f'{name} {version(name)}' for name in PACKAGES))
    if device == 'cpu':
        return found
    release = '.'.join(map(str, nccl.version()))
    return (*found, f'CUDA {cuda}', f'NCCL {release}', torch.cuda.get_device_name())


def _wait(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()


def _where(each: RankMeasurements) -> str:
    return f'{each.host} rank {each.rank}'


def _same_versions(everyone: Sequence[RankMeasurements]) -> list[Finding]:
    usual, _ = Counter(each.versions for each in everyone).most_common(1)[0]
    found = []
    for each in everyone:
        others = [f'{own}, elsewhere {other}' for own, other in zip(each.versions, usual, strict=True) if own != other]
        if others:
            what = f'{"; ".join(others)}: use one image everywhere'
            found.append(Finding('versions', False, what, CONFIG_ERROR, _where(each)))
    return found or [Finding('versions', True, ', '.join(usual))]


def _clocks(everyone: Sequence[RankMeasurements]) -> list[Finding]:
    middle = statistics.median(each.clock for each in everyone)
    wrong = [each for each in everyone if abs(each.clock - middle) > SKEW_SECONDS]
    found = [
        Finding('clock', False, f'{each.clock - middle:+.0f} s off the others; start its NTP', where=_where(each))
        for each in wrong
    ]
    spread = max(each.clock for each in everyone) - min(each.clock for each in everyone)
    return found or [Finding('clock', True, f'within {spread:.2f} s')]


def _slow(
    check: str,
    everyone: Sequence[RankMeasurements],
    figures: Sequence[float | None],
    unit: str,
    limits: CollectiveLimits,
) -> list[Finding]:
    """Who falls behind the median of a figure; nothing where nobody has it."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return []
    middle = statistics.median(known)
    return [
        Finding(check, False, f'{figure:.3g} {unit}, the median is {middle:.3g}', where=_where(each))
        for each, figure in zip(everyone, figures, strict=True)
        if figure is not None and figure < limits.speed * middle
    ] or [Finding(check, True, f'{middle:.3g} {unit}, all within {limits.speed:.0%}')]


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _products(everyone: Sequence[RankMeasurements]) -> list[Finding]:
    steady = Counter(each.product for each in everyone if each.product >= 0)
    usual = steady.most_common(1)[0][0] if steady else -1
    found = []
    for each in everyone:
        if each.product < 0 or each.product != usual:
            than = 'from one time to the next' if each.product < 0 else 'from that of the others'
            what = f'a product differs {than}: it computes wrongly'
            found.append(Finding('results', False, what, where=_where(each)))
    return found or [Finding('results', True, 'the same on all, each time')]


def _sums(everyone: Sequence[RankMeasurements]) -> list[Finding]:
    wrong = [each for each in everyone if not each.sum_is_right]
    slowest = min(each.bus for each in everyone)
    return [Finding('all-reduce', False, 'gave a wrong sum', where=_where(each)) for each in wrong] or [
        Finding('all-reduce', True, f'right, {slowest / 1e9:.3g} GB/s on the bus')
    ]
