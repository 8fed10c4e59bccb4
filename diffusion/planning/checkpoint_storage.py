"""Storage for the checkpoints that a run keeps."""

import math
from dataclasses import dataclass

from diffusion.config.checkpointing import KeepConfig, keep_rules
from diffusion.planning.checkpoint_interval import Resilience, Sizes
from diffusion.planning.workload import Phase


@dataclass(frozen=True)
class KeptCheckpoints:
    """Largest number of checkpoints of a run that exist at a time, and the storage that they need."""

    count: int
    bytes: int


def kept_checkpoints(phase: Phase, saving: Resilience, sizes: Sizes) -> KeptCheckpoints | None:
    """Return the most checkpoints that exist at a time in a training phase, and their storage; None if it is unknown.

    Claimed and pinned checkpoints are not counted.

    Args:
        saving: The recipe's save interval, in seconds.
        sizes: Sizes of a checkpoint; each counts as one of the end of the run.
    """
    rules = keep_rules(phase.recipe.checkpointing, phase.recipe.trainer)
    saves = None
    if saving.recipe_interval_seconds:
        # Subtract 1e-9, so that a save that falls on the end of the run is not counted twice.
        saves = math.ceil(saving.run_seconds / saving.recipe_interval_seconds - 1e-9)
    count = most_checkpoints(rules, saves=saves, batches=phase.batches)
    return None if count is None else KeptCheckpoints(count, count * sizes.with_averages)


def most_checkpoints(rules: KeepConfig | None, *, saves: int | None, batches: int) -> int | None:
    """Return the largest number of checkpoints that exist at a time; None if that is not known.

    Args:
        rules: The checkpoints that the run keeps; None keeps all.
        saves: Number of saves of the run; None if it is not known.
    """
    if rules is None:
        return saves
    multiples = batches // rules.every_batches if rules.every_batches else 0
    # Add 1: the new checkpoint exists before those that no rule keeps are removed.
    count = rules.last + rules.hourly + rules.daily + multiples + 1
    return count if saves is None else min(count, saves)
