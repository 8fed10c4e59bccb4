"""Checks that batches, replicas and the sample order can be divided evenly over devices.

For each stream, Streaming splits an epoch's samples into `num_canonical_nodes` rows, reads the rows column by column,
and splits the result into global batches. If the rows have unequal lengths, or the samples do not fill the last batch,
it pads with repeated samples, and the amount of padding depends on the number of devices. Example: with streams of 3000
and 2000 samples, a global batch of 64, and 8 rows, 63 of 77 batches differed between 8 and 16 devices.

To rule out padding, `num_canonical_nodes` must divide the global batch, and the global batch must divide the number of
samples per epoch of every stream. Then each global batch is a window of a sequence that does not depend on the number
of devices. This holds with shuffling too: Streaming's shuffling algorithms depend only on the seed, the epoch, the
shards and the rows.
"""

import math
from collections.abc import Collection

from diffusion.config.model_checks import microbatch_problem
from diffusion.config.recipe import Recipe
from diffusion.config.schema import Problem


def check_devices(recipe: Recipe, world_size: int, gpus_per_node: int | None = None) -> list[Problem]:
    """Return at most one problem: batch, microbatches, replicas or sample order do not divide over the devices.

    Only training and evaluation are checked.

    Args:
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
            counts = ' or '.join(f'{count} x {gpus_per_node}' for count in working)
            problem = Problem(problem.where, f'{problem.what}; no change is needed with {counts} devices')
    return [problem]


def _device_problem(recipe: Recipe, world_size: int, gpus_per_node: int | None) -> Problem | None:
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
            f"{microbatch} does not divide a device's batch of {share} ({batch} over {world_size} devices); "
            f'use {nearest_divisor(share, microbatch)}'
        )
        return Problem('device_train_microbatch_size', what)
    names = {component.name for component in recipe.algorithms.values()} if recipe.task == 'train' else set()
    contrastive = 'contrastive_flow_matching' in names
    if contrastive and isinstance(microbatch, int) and (what := microbatch_problem(microbatch, share)) is not None:
        return Problem('device_train_microbatch_size', what)
    if gpus_per_node is None or recipe.task != 'train':
        return None
    canonical_nodes = recipe.loader.num_canonical_nodes or default_canonical_nodes(batch)
    # Streaming rounds the number of nodes down.
    what = nodes_problem(canonical_nodes, max(1, world_size // gpus_per_node))
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
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return min(small + [number // each for each in reversed(small)], key=lambda each: abs(each - size))


MAX_PICKS = 2**20
"""Largest number of random draws per stream and epoch; for more samples, each draw takes several.

Streaming draws in a Python loop: 1.1 s per million draws.
"""


def default_canonical_nodes(global_batch: int) -> int:
    # 960 also has the factors 3 and 5, for numbers of nodes that are not powers of two, such as 12 for a batch of 1536.
    return math.gcd(64 * 3 * 5, global_batch)


def canonical_nodes_problem(canonical_nodes: int, global_batch: int) -> str | None:
    if canonical_nodes > 0 and global_batch % canonical_nodes == 0:
        return None
    divisors = [number for number in range(1, global_batch + 1) if global_batch % number == 0]
    choices = {max((n for n in divisors if n <= canonical_nodes), default=1)}
    choices |= {min((n for n in divisors if n >= canonical_nodes), default=global_batch)}
    return (
        f'{canonical_nodes} does not divide the global batch of {global_batch}, so batches would depend on the number '
        f'of devices; use {_either(choices)}, or null'
    )


def nodes_problem(canonical_nodes: int, num_nodes: int) -> str | None:
    if canonical_nodes % num_nodes == 0 or num_nodes % canonical_nodes == 0:
        return None
    return (
        f'{canonical_nodes} cannot be split evenly over {num_nodes} nodes; use '
        f'{math.lcm(canonical_nodes, num_nodes)} from the start of a run (it changes the order of samples), '
        f'or a number of nodes that divides {canonical_nodes}'
    )


def choose_problem(choose: int, global_batch: int) -> str | None:
    if choose % global_batch == 0:
        return None
    lower = choose // global_batch * global_batch
    choices = {max(lower, global_batch), lower + global_batch}
    return f'{choose} is not a multiple of the global batch of {global_batch}; use {_either(choices)}'


def epoch_problem(epoch_size: int, global_batch: int) -> str | None:
    return choose_problem(epoch_size, global_batch) if epoch_size > 0 else f'{epoch_size} is not positive; remove it'


def batching_problem(method: str, shapes: Collection[str]) -> str | None:
    """Return an error message if `batching_method` cannot be used for training on these image shapes, else None."""
    if method == 'random' and len(set(shapes)) > 1:
        return f'random mixes images of {", ".join(sorted(set(shapes)))} px in a batch; use per_stream'
    if method in ('per_stream', 'random'):
        return None
    return f'{method} makes batches that depend on the number of devices; use per_stream, or random to mix streams'


def sampling_granularity(samples: int) -> int:
    """Return the samples per random draw (Streaming's `sampling_granularity`) for at most MAX_PICKS draws per epoch."""
    return -(-samples // MAX_PICKS)


def _either(choices: Collection[int]) -> str:
    return ' or '.join(str(choice) for choice in sorted(choices))
