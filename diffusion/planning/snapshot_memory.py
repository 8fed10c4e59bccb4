"""Host memory that snapshots of asynchronous saves and checkpoints in memory take."""

from diffusion.config.recipe import Recipe
from diffusion.planning.checkpoint_interval import sizes_of
from diffusion.planning.memory import Setup
from diffusion.planning.workload import Phase


def snapshot_bytes_per_node(phase: Phase, setup: Setup, *, gpus_per_node: int) -> int:
    """Return the bytes of host memory for snapshots and checkpoints on the node that needs most.

    It is 0 if saves block training and no tier is in memory. The first device snapshots a whole checkpoint; each device
    snapshots its shard of a sharded one. If several groups of devices hold the same shards (`parallelism.replicas`),
    only the first group does.
    """
    recipe = phase.recipe
    node = _saved_bytes(phase, setup, gpus_per_node=gpus_per_node)
    snapshot = recipe.checkpointing.asynchronous and 'save_folder' not in recipe.trainer
    return node * (snapshot + _copies_in_memory(recipe))


def _copies_in_memory(recipe: Recipe) -> int:
    """Return the number of copies of its part of a checkpoint that a node holds in memory during a save."""
    tiers = recipe.checkpointing.tiers
    tier = None if tiers is None else tiers.memory
    if tier is None or 'save_folder' in recipe.trainer:
        return 0
    # The previous checkpoint stays until the new one is complete. Each node of a sharded run also holds the copy of
    # another node; the copy of a whole checkpoint is on a node that holds nothing else.
    return 2 * (1 + (tier.replicate and recipe.parallelism.checkpoints == 'sharded'))


def _saved_bytes(phase: Phase, setup: Setup, *, gpus_per_node: int) -> int:
    """Return the bytes of a checkpoint that the ranks of a node save, on the node that has most."""
    recipe = phase.recipe
    total = sizes_of(recipe, phase.model, auxiliary=phase.auxiliary_parameters).with_averages
    if recipe.parallelism.checkpoints == 'whole':
        return total
    return -(-total * min(gpus_per_node, setup.shards) // setup.shards)
