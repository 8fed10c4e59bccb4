"""Host memory that snapshots of asynchronous saves take."""

from diffusion.planning.checkpoint_interval import sizes_of
from diffusion.planning.memory import Setup
from diffusion.planning.workload import Phase


def snapshot_bytes_per_node(phase: Phase, setup: Setup, *, gpus_per_node: int) -> int:
    """Return the bytes of host memory for snapshots on the node that needs most; 0 if saves block training.

    The first device snapshots the whole state, or each device its shard of a sharded checkpoint. Of the shards that
    several groups of devices hold (`parallelism.replicas`), the first group snapshots its own.

    Args:
        phase: The recipe and its amount of work.
        setup: Number of devices and parallelism.
        gpus_per_node: Number of devices of a node.
    """
    recipe = phase.recipe
    if not recipe.checkpointing.asynchronous or 'save_folder' in recipe.trainer:
        return 0
    total = sizes_of(recipe, phase.model, auxiliary=phase.auxiliary_parameters).with_averages
    if recipe.parallelism.checkpoints == 'whole':
        return total
    return -(-total * min(gpus_per_node, setup.shards) // setup.shards)
