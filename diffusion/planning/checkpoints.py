"""A run's checkpoints: size, optimal interval, goodput under failures, storage, and host memory for snapshots.

Interval and goodput follow the complete model of Daly (2006). For stalls much shorter than the MTBF, the best interval
is Young's (1974): sqrt(2 x stall x MTBF).
"""

import math
from dataclasses import dataclass

from diffusion.config.checkpointing import AUTO, KeepConfig, keep_rules, seconds_of
from diffusion.config.recipe import Recipe
from diffusion.planning.memory import Setup, averages_of, optimizer_elements
from diffusion.planning.model_costs import FLOAT32, ModelCosts
from diffusion.planning.workload import Phase

LLAMA3_HOURS_BETWEEN_FAILURES = 54 * 24 / 419
LLAMA3_GPUS = 16_384
"""Number of GPUs in the training of Llama 3 (2024), for which 419 unexpected interruptions in 54 days were reported."""
WRITE_BYTES_PER_SECOND = 0.2e9
"""Assumed write speed of a node to shared storage: half the disk speed in `benchmarks/checkpoint_stall.py`."""
SHORTEST_SECONDS, LONGEST_SECONDS = 60.0, 3600.0
"""Bounds on the interval for `trainer.save_interval: auto`."""
MOST_TIME_SAVING = 0.05
"""Upper bound on the fraction of time spent in saves with `trainer.save_interval: auto`."""
PRIOR_HOURS = 24.0
"""Maximum weight of the failure rate assumed before a run: it counts as much as this many hours of training."""
RESTART_SECONDS = 600.0
"""Assumed time from a failure to the next batch: detection, node replacement, startup, loading."""
SHORT_RUN_SAVES = 10
"""A run counts as short if it takes less time than this number of saves."""


@dataclass(frozen=True)
class Sizes:
    """Cumulative size of a checkpoint in bytes: weights, then with optimizer states, then with weight averages too."""

    weights: int
    with_optimizer: int
    with_averages: int


@dataclass(frozen=True)
class Resilience:
    """Optimal save interval of a training phase; goodput at the optimal and the recipe's interval (None if unknown)."""

    mtbf_hours: float
    stall_seconds: float
    restart_seconds: float
    interval_seconds: float
    goodput: float
    """Fraction of wall-clock time spent on training, at the optimal interval."""
    interval_batches: int
    recipe_interval_seconds: float | None
    """The recipe's trainer.save_interval in seconds; None if it is neither in batches (50ba), a time (10m) nor auto."""
    recipe_goodput: float | None
    batch_seconds: float
    run_seconds: float

    @property
    def is_short(self) -> bool:
        """True if SHORT_RUN_SAVES saves take longer than the run, so that the run's goodput says little."""
        return self.run_seconds < SHORT_RUN_SAVES * self.stall_seconds


def sizes_of(recipe: Recipe, model: ModelCosts, *, auxiliary: int = 0) -> Sizes:
    """Return the size of the last checkpoint of a run: float32 weights, optimizer states, weight averages.

    Args:
        auxiliary: Number of trained parameters outside the model, such as those of representation alignment's MLP.
    """
    trained = model.trained_parameters + auxiliary
    # A checkpoint of LoRA training also contains the frozen weights.
    weights = FLOAT32 * (trained + model.frozen_denoiser_parameters)
    with_optimizer = weights + FLOAT32 * optimizer_elements(recipe.optimizer, model, auxiliary=auxiliary)
    return Sizes(weights, with_optimizer, with_optimizer + averages_of(recipe.algorithms) * FLOAT32 * trained)


def default_mtbf_hours(gpus: int) -> float:
    """Return a cluster's mean time between failures in hours, at the failure rate per GPU reported for Llama 3."""
    return LLAMA3_HOURS_BETWEEN_FAILURES * LLAMA3_GPUS / gpus


def default_stall_seconds(phase: Phase, *, nodes: int) -> float:
    """Return the seconds for which a save blocks training: one rank writes or, if sharded, one rank per node."""
    writers = nodes if phase.recipe.parallelism.checkpoints == 'sharded' else 1
    sizes = sizes_of(phase.recipe, phase.model, auxiliary=phase.auxiliary_parameters)
    return sizes.with_averages / (writers * WRITE_BYTES_PER_SECOND)


def best_interval(*, stall: float, mtbf: float) -> float:
    """Return the save interval with the highest `goodput`, in the unit of the arguments.

    It is the minimum of Daly's equation 20 (2006): for x = interval / mtbf, x + log(1 - x) = -stall / mtbf.
    """
    # The left side decreases from 0 at x = 0 to minus infinity at x = 1.
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if middle < 1 and middle + math.log1p(-middle) > -stall / mtbf:
            low = middle
        else:
            high = middle
    return low * mtbf


def possible_interval(seconds: float, *, batch: float, run: float) -> float:
    """Return the save interval nearest to `seconds` that is at least one batch and at most the whole run."""
    return min(max(seconds, batch), run)


def chosen_interval(*, stall: float, mtbf: float) -> float:
    """Return the interval in seconds for `trainer.save_interval: auto`: the best one within two bounds.

    Saves take at most MOST_TIME_SAVING of the time, and a failure loses at most LONGEST_SECONDS of work. If the
    bounds contradict each other, only the first is met.
    """
    shortest = max(SHORTEST_SECONDS, stall / MOST_TIME_SAVING)
    return max(min(best_interval(stall=stall, mtbf=mtbf), LONGEST_SECONDS), shortest)


