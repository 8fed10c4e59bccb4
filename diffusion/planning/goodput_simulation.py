"""Simulated goodput of save strategies under failures of processes, nodes and the whole cluster.

Failures are a Poisson process. Training stalls at each save point, and restarts after each failure. A checkpoint
becomes available in a tier after the tier's lag. Training continues from the newest checkpoint in the tiers that
survived the failure.
"""

import functools
import math
import random
from dataclasses import dataclass, replace
from enum import IntEnum

from diffusion.planning.checkpoints import Resilience, best_interval, possible_interval

SNAPSHOT_SHARE = 0.4 / 8
"""Stall for a snapshot to memory, relative to a synchronous save: 0.4 s instead of 8 s for 1.6 GB on two slow cores."""
DISK_SHARE = 0.1
"""Assumed time to write or read a checkpoint on a node's own disk, relative to a shared file system: 2 GB/s instead of
0.2 GB/s."""
FAILURES = 4000
"""Number of simulated failures, enough for an error of the goodput below 0.001."""


class Failure(IntEnum):
    """Kinds of failures, from the least to the most destructive."""

    PROCESS = 0
    """Processes end, but the memory of all nodes remains: bugs, timeouts of collectives, link failures."""
    NODE = 1
    """Nodes are restarted or replaced, and memory is lost. The disks still hold the whole checkpoint, because each node
    has a whole copy (DDP) or another node has a replica."""
    CLUSTER = 2
    """The job starts again on other nodes, and only durable storage remains."""


SHARES = {Failure.PROCESS: 0.25, Failure.NODE: 0.70, Failure.CLUSTER: 0.05}
"""Fraction of failures by kind. Llama 3's training (2024) had 419 interruptions: 59% due to GPUs, about 10% to other
node parts, the rest mostly to software and network. No loss of a whole cluster was reported; 5% is an assumption."""


@dataclass(frozen=True)
class Tier:
    """A kind of storage for checkpoints. Times are in seconds."""

    name: str
    survives: Failure
    """The worst kind of failure that the tier's checkpoints survive."""
    lag: float
    """Time from when training continues after a save point until the checkpoint is complete in this tier."""
    restore: float
    """Time to read a checkpoint."""
    every: int = 1
    """Number of save points per checkpoint in this tier: 2 means that every second save point writes one."""


@dataclass(frozen=True)
class SaveStrategy:
    """Interval between saves of checkpoints, and the tiers that store them. Times are in seconds."""

    name: str
    interval: float
    """Training time between two save points."""
    stall: float
    """Time that each save point blocks training."""
    tiers: tuple[Tier, ...]
    """Tiers, fastest first; the last one is durable storage."""


@dataclass(frozen=True)
class SimulatedGoodput:
    strategy: SaveStrategy
    goodput: float
    """Fraction of wall-clock time spent on training that is not repeated."""


def simulate_strategies(saving: Resilience) -> list[SimulatedGoodput]:
    restart, mtbf = saving.restart_seconds, 3600 * saving.mtbf_hours
    bounds = {'batch': saving.batch_seconds, 'run': saving.run_seconds}
    given = saving.recipe_interval_seconds
    strategies = save_strategies(
        stall=saving.stall_seconds, restart=restart, mtbf=mtbf, recipe_interval=given, **bounds
    )
    return [SimulatedGoodput(each, simulated_goodput(each, mtbf=mtbf, restart=restart)) for each in strategies]


def save_strategies(
    *,
    stall: float,
    restart: float,
    mtbf: float,
    recipe_interval: float | None = None,
    batch: float = 0.0,
    run: float = math.inf,
) -> list[SaveStrategy]:
    """Return the strategies: synchronous saves at the recipe's and at the best interval, asynchronous saves, and tiers.

    Background writes are assumed to take as long as a synchronous save, and reads as long as writes. Times are in
    seconds.

    Args:
        restart: Time from a failure to the next batch, including reading a checkpoint from durable storage.
        recipe_interval: The recipe's save interval; None leaves out the strategy that uses it.
        batch: Duration of a batch, the shortest possible interval.
        run: Duration of the run, the longest possible interval.
    """

    def best(stall: float) -> float:
        return possible_interval(best_interval(stall=stall, mtbf=mtbf), batch=batch, run=run)

    restore, snapshot = min(stall, restart), SNAPSHOT_SHARE * stall
    written = (Tier('durable', Failure.CLUSTER, lag=0.0, restore=restore),)
    strategies = [SaveStrategy('synchronous', best(stall), stall, written)]
    if recipe_interval:
        strategies.insert(0, SaveStrategy('synchronous (recipe)', recipe_interval, stall, written))
    interval = best(snapshot)
    # A save begins only after the previous one is complete, so the interval is at least the time of a write.
    durable = Tier('durable', Failure.CLUSTER, lag=stall, restore=restore)
    strategies.append(SaveStrategy('asynchronous', max(interval, stall), snapshot, (durable,)))
    disk_lag = DISK_SHARE * stall
    tiers = (
        Tier('memory', Failure.PROCESS, lag=0.0, restore=SNAPSHOT_SHARE * restore),
        Tier('disk', Failure.NODE, disk_lag, DISK_SHARE * restore, every=_save_points(disk_lag, interval)),
        replace(durable, every=_save_points(stall, interval)),
    )
    return [*strategies, SaveStrategy('tiers', interval, snapshot, tiers)]


def _save_points(lag: float, interval: float) -> int:
    """Return the number of save points per checkpoint in a tier; each write must end before the next one begins."""
    return max(1, math.ceil(lag / interval))


def simulated_goodput(strategy: SaveStrategy, *, mtbf: float, restart: float, failures: int = FAILURES) -> float:
    """Return the fraction of time that a strategy spends on training that is not repeated.

    The failures are the same for all strategies and calls.

    Args:
        restart: Seconds from a failure to the next batch if the checkpoint is read from durable storage.
    """
    clock, tiers = 0.0, strategy.tiers
    # Count progress in save points: training continued at `begun`, and `newest` is the newest checkpoint of each tier.
    begun, newest = 0, [0] * len(tiers)
    waiting = restart
    for gap, failure in _draw_failures(failures):
        clock += gap * mtbf
        training = gap * mtbf - waiting  # negative if the restart is interrupted
        for index, tier in enumerate(tiers):
            if tier.survives < failure:
                newest[index] = 0
            elif training > tier.lag:
                reached = begun + int((training - tier.lag) / (strategy.interval + strategy.stall))
                point = reached - reached % tier.every
                # Keep an older checkpoint if none is new: training may have continued from another tier's newer one.
                if point > begun:
                    newest[index] = point
        begun = max(newest)
        served = tiers[newest.index(begun)] if begun else tiers[-1]
        waiting = restart - tiers[-1].restore + served.restore
    return begun * strategy.interval / clock


@functools.cache
def _draw_failures(count: int) -> list[tuple[float, Failure]]:
    """Return for each failure the time since the previous one, in units of the mean, and the kind of failure."""
    draw = random.Random(17)
    # Stratified sampling: draw one time from each of `count` intervals of equal probability, in random order. The times
    # are exponentially distributed, as in a Poisson process, but the noise of their mean is only a tenth.
    gaps = [-math.log1p(-(index + draw.random()) / count) for index in range(count)]
    draw.shuffle(gaps)
    kinds = draw.choices([*SHARES], weights=[*SHARES.values()], k=count)
    return [*zip(gaps, kinds, strict=True)]
