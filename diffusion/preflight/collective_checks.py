"""Cross-rank preflight checks: versions, clock skew, matmul throughput and results, all-reduce results, bandwidth."""

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

import diffusion
from diffusion.exit_codes import CONFIG_ERROR
from diffusion.launch.gpu_health import Finding
from diffusion.runs import environment

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers')
TIMEOUT = datetime.timedelta(minutes=2)
"""Timeout of an all-reduce, after which NCCL aborts the process. The first all-reduce also sets up the connections."""
SKEW_SECONDS = 5.0
"""Maximum clock skew. Signed requests to object stores tolerate minutes, but logs of nodes should be in order."""


@dataclass(frozen=True)
class CollectiveLimits:
    """Sizes of the cross-rank measurements, and the relative throughput that each rank must reach.

    Attributes:
        speed: FLOP/s and bandwidth that each rank must reach, as a fraction of the median over all ranks.
        matrix: Side of the matrices that are multiplied.
        message_bytes: Size of the messages in all-reduces and between nodes.
        repeats: Number of measurements per check; the fastest one counts.
        seconds: Minimum duration of the matmuls, for the GPU to warm up (the last quarter is measured); 0: no minimum.
        links: True to measure the links between neighboring nodes.
    """

    speed: float
    matrix: int
    message_bytes: int
    repeats: int
    seconds: float
    links: bool

    @staticmethod
    def of(device: str, *, deep: bool = False) -> 'CollectiveLimits':
        """Return the sizes and limits for `cpu` or `cuda`; `deep` measures longer and includes links between nodes."""
        # Limits are relative to the median, because absolute bandwidths depend on the fabric. Ranks on CPUs share
        # cores, so their throughput varies more.
        speed, matrix, message, warmup = (0.9, 8192, 2**28, 120.0) if device == 'cuda' else (0.25, 512, 2**22, 2.0)
        return CollectiveLimits(speed, matrix, message, 100 if deep else 5, warmup if deep else 0.0, links=deep)


@dataclass(frozen=True)
class RankMeasurements:
    """Preflight measurements of one rank, to compare with those of all other ranks."""

    rank: int
    host: str
    clock: float
    """Unix time immediately after a barrier."""
    versions: tuple[str, ...]
    teraflops: float
    """Matmul throughput in 10**12 FLOP/s."""
    product: int
    """Checksum of a matrix product, which must be equal on all ranks; -1 if repetitions on this rank differ."""
    sum_is_right: bool
    bus: float
    """Bus bandwidth of an all-reduce over all n ranks in bytes/s: 2 (n - 1) / n x message size / time."""
    node_bus: float | None = None
    """Bus bandwidth of an all-reduce over this node's ranks; None with one rank per node or a single node."""
    link: float | None = None
    """Bandwidth in bytes/s to the previous or next node, whichever is higher; None if not measured."""


