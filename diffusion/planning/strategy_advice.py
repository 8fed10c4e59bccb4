"""Communication volume of each parallelism strategy, and the recommended strategy for a recipe on a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.config.recipe import ParallelismConfig
from diffusion.planning.gpus import GPU
from diffusion.planning.memory import FLOAT32, GIB, HALF, Memory, Setup
from diffusion.planning.workload import Phase

PARALLELISM_KEYS = ('strategy', 'reshard_after_forward', 'replicas', 'checkpoints')
"""Settings that may differ between the strategies that a plan compares."""


@dataclass(frozen=True)
class Fit:
    """Memory and communication per device under one parallelism strategy, and the largest microbatch that fits."""

    setup: Setup
    memory: Memory
    fits: bool
    largest_microbatch: int
    communication_bytes: int
    """Bytes that a device sends per batch."""


def communication_bytes(phase: Phase, setup: Setup) -> int:
    """Return the bytes that one device sends per batch for gradients and sharded weights with ring algorithms.

    In a ring of n devices, each device sends (n - 1) / n of a tensor in a gather or reduce-scatter, and twice that in
    an all-reduce.
    """
    settings, shards = setup.parallelism, setup.shards
    trained = phase.trained_parameters
    if settings.strategy == 'ddp':
        return round(2 * _ring(setup.devices) * FLOAT32 * trained)
    width = FLOAT32 if phase.autocast == 'fp32' else HALF
    gathered_width = FLOAT32 if settings.mixed_precision == 'full' else width
    reduced_width = width if settings.mixed_precision == 'pure' else FLOAT32
    share = max(setup.microbatch, phase.recipe.global_batch // setup.devices)
    microbatches = -(-share // setup.microbatch)
    reductions = 1 if phase.speed(settings.strategy).reduce_once else microbatches
    gathers = reductions  # in forward passes; weights stay gathered after a microbatch without reduction
    if settings.reshard_after_forward:
        gathers += microbatches  # in backward passes
    gathered = gathers * gathered_width * (trained + phase.model.frozen_denoiser_parameters)
    reduced = reductions * reduced_width * trained
    across = 2 * _ring(settings.replicas) * reductions * reduced_width * trained / shards
    return round(_ring(shards) * (gathered + reduced) + across)


def recommended(fits: Sequence[Fit]) -> Fit | None:
    """Return the strategy that fits with least host time (ties: least communication), or None if none fits.

    ddp needs less host time: it starts collectives without Python code, while FSDP2 runs Python hooks before and after
    each of its modules in every forward and backward pass.
    """
    fitting = [fit for fit in fits if fit.fits]
    return min(fitting, key=lambda fit: (fit.setup.label != 'ddp', fit.communication_bytes), default=None)


def advice(fits: Sequence[Fit], gpu: GPU) -> str | None:
    """Return which strategy is recommended and why, and the settings to change; None for one device or if none fits."""
    best = recommended(fits)
    if best is None or best.setup.devices == 1:
        return None
    settings = best.setup.parallelism
    text = (
        f'recommended strategy: {best.setup.label}, which fits in {best.memory.reserved / GIB:.1f} of '
        f'{gpu.memory_gib:.1f} GiB and sends {best.communication_bytes / 1e9:.1f} GB per GPU and batch'
    )
    if settings.strategy == 'ddp':
        text += ', and runs no hooks in Python during forward and backward pass'
    elif any(fit.setup.label == 'ddp' and not fit.fits for fit in fits):
        text += '; ddp does not fit'
    if best is fits[0]:
        return f"{text} (the recipe's)"
    changes = ' '.join(changed_parallelism(fits[0].setup.parallelism, settings))
    slower_saves = ' (written by rank 0 alone, so saves take longer)' if 'checkpoints=whole' in changes else ''
    return f'{text}; set {changes}{slower_saves}'


def changed_parallelism(old: ParallelismConfig, new: ParallelismConfig) -> list[str]:
    """Return the overrides that change a recipe's parallelism to `new`, such as parallelism.strategy=ddp."""
    pairs = {key: (getattr(old, key), getattr(new, key)) for key in PARALLELISM_KEYS}
    return [f'parallelism.{key}={str(value).lower()}' for key, (before, value) in pairs.items() if value != before]


def _ring(devices: int) -> float:
    return (devices - 1) / devices
