"""The order of training samples: what makes global batches the same on any number of devices.

Streaming cuts the samples that an epoch takes of a stream into `num_canonical_nodes` rows, reads these column by
column, and cuts what it read into global batches. Where rows are of unequal length, or the samples do not fill the last
batch, it pads with samples again, and how many depends on the devices: of streams of 3000 and 2000 samples in batches
of 64, with 8 rows, 63 of 77 batches on 16 devices differed from those on 8. So nothing may be left over:
`num_canonical_nodes` divides the global batch, which divides what an epoch takes of every stream. Then a global batch
is a window of a sequence that knows no devices, shuffled or not: every shuffling algorithm of Streaming depends on the
seed, the epoch, the shards and the rows alone.
"""

import math
from collections.abc import Collection

MAX_PICKS = 2**20
"""Streaming draws what an epoch takes of a stream in a Python loop, 1.1 s for a million picks."""


def default_canonical_nodes(global_batch: int) -> int:
    """Rows for up to 64 nodes that each read shards of their own; fewer where the batch has fewer powers of two."""
    return math.gcd(64, global_batch)


def canonical_nodes_problem(canonical_nodes: int, global_batch: int) -> str | None:
    """What is wrong with `num_canonical_nodes`, or None."""
    if canonical_nodes > 0 and global_batch % canonical_nodes == 0:
        return None
    divisors = [number for number in range(1, global_batch + 1) if global_batch % number == 0]
    choices = {max((n for n in divisors if n <= canonical_nodes), default=1)}
    choices |= {min((n for n in divisors if n >= canonical_nodes), default=global_batch)}
    return (
        f'{canonical_nodes} does not divide the global batch of {global_batch}, so that batches would depend on the '
        f'number of devices; use {_either(choices)}, or null'
    )


def nodes_problem(canonical_nodes: int, num_nodes: int) -> str | None:
    """What is wrong with `num_canonical_nodes` on this many nodes, or None."""
    if canonical_nodes % num_nodes == 0 or num_nodes % canonical_nodes == 0:
        return None
    return (
        f'{canonical_nodes} cannot be shared out evenly over {num_nodes} nodes; use '
        f'{math.lcm(canonical_nodes, num_nodes)} from the start of a run (it changes the order of samples), '
        f'or a number of nodes that divides {canonical_nodes}'
    )


def choose_problem(choose: int, global_batch: int) -> str | None:
    """What is wrong with a stream's `choose`, or None."""
    if choose % global_batch == 0:
        return None
    lower = choose // global_batch * global_batch
    choices = {max(lower, global_batch), lower + global_batch}
    return f'{choose} is not a multiple of the global batch of {global_batch}; use {_either(choices)}'


def epoch_problem(epoch_size: int, global_batch: int) -> str | None:
    """What is wrong with `epoch_size`, or None."""
    return choose_problem(epoch_size, global_batch) if epoch_size > 0 else f'{epoch_size} is not positive; remove it'


def batching_problem(method: str, shapes: Collection[str]) -> str | None:
    """What is wrong with `batching_method` for training, or None."""
    if method == 'random' and len(set(shapes)) > 1:
        return f'random puts pictures of {", ".join(sorted(set(shapes)))} px in one batch; use per_stream'
    if method in ('per_stream', 'random'):
        return None
    return f'{method} makes batches that depend on the number of devices; use per_stream, or random to mix streams'


def whole_batches(samples: int, global_batch: int) -> int:
    """Of this many samples those that an epoch takes: all but what does not fill a batch, and at least one batch."""
    return max(1, samples // global_batch) * global_batch


def sampling_granularity(samples: int) -> int:
    """Samples drawn together from a shard: one, or more where there are too many to draw one by one."""
    return -(-samples // MAX_PICKS)


def _either(choices: Collection[int]) -> str:
    return ' or '.join(str(choice) for choice in sorted(choices))
