"""Communication volume of parallelism strategies, the recommended strategy, and faster settings for a recipe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from diffusion.config.checks import check_recipe
from diffusion.config.recipe import MAX_GRAPH_SHAPES, ParallelismConfig, Recipe
from diffusion.planning.gpus import GPU
from diffusion.planning.memory import FLOAT32, GIB, HALF, Memory, Setup, largest_microbatch
from diffusion.planning.throughput import Assumptions, planned_speed
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
    """Return the fitting strategy with the least host time (ties: least communication); None if none fits.

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
    else:  # on several devices, ddp is among the strategies, and recommended wherever it fits
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


WORTH_CHANGING = 0.05
"""Minimum fraction of time that suggested settings must save: throughput cannot be estimated more accurately."""
EQUALLY_FAST = 0.01


def faster_phase(phase: Phase, fits: Sequence[Fit], given: Assumptions) -> Phase | None:
    """Return the phase with the fastest settings that fit in memory, or None if they save too little to suggest.

    If the recipe itself does not fit in memory, the fastest settings that do are returned. Among settings of the same
    speed, the recommended strategy and the fewest changes are preferred.

    Args:
        fits: Memory under each parallelism strategy, the recipe's own first.
    """
    candidates = list(_candidates(phase, fits, given))
    rates = [planned_speed(each, given).images_per_second for each in candidates]
    if not candidates:
        return None
    if fits[0].fits and planned_speed(phase, given).images_per_second > (1 - WORTH_CHANGING) * max(rates):
        return None
    fastest = [each for each, rate in zip(candidates, rates, strict=True) if rate >= (1 - EQUALLY_FAST) * max(rates)]
    best = recommended(fits)
    strategy = None if best is None else best.setup.parallelism.strategy
    return min(
        fastest,
        key=lambda each: (
            each.recipe.parallelism.strategy != strategy,
            len(changed_settings(phase.recipe, each.recipe)),
        ),
    )


def changed_settings(old: Recipe, new: Recipe) -> tuple[str, ...]:
    """Return the overrides that change the first recipe's microbatch, parallelism and CUDA graphs to the second's."""
    found = []
    if new.device_train_microbatch_size != old.device_train_microbatch_size:
        found.append(f'device_train_microbatch_size={new.device_train_microbatch_size}')
    found += changed_parallelism(old.parallelism, new.parallelism)
    if new.speed.cuda_graphs != old.speed.cuda_graphs:
        found.append(f'speed.cuda_graphs={str(new.speed.cuda_graphs).lower()}')
    return tuple(found)


def _candidates(phase: Phase, fits: Sequence[Fit], given: Assumptions) -> Iterator[Phase]:
    """Yield the phase with each strategy's largest microbatch; CUDA graphs as in the recipe and, if allowed, on."""
    mistakes = len(check_recipe(phase.recipe))
    for fit in fits:
        recipe = replace(phase.recipe, parallelism=fit.setup.parallelism)
        # CUDA graphs of a denoiser with a LoRA have not been tried.
        allows_graphs = fit.setup.parallelism.strategy == 'ddp' and phase.recipe.lora is None
        allows_graphs &= len(phase.shapes) <= MAX_GRAPH_SHAPES
        for graphs in {allows_graphs and recipe.speed.cuda_graphs, allows_graphs}:
            other = replace(phase, recipe=replace(recipe, speed=replace(recipe.speed, cuda_graphs=graphs)))
            largest = largest_microbatch(other, fit.setup, given.gpu)
            if largest and largest != fit.setup.microbatch:
                other = replace(other, recipe=replace(other.recipe, device_train_microbatch_size=largest))
            # Skip a strategy that makes other settings invalid, such as `parallelism.mixed_precision`.
            if largest and len(check_recipe(other.recipe)) <= mistakes:
                yield other
