"""Search for settings with which a recipe trains faster: microbatch, parallelism strategy and CUDA graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from diffusion.config.checks import check_recipe
from diffusion.config.recipe import MAX_GRAPH_SHAPES, Recipe
from diffusion.planning.memory import largest_microbatch
from diffusion.planning.strategy_advice import Fit, changed_parallelism, recommended
from diffusion.planning.throughput import Assumptions, planned_speed
from diffusion.planning.workload import Phase

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
    """Yield the phase with each strategy's largest microbatch: CUDA graphs as in the recipe and, if possible, on."""
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
