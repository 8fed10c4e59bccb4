"""Check of a number of devices: batch, microbatches, replicas and sample order must divide over them."""

import math

from diffusion.config import sample_order
from diffusion.config.algorithm_checks import algorithm_names, microbatch_problem
from diffusion.config.recipe import Recipe
from diffusion.config.schema import Problem


def check_devices(recipe: Recipe, world_size: int, gpus_per_node: int | None = None) -> list[Problem]:
    """Return a problem unless the devices can share the global batch, its microbatches, replicas and sample order.

    Args:
        recipe: A valid recipe.
        world_size: Number of devices of all nodes together.
        gpus_per_node: Number of devices per node; None skips the check of the number of nodes.
    """
    if recipe.task not in ('train', 'evaluate'):
        return []
    problem = _device_problem(recipe, world_size, gpus_per_node)
    if problem is None:
        return []
    if gpus_per_node is not None and world_size > gpus_per_node:
        working = _working_nodes(recipe, world_size // gpus_per_node, gpus_per_node)
        if working:
            counts = ' or '.join(str(count) for count in working)
            problem = Problem(problem.where, f'{problem.what}; {counts} nodes of {gpus_per_node} devices work as it is')
    return [problem]


def _device_problem(recipe: Recipe, world_size: int, gpus_per_node: int | None) -> Problem | None:
    """Return the first reason why this recipe cannot run on this number of devices, or None."""
    batch, microbatch = recipe.global_batch, recipe.device_train_microbatch_size
    if batch % world_size:
        sizes = sorted({max(world_size, batch // world_size * world_size), (batch // world_size + 1) * world_size})
        choices = ' or '.join(str(size) for size in sizes)
        return Problem('global_batch', f'{batch} does not divide over {world_size} devices; use {choices}')
    replicas = recipe.parallelism.replicas
    if recipe.parallelism.strategy != 'ddp' and world_size % replicas:
        near = max(count for count in range(1, replicas + 1) if world_size % count == 0)
        return Problem('parallelism.replicas', f'{replicas} do not divide {world_size} devices; use {near}')
    share = batch // world_size
    if isinstance(microbatch, int) and share % microbatch:
        what = (
            f"{microbatch} does not divide a device's {share} samples ({batch} over {world_size} devices); "
            f'use {nearest_divisor(share, microbatch)}'
        )
        return Problem('device_train_microbatch_size', what)
    contrastive = 'contrastive_flow_matching' in algorithm_names(recipe)
    if contrastive and isinstance(microbatch, int) and (what := microbatch_problem(microbatch, share)) is not None:
        return Problem('device_train_microbatch_size', what)
    if gpus_per_node is None or recipe.task != 'train':
        return None
    canonical_nodes = recipe.loader.num_canonical_nodes or sample_order.default_canonical_nodes(batch)
    # Streaming rounds the number of nodes down.
    what = sample_order.nodes_problem(canonical_nodes, max(1, world_size // gpus_per_node))
    return None if what is None else Problem('loader.num_canonical_nodes', what)


def _working_nodes(recipe: Recipe, nodes: int, gpus_per_node: int) -> list[int]:
    """Return the nearest smaller and the nearest larger number of nodes on which a recipe can run, if they exist."""
    most = recipe.global_batch // gpus_per_node
    nearest = (range(min(nodes - 1, most), 0, -1), range(nodes + 1, most + 1))
    found = (
        next((count for count in counts if not _device_problem(recipe, count * gpus_per_node, gpus_per_node)), None)
        for counts in nearest
    )
    return [count for count in found if count is not None]


def nearest_divisor(number: int, size: int) -> int:
    """Return the divisor of a number that is nearest to a size."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return min(small + [number // each for each in reversed(small)], key=lambda each: abs(each - size))
