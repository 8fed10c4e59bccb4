"""Divide matrices among ranks, so that each rank applies a function to some whole matrices, and exchange the results.

Shapes: N matrices, R rows, C columns, r rows per shard on this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from diffusion.errors import UserError


@dataclass(frozen=True)
class Layout:
    """Distribution of matrices over ranks: sharded by rows as under FSDP2, or replicated on every rank as under DDP."""

    group: dist.ProcessGroup | None
    """Ranks that divide the matrices among them; None if this rank computes all of them itself."""
    sharded: bool
    """True if each rank has consecutive rows, divided as by torch.chunk; False if each rank has all rows."""

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


def layout_of(weight: Tensor) -> Layout:
    """Return the distribution of a weight over ranks; a plain tensor is replicated on all ranks of a job.

    Raises:
        UserError: The weight is sharded along a dimension other than its rows, or over several mesh dimensions.
    """
    if not isinstance(weight, DTensor):
        several = dist.is_initialized() and dist.get_world_size() > 1
        return Layout(dist.group.WORLD if several else None, sharded=False)
    sharded = [number for number, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(sharded) > 1 or any(not weight.placements[number].is_shard(0) for number in sharded):
        raise UserError(
            f'muon: a weight of shape {list(weight.shape)} has placements {weight.placements}, but Muon needs weights '
            'sharded by rows over one mesh dimension; shard with fully_shard alone, or use AdamW'
        )
    # Let all replicas of a hybrid mesh compute the same results: an exchange between them would use the slower network.
    group = weight.device_mesh.get_group(sharded[0]) if sharded else None
    several = group is not None and dist.get_world_size(group) > 1
    return Layout(group if several else None, sharded=several)


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], parts: Tensor, layout: Layout, *, rows: int, first: int
) -> Tensor:
    """Apply a function to whole matrices, divided among ranks; return the results for `parts`. A collective.

    Args:
        function: Function that maps matrices [N, R, C] to results of the same shape and dtype, each independent of the
            others.
        parts: This rank's part of each matrix: its rows [N, r, C], or whole copies [N, R, C].
        rows: R, number of rows of a whole matrix.
        first: Rank that computes the first matrix, modulo the number of ranks.
    """
    if layout.group is None:
        return function(parts)
    counts = dealt(len(parts), layout.ranks, first=first)
    rank = dist.get_rank(layout.group)
    if not layout.sharded:
        return _on_copies(function, parts, counts, rank, layout.group)
    return _on_shards(function, parts, counts, rank, layout.group, rows=rows)


def dealt(matrices: int, ranks: int, *, first: int) -> list[int]:
    """Return how many matrices each rank gets when they are dealt out one at a time, starting with rank `first`."""
    return [len(range((rank - first) % ranks, matrices, ranks)) for rank in range(ranks)]


def _on_copies(
    function: Callable[[Tensor], Tensor], copies: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup
) -> Tensor:
    """Apply the function to this rank's share, counts[rank] matrices, and return the results for all matrices."""
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    results = torch.zeros_like(copies)
    if counts[rank]:
        results[mine] = function(copies[mine])
    # The all-reduce adds zeros from other ranks, which is exact; all_gather would need equal numbers of matrices.
    dist.all_reduce(results, group=group)
    return results


def _on_shards(
    function: Callable[[Tensor], Tensor],
    shards: Tensor,
    counts: list[int],
    rank: int,
    group: dist.ProcessGroup,
    *,
    rows: int,
) -> Tensor:
    """Return this rank's rows of all results: each rank gathers counts[rank] matrices and sends back their results."""
    matrices, height, columns = shards.shape
    ranks, mine = len(counts), counts[rank]
    chunk = -(-rows // ranks)  # rows per rank; the last ranks may have fewer or none
    # Send each rank our rows of the matrices that the receiver computes, padded so that all shards have equal heights.
    padded = torch.nn.functional.pad(shards, (0, 0, 0, chunk - height))
    received = padded.new_empty(ranks * mine, chunk, columns)
    dist.all_to_all_single(received, padded, [mine] * ranks, counts, group=group)
    results = padded.new_zeros(mine, ranks * chunk, columns)
    if mine:
        whole = received.view(ranks, mine, chunk, columns).transpose(0, 1).reshape(mine, ranks * chunk, columns)
        results[:, :rows] = function(whole[:, :rows])
    # Send each rank its rows of our results; each rank then has its rows of the results for all matrices.
    by_rank = results.view(mine, ranks, chunk, columns).transpose(0, 1).reshape(ranks * mine, chunk, columns)
    returned = padded.new_empty(matrices, chunk, columns)
    dist.all_to_all_single(returned, by_rank, counts, [mine] * ranks, group=group)
    return returned[:, :height]