def check_ranks(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> list[Finding]:
    """Compare speed, bandwidth, versions and clocks of all ranks; all ranks return the same findings."""
    rank, node_size = dist.get_rank(), int(os.environ['LOCAL_WORLD_SIZE'])
    world_size = dist.get_world_size()
    teraflops, product = measure_matmul(device, limits)
    sum_is_right, bus = measure_all_reduce(device, limits, group)
    node_bus = _node_bandwidth(device, limits, node_size) if 1 < node_size < world_size else None
    link = _neighbor_bandwidth(device, limits, node_size, group) if limits.links and node_size < world_size else None
    # Ranks leave a barrier within milliseconds of each other, so a difference of seconds is due to their clocks.
    dist.barrier()
    clock = time.time()
    host = environment.machine_name(os.environ)
    measurements = RankMeasurements(
        rank, host, clock, versions(device), teraflops, product, sum_is_right, bus, node_bus, link
    )
    return compare_ranks(gather(measurements), limits)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks in rank order; a collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def compare_ranks(ranks: Sequence[RankMeasurements], limits: CollectiveLimits) -> list[Finding]:
    """Compare the measurements of all ranks. Each check gives a finding per failed rank, or one finding if all pass.

    With a single rank, only its repeated matrix products are compared.
    """
    if len(ranks) == 1:
        speed = Finding('speed', True, f'{ranks[0].teraflops:.3g} TFLOP/s, single process: no other rank to compare')
        return [*_check_versions(ranks), *_check_products(ranks), speed]
    return [
        *_check_versions(ranks),
        *_check_clocks(ranks),
        *_check_products(ranks),
        *_check_sums(ranks),
        *_check_speed('speed', ranks, [each.teraflops for each in ranks], 'TFLOP/s', limits),
        *_check_speed('node bus', ranks, [_giga(each.node_bus) for each in ranks], 'GB/s within the node', limits),
        *_check_speed('link', ranks, [_giga(each.link) for each in ranks], 'GB/s to neighboring nodes', limits),
    ]


def measure_matmul(device: str, limits: CollectiveLimits) -> tuple[float, int]:
    """Return the TFLOP/s of a matrix product, and its checksum: equal on healthy ranks, -1 if repetitions differ."""
    side, generator = limits.matrix, torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == 'cuda' else torch.float32
    # The entries are integers in [-2, 2], so partial sums are at most 4 x 8192 = 2**15 and exact in float32
    # accumulators. The order of summation, which differs between kernels, does not matter: any difference is a hardware
    # fault.
    left, right = (torch.randint(-2, 3, (side, side), generator=generator).to(device, dtype) for _ in range(2))
    # Ranks on CPUs share cores, so measure CPU time instead of wall-clock time.
    clock = time.perf_counter if device == 'cuda' else time.process_time
    seconds, checksums, until = [], set(), time.monotonic() + limits.seconds
    while len(seconds) <= limits.repeats or time.monotonic() < until:
        _wait(device)
        begin = clock()
        product = left @ right
        _wait(device)
        seconds.append(clock() - begin)
        # Check only every 50th product: the checksum converts it to float64, which interrupts the load. A fast check
        # has fewer than 50 products and checks only the first.
        if len(seconds) % 50 == 1:
            # The product is rounded to bfloat16, identically on all GPUs of one model.
            checksums.add(int(product.double().abs().sum().item()))
    # A deep check uses the last quarter, when the GPU has its operating temperature. A fast check uses the fastest
    # product, except the first, which loads the kernel.
    usual = statistics.median(seconds[-len(seconds) // 4 :]) if limits.seconds else min(seconds[1:])
    return 2 * side**3 / usual / 1e12, checksums.pop() if len(checksums) == 1 else -1


def measure_all_reduce(device: str, limits: CollectiveLimits, group: dist.ProcessGroup) -> tuple[bool, float]:
    """Run all-reduces over a process group; return True if all sums were correct, and the bus bandwidth in bytes/s."""
    members = dist.get_process_group_ranks(group)
    seconds, sum_is_right = [], True
    for _ in range(1 + limits.repeats):
        message = torch.full((limits.message_bytes // 4,), float(dist.get_rank() + 1), device=device)
        # Align the ranks first, so that waiting for a late rank does not count as transfer time.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _wait(device)
        begin = time.perf_counter()
        dist.all_reduce(message, group=group)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        # Each rank sends its rank + 1, so the right sum is that of the ranks plus their number.
        sum_is_right = sum_is_right and bool((message == sum(members) + len(members)).all().item())
    # In a ring all-reduce, each of n ranks sends and receives 2 (n - 1) / n of the message, so the bus bandwidth (as in
    # nccl-tests) does not depend on n. Skip the first all-reduce, which sets up the connections.
    return sum_is_right, 2 * (len(members) - 1) / len(members) * limits.message_bytes / min(seconds[1:])


def _node_bandwidth(device: str, limits: CollectiveLimits, processes: int) -> float:
    """Return the bus bandwidth in bytes/s of an all-reduce over this node's ranks."""
    node_group, _ = dist.new_subgroups(processes, timeout=TIMEOUT, backend='nccl' if device == 'cuda' else 'gloo')
    assert node_group is not None
    return measure_all_reduce(device, limits, node_group)[1]


def _neighbor_bandwidth(device: str, limits: CollectiveLimits, processes: int, group: dist.ProcessGroup) -> float:
    """Return the bandwidth in bytes/s to the same local rank on the previous or next node, whichever is faster."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    node, bandwidths = rank // processes, []
    # Even nodes exchange with the next node, then odd nodes do, so that each link carries one exchange at a time. Each
    # node's faster exchange counts, so that only a slow node is reported, not its two neighbors.
    for first in (0, 1):
        partner = rank + processes if node % 2 == first else rank - processes
        dist.barrier()
        if 0 <= partner < ranks:
            bandwidths.append(_exchange_bandwidth(device, limits, partner, group))
    return max(bandwidths)


def _exchange_bandwidth(device: str, limits: CollectiveLimits, partner: int, group: dist.ProcessGroup) -> float:
    """Return the bandwidth in bytes/s of sending a message to a rank while receiving one from it."""
    sent = torch.zeros(limits.message_bytes // 4, device=device)
    received, seconds = torch.empty_like(sent), []
    for _ in range(1 + min(limits.repeats, 20)):
        _wait(device)
        begin = time.perf_counter()
        sending = dist.P2POp(dist.isend, sent, partner, group)
        receiving = dist.P2POp(dist.irecv, received, partner, group)
        # Send and receive in one batch: with NCCL, two ranks that both send first would deadlock.
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return limits.message_bytes / min(seconds[1:])


def versions(device: str) -> tuple[str, ...]:
    """Return what must be equal on all ranks: versions of Python, packages, CUDA and NCCL, and the GPU's name."""
    packages = (f'{name} {version(name)}' for name in PACKAGES)
    found = (f'Python {platform.python_version()}', *packages, f'diffusion {diffusion.__version__}')
    if device == 'cpu':
        return found
    release = '.'.join(map(str, nccl.version()))
    return (*found, f'CUDA {cuda}', f'NCCL {release}', torch.cuda.get_device_name())


def _wait(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()


def _where(each: RankMeasurements) -> str:
    return f'{each.host} rank {each.rank}'


def _check_versions(ranks: Sequence[RankMeasurements]) -> list[Finding]:
    usual, _ = Counter(each.versions for each in ranks).most_common(1)[0]
    findings = []
    for each in ranks:
        differences = [f'{a}, on most ranks {b}' for a, b in zip(each.versions, usual, strict=True) if a != b]
        if differences:
            detail = f'{"; ".join(differences)}: use the same container image on all nodes'
            findings.append(Finding('versions', False, detail, CONFIG_ERROR, _where(each)))
    return findings or [Finding('versions', True, ', '.join(usual))]


def _check_clocks(ranks: Sequence[RankMeasurements]) -> list[Finding]:
    median = statistics.median(each.clock for each in ranks)
    findings = [
        Finding('clock', False, f'{each.clock - median:+.0f} s from the median; start NTP', where=_where(each))
        for each in ranks
        if abs(each.clock - median) > SKEW_SECONDS
    ]
    spread = max(each.clock for each in ranks) - min(each.clock for each in ranks)
    return findings or [Finding('clock', True, f'within {spread:.2f} s')]


def _check_speed(
    check: str, ranks: Sequence[RankMeasurements], figures: Sequence[float | None], unit: str, limits: CollectiveLimits
) -> list[Finding]:
    """Return a failed finding per rank below the required fraction of the median, or one passed; [] if unmeasured."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return []
    median = statistics.median(known)
    return [
        Finding(check, False, f'{figure:.3g} {unit}, median {median:.3g}', where=_where(each))
        for each, figure in zip(ranks, figures, strict=True)
        if figure is not None and figure < limits.speed * median
    ] or [Finding(check, True, f'{median:.3g} {unit}, all ranks at {limits.speed:.0%} or more')]


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _check_products(ranks: Sequence[RankMeasurements]) -> list[Finding]:
    """Return a failed finding per rank with a varying or different matrix product, or one passed if all agree."""
    # The most common product counts as right: if one of two ranks has a wrong result, either may be reported.
    repeatable = Counter(each.product for each in ranks if each.product >= 0)
    usual = repeatable.most_common(1)[0][0] if repeatable else -1
    findings = []
    for each in ranks:
        if each.product < 0 or each.product != usual:
            reference = 'between repetitions' if each.product < 0 else 'from that of other ranks'
            detail = f'matrix product differs {reference}: silent data corruption'
            findings.append(Finding('results', False, detail, where=_where(each)))
    return findings or [Finding('results', True, 'matrix products are equal on all ranks and repetitions')]


def _check_sums(ranks: Sequence[RankMeasurements]) -> list[Finding]:
    wrong = [each for each in ranks if not each.sum_is_right]
    slowest = min(each.bus for each in ranks)
    return [Finding('all-reduce', False, 'returned a wrong sum', where=_where(each)) for each in wrong] or [
        Finding('all-reduce', True, f'correct, bus bandwidth {slowest / 1e9:.3g} GB/s')
    ]
