"""Device-hours and dollars of a run so far and to its end, from its attempts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffusion.launch.attempts import Attempt
from diffusion.planning.gpus import GPU, load_gpus

HOUR = 3600
CPU = 'cpu'
_MEMORY_TOLERANCE = 0.12
"""Relative difference between the nominal memory in a product name, such as 80GB, and that of the driver, 79.1 GiB."""


@dataclass
class RunCost:
    """Device-hours and price of a run, so far and to come.

    Attributes:
        devices: Number of devices of the last attempt, or None if it is unknown.
        gpu: Model of its GPUs, `cpu` if it has none, or empty if it is unknown.
        device_hours: Device-hours of all attempts, or None if a number of devices is unknown.
        hours_left: Hours of training left, or None if unknown.
        device_hours_left: Device-hours of training left, or None if unknown.
        price: US dollars per device-hour, or None.
        price_source: Source of the price.
    """

    devices: int | None = None
    gpu: str = ''
    device_hours: float | None = None
    hours_left: float | None = None
    device_hours_left: float | None = None
    price: float | None = None
    price_source: str = ''


def run_cost(
    attempts: Sequence[Attempt],
    *,
    world_sizes: Iterable[int],
    hours_left: float | None,
    price: float | None,
) -> RunCost:
    """Return the cost of a run.

    Args:
        world_sizes: Numbers of devices in the receipts of its checkpoints, newest first, for attempts without one.
        hours_left: Hours of training left, or None if unknown.
        price: US dollars per device-hour; None for the price of its GPUs in planning/gpus.yaml.
    """
    assumed = next(iter(world_sizes), None)
    devices = [each.devices or assumed for each in attempts]
    last = devices[-1] if devices else assumed
    known = [(each.end - each.begin) * count for each, count in zip(attempts, devices, strict=True) if count]
    cost = RunCost(
        last,
        next((each.gpu for each in reversed(attempts) if each.gpu), ''),
        sum(known) / HOUR if attempts and len(known) == len(attempts) else None,
        hours_left,
        None if hours_left is None or last is None else hours_left * last,
        price,
        '' if price is None else '--price',
    )
    if price is None and cost.gpu not in ('', CPU):
        gpu = gpu_of_product(cost.gpu, load_gpus())
        if gpu is not None and gpu.price_usd_per_hour is not None:
            cost.price, cost.price_source = gpu.price_usd_per_hour, f'{gpu.name}, {gpu.source}'
    return cost


def gpu_of_product(product: str, gpus: Mapping[str, GPU]) -> GPU | None:
    """Return the GPU model of a driver's product name, such as `NVIDIA H100 80GB HBM3`, or None if none fits.

    Args:
        product: Name of the product, or of a GPU model.
    """
    words = _words(product)
    if product.lower() in gpus:
        return gpus[product.lower()]
    memory = [int(word[:-2]) for word in words if re.fullmatch(r'\d+gb', word)]
    fitting = []
    for name, gpu in gpus.items():
        # The first words are the family: `a100`, or `rtx` and `4090`. The form of the board follows, such as `pcie`.
        parts = _words(name)
        family = [part for part in parts if not re.fullmatch(r'\d+gb|sxm|pcie', part)]
        if not {*family} <= {*words}:
            continue
        if memory and abs(memory[0] - gpu.memory_gib) > _MEMORY_TOLERANCE * memory[0]:
            continue
        if ('pcie' in words and 'sxm' in parts) or ('pcie' in parts and 'pcie' not in words):
            continue
        fitting.append(gpu)
    return fitting[0] if len(fitting) == 1 else None


def _words(text: str) -> list[str]:
    return re.findall(r'[a-z0-9]+', re.sub(r'sxm\d', 'sxm', text.lower()))
