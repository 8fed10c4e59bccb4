"""Cross-rank checks: package versions, clock skew, matmul speed and results, all-reduce results, link bandwidth."""

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
"""Timeout of an all-reduce, the first of which sets up the connections; after it NCCL ends the process."""
SKEW_SECONDS = 5.0
"""Largest clock skew; signed requests to object stores allow minutes, but logs should be in order."""


@dataclass(frozen=True)
class CollectiveLimits:
    """Sizes of the measurements, and the limit that a rank must reach.

    Attributes:
        speed: Share of the median of all ranks that each must reach, in computing and in sending.
        matrix: Side of the matrices that are multiplied.
        message_bytes: Size of the all-reduce and of the messages between nodes.
        repeats: Number of measurements, of which the fastest counts.
        seconds: Time to keep multiplying, so that the GPU gets hot; then the last quarter counts.
        links: Also measure the links between neighboring nodes.
    """

    speed: float
    matrix: int
    message_bytes: int
    repeats: int
    seconds: float
    links: bool

    @staticmethod
    def of(device: str, *, deep: bool = False) -> 'CollectiveLimits':
        """Return the limits for cpu or cuda; ranks on CPUs share cores, so they may differ more."""
        speed, matrix, message, heat = (0.9, 8192, 2**28, 120.0) if device == 'cuda' else (0.25, 512, 2**22, 2.0)
        return CollectiveLimits(speed, matrix, message, 100 if deep else 5, heat if deep else 0.0, links=deep)


@dataclass(frozen=True)
class RankMeasurements:
    """The measurements of one rank."""

    rank: int
    host: str
    clock: float
    versions: tuple[str, ...]
    teraflops: float
    product: int
    """Checksum of a matrix product that is the same everywhere; -1 if it varied."""
    sum_is_right: bool
    bus: float
    """Bus bandwidth of an all-reduce over all n ranks in bytes/s: 2 (n - 1) / n times message size over time."""
    node_bus: float | None = None
    """The same over the ranks of its node; None if that is one rank or all of them."""
    link: float | None = None
    """Bytes/s to a neighboring node and back: the faster of two, because a slow node slows down both neighbors."""


def check_ranks(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> list[Finding]:
    """Measure all ranks and compare them; every rank returns the same findings.

    Args:
        device: cpu or cuda.
        limits: Sizes of the measurements, and the limits.
        group: Process group of all ranks, with a backend for the device.
    """
    rank, node = dist.get_rank(), int(os.environ['LOCAL_WORLD_SIZE'])
    teraflops, product = measure_matmul(device, limits)
    right, bus = measure_all_reduce(device, limits, group)
    node_bus = _node_bandwidth(device, limits, node) if 1 < node < dist.get_world_size() else None
    link = _neighbor_bandwidth(device, limits, node, group) if limits.links and node < dist.get_world_size() else None
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
    return compare_ranks(everyone, limits)


def compare_ranks(everyone: Sequence[RankMeasurements], limits: CollectiveLimits) -> list[Finding]:
    """Compare the measurements of all ranks, and name those that differ; one rank alone is only checked by itself."""
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


def measure_matmul(device: str, limits: CollectiveLimits) -> tuple[float, int]:
    """Measure TFLOP/s of a matrix product, and return it with the checksum of the product, -1 if that varied.

    The entries are small whole numbers, so that every order of summation gives the same result.
    """
    side, generator = limits.matrix, torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if device == 'cuda' else torch.float32
    left, right = (torch.randint(-2, 3, (side, side), generator=generator).to(device, kind) for _ in range(2))
    # Processes share a CPU, so only the CPU time of this process measures the speed.
    clock = time.perf_counter if device == 'cuda' else time.process_time
    seconds, checksums, until = [], set(), time.monotonic() + limits.seconds
    while len(seconds) <= limits.repeats or time.monotonic() < until:
        _wait(device)
        begin = clock()
        product = left @ right
        _wait(device)
        seconds.append(clock() - begin)
        if len(seconds) % 50 == 1:
            # bfloat16 rounds the sums, in the same way on every GPU of a kind.
            checksums.add(int(product.double().abs().sum().item()))
    # The last quarter is measured on a hot GPU, if there was time for that.
    usual = statistics.median(seconds[-len(seconds) // 4 :]) if limits.seconds else min(seconds[1:])
    return 2 * side**3 / usual / 1e12, checksums.pop() if len(checksums) == 1 else -1


def measure_all_reduce(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> tuple[bool, float]:
    """Run all-reduces over a group; return True if all sums were right, and the bus bandwidth in bytes/s."""
    members = dist.get_process_group_ranks(group)
    seconds, right = [], True
    for _ in range(1 + limits.repeats):
        message = torch.full((limits.message_bytes // 4,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # makes all ranks start at once
        _wait(device)
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        right = right and bool((message == sum(members) + len(members)).all().item())
    return right, 2 * (len(members) - 1) / len(members) * limits.message_bytes / min(seconds[1:])


def _node_bandwidth(device: str, limits: CollectiveLimits, processes: int) -> float:
    backend = 'nccl' if device == 'cuda' else 'gloo'
    own, _ = dist.new_subgroups(processes, timeout=TIMEOUT, backend=backend)
    assert own is not None
    return measure_all_reduce(device, limits, own)[1]


def _neighbor_bandwidth(device: str, limits: CollectiveLimits, processes: int, group: dist.ProcessGroup) -> float:
    """Return bytes/s to the same local rank of the node before or after this one, whichever is faster."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    node, found = rank // processes, []
    for first in (0, 1):  # first even nodes with the next node, then odd ones
        partner = rank + processes if node % 2 == first else rank - processes
        dist.barrier()
        if 0 <= partner < ranks:
            found.append(_exchange_bandwidth(device, limits, partner, group))
    return max(found)


def _exchange_bandwidth(device: str, limits: CollectiveLimits, partner: int, group: dist.ProcessGroup) -> float:
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
    """Return the versions that must be the same on all ranks."""
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
    """Find the ranks that fall behind the median of a measurement; empty if no rank has made it."""
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
