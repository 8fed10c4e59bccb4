"""Checkpoint size, checkpoint interval, and goodput under failures.

The interval is Young's (1974), sqrt(2 x stall x MTBF); what remains is Daly's complete model (2006).
"""

import math
from dataclasses import dataclass

from diffusion.config.recipe import Recipe
from diffusion.planning.memory import averages_of
from diffusion.planning.model_costs import FLOAT32, ModelCosts
from diffusion.planning.workload import Phase

LLAMA3_HOURS_BETWEEN_FAILURES = 54 * 24 / 419
LLAMA3_GPUS = 16_384
"""419 unexpected interruptions in 54 days (Llama 3, 2024); the default MTBF scales with the number of GPUs."""
WRITE_BYTES_PER_SECOND = 0.2e9
"""Speed of one writer to a shared file system: 1.6 GB took 8 s on two slow cores, hashing included."""
RESTART_SECONDS = 600.0
"""Time from a failure to the next batch: detection, another node, start-up, reading the checkpoint. An assumption."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a checkpoint."""

    weights: int
    with_optimizer: int
    with_averages: int


@dataclass(frozen=True)
class Resilience:
    """Cost of saves and failures."""

    mtbf_hours: float
    stall_seconds: float
    restart_seconds: float
    interval_seconds: float
    """Young's interval."""
    goodput: float
    """Share of the time that is training, at that interval."""
    interval_batches: int
    recipe_interval_seconds: float | None
    """trainer.save_interval, if it is given in batches."""
    recipe_goodput: float | None


def sizes_of(recipe: Recipe, model: ModelCosts) -> Sizes:
    """Trained parameters in float32, two numbers of the optimizer each, and the averages at the run's end."""
    weights = FLOAT32 * model.trained_parameters
    return Sizes(weights, 3 * weights, (3 + averages_of(recipe)) * weights)


def default_mtbf_hours(gpus: int) -> float:
    """Mean hours between unexpected interruptions of a run on this many GPUs."""
    return LLAMA3_HOURS_BETWEEN_FAILURES * LLAMA3_GPUS / gpus


def default_stall_seconds(phase: Phase, *, nodes: int) -> float:
    """Seconds that a save stops training: whole checkpoints have one writer, sharded ones have one per node."""
    writers = nodes if phase.recipe.parallelism.checkpoints == 'sharded' else 1
    return sizes_of(phase.recipe, phase.model).with_averages / (writers * WRITE_BYTES_PER_SECOND)


def young_interval(*, stall: float, mtbf: float) -> float:
    """The save interval that loses the least time, to first order; in the unit of its arguments."""
    return math.sqrt(2 * stall * mtbf)


def goodput(*, interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Share of the wall-clock time that is training (Daly 2006, equation 20), failures coming at random.

    A segment of `interval` and a save takes mtbf e^(restart / mtbf) (e^((interval + stall) / mtbf) - 1) on average. All
    four in one unit.
    """
    segment = (interval + stall) / mtbf
    # 1 / (e^x - 1) = e^-x / (1 - e^-x), which does not overflow.
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
    """The best save interval, and the goodput at it."""
    stall = default_stall_seconds(phase, nodes=nodes) if stall_seconds is None else stall_seconds
    mtbf, batch_seconds = mtbf_hours * 3600, phase.recipe.global_batch / images_per_second
    # Not before a batch is done, and not after the run is: its end is always saved.
    interval = min(max(young_interval(stall=stall, mtbf=mtbf), batch_seconds), phase.batches * batch_seconds)
    written = str(phase.recipe.trainer.get('save_interval', '1ep'))
    own = int(written[:-2]) * batch_seconds if written.endswith('ba') and written[:-2].isdigit() else None
    return Resilience(
        mtbf_hours=mtbf_hours,
        stall_seconds=stall,
        restart_seconds=restart_seconds,
        interval_seconds=interval,
        goodput=goodput(interval=interval, stall=stall, restart=restart_seconds, mtbf=mtbf),
        interval_batches=max(1, round(interval / batch_seconds)),
        recipe_interval_seconds=own,
        recipe_goodput=None if not own else goodput(interval=own, stall=stall, restart=restart_seconds, mtbf=mtbf),
    )
