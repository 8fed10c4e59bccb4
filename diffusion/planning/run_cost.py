"""Wall-clock time, GPU-hours and cost of a phase."""

from dataclasses import dataclass

from diffusion.planning.gpus import GPU
from diffusion.planning.throughput import PRECOMPUTE_MFU, Speed
from diffusion.planning.workload import Encoding, Phase

HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """Wall-clock hours, GPU-hours and dollars of a training run or of precomputing."""

    hours: float
    """Wall-clock hours."""
    gpu_hours: float
    usd: float | None
    """US dollars; None if the price is unknown."""

    @property
    def days(self) -> float:
        return self.hours / 24

    def __add__(self, other: 'Cost') -> 'Cost':
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        return Cost(self.hours + other.hours, self.gpu_hours + other.gpu_hours, usd)

    def __mul__(self, factor: float) -> 'Cost':
        return Cost(self.hours * factor, self.gpu_hours * factor, None if self.usd is None else self.usd * factor)


def cost_of_hours(hours: float, *, gpus: int, price: float | None) -> Cost:
    """Return the cost of wall-clock hours on a number of GPUs, at a price in US dollars per GPU-hour."""
    gpu_hours = hours * gpus
    return Cost(hours, gpu_hours, None if price is None else gpu_hours * price)


def training_cost(phase: Phase, speed: Speed, *, gpus: int, price: float | None) -> Cost:
    """Return the cost of the training batches of a phase alone: no evaluation, no saves, no failures."""
    return cost_of_hours(phase.images / speed.images_per_second / HOUR, gpus=gpus, price=price)


def precompute_cost(phase: Phase, encoding: Encoding, gpu: GPU, *, gpus: int, price: float | None) -> Cost:
    """Return the cost of encoding every distinct image once before training.

    Args:
        encoding: Form in which the results are stored, which determines which encoders run.
        price: US dollars per GPU-hour; None if unknown.
    """
    flops = phase.distinct_images * phase.precompute_flops(encoding)
    peak = gpus * gpu.peak_flops('fp16')
    return cost_of_hours(flops / (PRECOMPUTE_MFU * peak) / HOUR, gpus=gpus, price=price)
