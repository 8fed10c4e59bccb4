"""Checkpoint size, optimal checkpoint interval, and goodput under failures.

The interval is Young's approximation (1974), sqrt(2 x stall x MTBF); goodput follows Daly's complete model (2006).
"""

import math
from dataclasses import dataclass

from diffusion.config.recipe import Recipe
from diffusion.planning.memory import averages_of, optimizer_elements
from diffusion.planning.model_costs import FLOAT32, ModelCosts
from diffusion.planning.workload import Phase

LLAMA3_HOURS_BETWEEN_FAILURES = 54 * 24 / 419
LLAMA3_GPUS = 16_384
"""Number of GPUs on which 419 unexpected interruptions in 54 days were reported (Llama 3, 2024)."""
WRITE_BYTES_PER_SECOND = 0.2e9
"""Write speed of one node to a shared file system: 1.6 GB took 8 s on two slow cores, hashing included."""
RESTART_SECONDS = 600.0
"""Time from a failure to the next batch: detection, node replacement, start-up, loading. An assumption."""


@dataclass(frozen=True)
class Sizes:
    """Size of a checkpoint in bytes, without and with optimizer states and averaged weights."""

    weights: int
    """Trained weights alone."""
    with_optimizer: int
    """Trained weights and optimizer states."""
    with_averages: int
    """Trained weights, optimizer states and averaged weights (EMA)."""


@dataclass(frozen=True)
class Resilience:
    """Optimal save interval of a training phase, and its goodput after the time lost to saves and failures."""

    mtbf_hours: float
    """Mean time between failures of the whole cluster."""
    stall_seconds: float
    """Time that a save blocks training."""
    restart_seconds: float
    """Time from a failure to the next batch."""
    interval_seconds: float
    """Optimal save interval (Young 1974)."""
    goodput: float
    """Fraction of wall-clock time spent training, at the optimal interval."""
    interval_batches: int
    """Optimal save interval in batches."""
    recipe_interval_seconds: float | None
    """The recipe's trainer.save_interval; None if it is not in batches."""
    recipe_goodput: float | None
    """Goodput at the recipe's interval."""


def sizes_of(recipe: Recipe, model: ModelCosts, *, auxiliary: int = 0) -> Sizes:
    """Return the size of the last checkpoint of a run: float32 weights, optimizer states, weight averages.

    Args:
        recipe: The recipe.
        model: Its model.
        auxiliary: Number of trained parameters beside the model's, such as those of representation alignment's MLP.
    """
    trained = model.trained_parameters + auxiliary
    # A checkpoint of a LoRA has the frozen weights too.
    weights = FLOAT32 * (trained + model.frozen_denoiser_parameters)
    with_optimizer = weights + FLOAT32 * optimizer_elements(recipe, model, auxiliary=auxiliary)
    return Sizes(weights, with_optimizer, with_optimizer + averages_of(recipe) * FLOAT32 * trained)


def default_mtbf_hours(gpus: int) -> float:
    """Return the mean hours between failures of a cluster, at the failure rate per GPU reported for Llama 3."""
    return LLAMA3_HOURS_BETWEEN_FAILURES * LLAMA3_GPUS / gpus


def default_stall_seconds(phase: Phase, *, nodes: int) -> float:
    """Return the seconds that a save blocks training, with one writer per node if checkpoints are sharded, else one."""
    writers = nodes if phase.recipe.parallelism.checkpoints == 'sharded' else 1
    sizes = sizes_of(phase.recipe, phase.model, auxiliary=phase.auxiliary_parameters)
    return sizes.with_averages / (writers * WRITE_BYTES_PER_SECOND)


def young_interval(*, stall: float, mtbf: float) -> float:
    """Return the save interval that loses the least time (Young 1974, first order), in the unit of the arguments."""
    return math.sqrt(2 * stall * mtbf)


def goodput(*, interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Return the fraction of wall-clock time spent training if failures are a Poisson process (Daly 2006, equation 20).

    On average, training for `interval` and one save take mtbf e^(restart / mtbf) (e^((interval + stall) / mtbf) - 1).
    All arguments have the same unit of time.
    """
    segment = (interval + stall) / mtbf
    # 1 / (e^x - 1) is computed as e^-x / (1 - e^-x), which does not overflow for long intervals.
    return interval / mtbf * math.exp(-restart / mtbf - segment) / -math.expm1(-segment)


def resilience_of(
    phase: Phase,
    *,
    images_per_second: float,
    nodes: int,
    mtbf_hours: float,
    stall_seconds: float | None = None,
    restart_seconds: float = RESTART_SECONDS,
) -> Resilience:
    """Return the optimal save interval of a training phase, and the goodput at that interval and at the recipe's.

    Args:
        phase: The recipe and its amount of work.
        images_per_second: Throughput of all GPUs together.
        nodes: Number of nodes.
        mtbf_hours: Mean time between failures of the whole cluster.
        stall_seconds: Time that a save blocks training (default: derived from the checkpoint size).
        restart_seconds: Time from a failure to the next batch.
    """
    stall = default_stall_seconds(phase, nodes=nodes) if stall_seconds is None else stall_seconds
    mtbf, batch_seconds = mtbf_hours * 3600, phase.recipe.global_batch / images_per_second
    # At least one batch, and at most the whole run, whose end is always saved.
    interval = min(max(young_interval(stall=stall, mtbf=mtbf), batch_seconds), phase.batches * batch_seconds)
    save_interval = str(phase.recipe.trainer.get('save_interval', '1ep'))
    in_batches = save_interval.endswith('ba') and save_interval[:-2].isdigit()
    recipe_interval = int(save_interval[:-2]) * batch_seconds if in_batches else None
    return Resilience(
        mtbf_hours=mtbf_hours,
        stall_seconds=stall,
        restart_seconds=restart_seconds,
        interval_seconds=interval,
        goodput=goodput(interval=interval, stall=stall, restart=restart_seconds, mtbf=mtbf),
        interval_batches=max(1, round(interval / batch_seconds)),
        recipe_interval_seconds=recipe_interval,
        recipe_goodput=None
        if not recipe_interval
        else goodput(interval=recipe_interval, stall=stall, restart=restart_seconds, mtbf=mtbf),
    )
