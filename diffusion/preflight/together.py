"""What only all processes together can find out: who is slow, who computes wrongly, whether they hear each other."""

import datetime
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from diffusion.exits import CONFIG_ERROR
from diffusion.preflight.findings import Finding

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'diffusion')
TIMEOUT = datetime.timedelta(seconds=60)
SKEW_SECONDS = 5.0
"""Between two clocks; signatures of requests to object stores allow minutes, and logs should be in order."""


@dataclass(frozen=True)
class Limits:
    """What is still fit.

    Attributes:
        speed: Share of the median speed of all processes that each must reach.
        matrix: Side of the matrices that are multiplied.
        message_bytes: That are summed over all processes.
        repeats: Of each, of which the fastest counts.
    """

    speed: float
    matrix: int
    message_bytes: int
    repeats: int

    @staticmethod
    def of(device: str, *, deep: bool = False) -> 'Limits':
        """Processes on CPUs share cores with others, GPUs are alone; deep takes minutes, in which a GPU gets hot."""
        repeats = 500 if deep else 5
        return Limits(0.9, 8192, 2**28, repeats) if device == 'cuda' else Limits(0.4, 512, 2**22, repeats)


@dataclass(frozen=True)
class Measured:
    """What a process knows of itself."""

    rank: int
    host: str
    clock: float
    versions: tuple[str, ...]
    teraflops: float
    product: int
    """Of matrices that are the same everywhere: a checksum."""
    sum_is_right: bool
    bytes_per_second: float


def check_together(device: str, limits: Limits) -> list[Finding]:
    """All checks of a job's processes, whose process group is there; every process gets the same findings."""
    teraflops, product = multiply(device, limits)
    right, speed = add_up(device, limits)
    dist.barrier()
    own = Measured(dist.get_rank(), socket.gethostname(), time.time(), versions(), teraflops, product, right, speed)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return judge(everyone, limits)


def judge(everyone: Sequence[Measured], limits: Limits) -> list[Finding]:
    """What is wrong with whom."""
    return [
        *_same_versions(everyone),
        *_clocks(everyone),
        *_speeds(everyone, limits.speed),
        *_products(everyone),
        *_sums(everyone),
    ]


def multiply(device: str, limits: Limits) -> tuple[float, int]:
    """TFLOP/s of a product of matrices, and a checksum of it.

    The numbers are small whole ones, so that every order of sums gives the same.
    """
    side, generator = limits.matrix, torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if device == 'cuda' else torch.float32
    left, right = (torch.randint(-2, 3, (side, side), generator=generator).to(device, kind) for _ in range(2))
    seconds = []
    for _ in range(1 + limits.repeats):
        _wait(device)
        begin = time.perf_counter()
        product = left @ right
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    # bfloat16 rounds the sums, alike on every GPU of a kind.
    return 2 * side**3 / min(seconds[1:]) / 1e12, int(product.double().abs().sum().item())


def add_up(device: str, limits: Limits) -> tuple[bool, float]:
    """Whether a sum over all processes is right, and bytes/s on the bus, 2 (n - 1) / n of those that are summed."""
    ranks, size = dist.get_world_size(), limits.message_bytes
    seconds, right = [], True
    for _ in range(1 + limits.repeats):
        message = torch.full((size // 4,), float(dist.get_rank() + 1), device=device)
        dist.barrier()
        _wait(device)
        begin = time.perf_counter()
        dist.all_reduce(message)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
        right = right and bool((message == ranks * (ranks + 1) / 2).all().item())
    return right, 2 * (ranks - 1) / ranks * size / min(seconds[1:])


def versions() -> tuple[str, ...]:
    """Of what must be the same everywhere."""
    return (f'Python {platform.python_version()}', *(f'{name} {version(name)}' for name in PACKAGES))


def _wait(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()


def _where(each: Measured) -> str:
    return f'{each.host} rank {each.rank}'


def _same_versions(everyone: Sequence[Measured]) -> list[Finding]:
    usual, _ = Counter(each.versions for each in everyone).most_common(1)[0]
    found = []
    for each in everyone:
        others = [f'{own}, elsewhere {other}' for own, other in zip(each.versions, usual, strict=True) if own != other]
        if others:
            what = f'{"; ".join(others)}: use one image everywhere'
            found.append(Finding('versions', False, what, CONFIG_ERROR, _where(each)))
    return found or [Finding('versions', True, ', '.join(usual))]


def _clocks(everyone: Sequence[Measured]) -> list[Finding]:
    middle = statistics.median(each.clock for each in everyone)
    wrong = [each for each in everyone if abs(each.clock - middle) > SKEW_SECONDS]
    found = [
        Finding('clock', False, f'{each.clock - middle:+.0f} s off the others; start its NTP', where=_where(each))
        for each in wrong
    ]
    spread = max(each.clock for each in everyone) - min(each.clock for each in everyone)
    return found or [Finding('clock', True, f'within {spread:.2f} s')]


def _speeds(everyone: Sequence[Measured], share: float) -> list[Finding]:
    middle = statistics.median(each.teraflops for each in everyone)
    slow = [each for each in everyone if each.teraflops < share * middle]
    found = [
        Finding(
            'speed', False, f'{each.teraflops:.3g} TFLOP/s, the median is {middle:.3g}; is it hot?', where=_where(each)
        )
        for each in slow
    ]
    return found or [Finding('speed', True, f'{middle:.3g} TFLOP/s, all within {share:.0%}')]


def _products(everyone: Sequence[Measured]) -> list[Finding]:
    usual, _ = Counter(each.product for each in everyone).most_common(1)[0]
    wrong = [each for each in everyone if each.product != usual]
    what = 'a product differs from that of the others: it computes wrongly'
    return [Finding('results', False, what, where=_where(each)) for each in wrong] or [
        Finding('results', True, 'the same on all')
    ]


def _sums(everyone: Sequence[Measured]) -> list[Finding]:
    wrong = [each for each in everyone if not each.sum_is_right]
    slowest = min(each.bytes_per_second for each in everyone)
    return [Finding('all-reduce', False, 'gave a wrong sum', where=_where(each)) for each in wrong] or [
        Finding('all-reduce', True, f'right, {slowest / 1e9:.3g} GB/s on the bus')
    ]