def observed_mtbf_hours(*, prior_hours: float, failures: int, hours: float) -> float:
    """Estimate a cluster's mean time between failures in hours, from `failures` in `hours` of the run so far.

    `prior_hours` is the estimate before the run. It weighs as much as PRIOR_HOURS of training, or as one failure if
    that is less, so that after a day the run's own failures matter more.
    """
    seen = min(PRIOR_HOURS, prior_hours)
    return (seen + hours) / (seen / prior_hours + failures)


def goodput(*, interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Return the fraction of time spent training if failures are a Poisson process (Daly 2006, equation 20).

    Training for `interval` and saving once takes mtbf e^(restart / mtbf) (e^((interval + stall) / mtbf) - 1) on
    average. All arguments are in the same unit of time.
    """
    segment = (interval + stall) / mtbf
    # Compute 1 / (e^x - 1) as e^-x / (1 - e^-x), which does not overflow for long intervals.
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
    """Return a training phase's optimal save interval, and its goodput at the optimal and at the recipe's interval."""
    stall = default_stall_seconds(phase, nodes=nodes) if stall_seconds is None else stall_seconds
    mtbf, batch_seconds = mtbf_hours * 3600, phase.recipe.global_batch / images_per_second
    run_seconds = phase.batches * batch_seconds
    interval = possible_interval(best_interval(stall=stall, mtbf=mtbf), batch=batch_seconds, run=run_seconds)
    save_interval = str(phase.recipe.trainer.get('save_interval', '1ep'))
    in_batches = save_interval.endswith('ba') and save_interval[:-2].isdigit()
    recipe_interval = int(save_interval[:-2]) * batch_seconds if in_batches else seconds_of(save_interval)
    if save_interval == AUTO:
        recipe_interval = chosen_interval(stall=stall, mtbf=mtbf)

    def goodput_at(interval: float) -> float:
        return goodput(interval=interval, stall=stall, restart=restart_seconds, mtbf=mtbf)

    return Resilience(
        mtbf_hours=mtbf_hours,
        stall_seconds=stall,
        restart_seconds=restart_seconds,
        interval_seconds=interval,
        goodput=goodput_at(interval),
        interval_batches=max(1, round(interval / batch_seconds)),
        recipe_interval_seconds=recipe_interval,
        recipe_goodput=goodput_at(recipe_interval) if recipe_interval else None,
        batch_seconds=batch_seconds,
        run_seconds=run_seconds,
    )


@dataclass(frozen=True)
class KeptCheckpoints:
    """Largest number of checkpoints that a run has at the same time, and the storage that they need."""

    count: int
    bytes: int


def kept_checkpoints(phase: Phase, saving: Resilience, sizes: Sizes) -> KeptCheckpoints | None:
    """Return the largest number of checkpoints that exist at the same time, and their storage; None if unknown.

    All are assumed to be as large as the last one. Those that other commands pinned or are using are not counted.
    """
    rules = keep_rules(phase.recipe.checkpointing, phase.recipe.trainer)
    saves = None
    if saving.recipe_interval_seconds:
        # Subtract 1e-9, so that rounding errors do not add a save at the end of the run.
        saves = math.ceil(saving.run_seconds / saving.recipe_interval_seconds - 1e-9)
    count = most_checkpoints(rules, saves=saves, batches=phase.batches)
    return None if count is None else KeptCheckpoints(count, count * sizes.with_averages)


def most_checkpoints(rules: KeepConfig | None, *, saves: int | None, batches: int) -> int | None:
    """Return the largest number of checkpoints that exist at the same time.

    `saves` is the number of saves in the run, None if unknown; returned if all checkpoints are kept (`rules` is None).
    """
    if rules is None:
        return saves
    multiples = batches // rules.every_batches if rules.every_batches else 0
    # Add 1: when a new checkpoint is complete, the old ones have not been removed yet.
    count = rules.last + rules.hourly + rules.daily + multiples + 1
    return count if saves is None else min(count, saves)


def snapshot_bytes_per_node(phase: Phase, setup: Setup, *, gpus_per_node: int) -> int:
    """Return the bytes of host memory for snapshots and checkpoints on the node that needs the most.

    The result is 0 if saves block training and no tier is in memory. A whole checkpoint is snapshotted by the first
    device, a sharded one by every device that holds a shard. If several groups of devices hold the same shards
    (`parallelism.replicas`), only the first group takes snapshots.
    """
    recipe = phase.recipe
    node = _saved_bytes(phase, setup, gpus_per_node=gpus_per_node)
    snapshot = recipe.checkpointing.asynchronous and 'save_folder' not in recipe.trainer
    return node * (snapshot + _copies_in_memory(recipe))


def _copies_in_memory(recipe: Recipe) -> int:
    """Return how many copies of its part of a checkpoint a node holds in host memory in a save; 0 without that tier."""
    tiers = recipe.checkpointing.tiers
    tier = None if tiers is None else tiers.memory
    if tier is None or 'save_folder' in recipe.trainer:
        return 0
    # The previous checkpoint stays until the new one is complete. With sharded checkpoints, each node also holds a copy
    # of another node's part. A whole checkpoint is copied to a node that holds no part of its own.
    return 2 * (1 + (tier.replicate and recipe.parallelism.checkpoints == 'sharded'))


def _saved_bytes(phase: Phase, setup: Setup, *, gpus_per_node: int) -> int:
    """Return the bytes of a checkpoint that the ranks of one node save: the maximum over all nodes."""
    recipe = phase.recipe
    total = sizes_of(recipe, phase.model, auxiliary=phase.auxiliary_parameters).with_averages
    if recipe.parallelism.checkpoints == 'whole':
        return total
    return -(-total * min(gpus_per_node, setup.shards) // setup.shards)
