"""Norms of a batch's gradients, computed once for the loss guard, its metric, and clipping."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from composer.core import State
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffusion.algorithms.average import local_shard
from diffusion.compatibility.private_names import _foreach_norm


class Gradients(NamedTuple):
    """Summary of this rank's N gradients, on their device."""

    finite: Tensor
    """True if all gradients are finite, bool []."""
    squared_norm: Tensor
    """This rank's contribution to the squared L2 norm of all gradients over all ranks, float64 []."""
    local: list[Tensor]
    """N gradients; for DTensors, this rank's shards."""
    norms: Tensor
    """L2 norm of each tensor in `local`, float32 [N]."""
    is_sharded: bool
    """True if `norms` are norms of shards, so that the total norm also depends on other ranks."""


@runtime_checkable
class GradientSource(Protocol):
    """Interface of callbacks that summarize a batch's gradients before algorithms clip the gradients."""

    def gradients_of_batch(self, state: State) -> tuple[Gradients, Tensor] | None:
        """Return a summary and the squared norm over all ranks, float64 [], or None without a summary; a collective."""


@torch.no_grad()
def summarize_gradients(gradients: Iterable[Tensor | None]) -> Gradients:
    """Summarize this rank's gradients: plain tensors, which are the same on all ranks, or shards (DTensors)."""
    # Composer runs this in the optimizer's closure, where gradients are enabled. Without no_grad, to_local would record
    # an autograd node for every gradient, which took 8 times as long with 686 DTensors on 2 gloo ranks.
    given = [gradient for gradient in gradients if gradient is not None]
    has_shards = any(isinstance(gradient, DTensor) for gradient in given)
    local = [local_shard(gradient) for gradient in given] if has_shards else given
    if not local:
        nothing = torch.zeros((), dtype=torch.float64)
        return Gradients(torch.tensor(True), nothing, [], torch.zeros(0), is_sharded=False)
    # On GPUs one fused, read-only kernel computes the norms. Use at least float32, since squares of finite gradients
    # overflow in half precision.
    wide = torch.promote_types(local[0].dtype, torch.float32)
    norms = torch.stack(_foreach_norm(local, 2, dtype=wide))
    squares = norms.double().square()
    counts = _copies_of_each(given) if has_shards else [dist.get_world_size()]
    if len(set(counts)) == 1:
        squared_norm = squares.sum() / counts[0]
    else:
        squared_norm = (squares / torch.tensor(counts, device=squares.device)).sum()
    return Gradients(norms.sum().isfinite(), squared_norm, local, norms, is_sharded=has_shards)


def _copies_of_each(gradients: Sequence[Tensor]) -> list[int]:
    """Return, for each gradient, the number of ranks that hold the same values (for a DTensor, the same shard)."""
    # Cache the count by sharding: most DTensors are sharded in the same way, and computing the count takes 5
    # microseconds.
    known: dict[tuple[int, Any], int] = {}
    counts = []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            counts.append(dist.get_world_size())
            continue
        key = (id(gradient.device_mesh), gradient.placements)
        if key not in known:
            known[key] = copies_of_shard(gradient)
        counts.append(known[key])
    return counts


def copies_of_shard(gradient: DTensor) -> int:
    """Return the number of ranks that hold the same shard of a DTensor."""
    mesh = gradient.device_mesh
    sizes = (mesh.size(dim) for dim, placement in enumerate(gradient.placements) if not placement.is_shard())
    return math.prod(sizes) * (dist.get_world_size() // mesh.size())


def gradients_of(state: State) -> list[Tensor | None]:
    return [parameter.grad for parameter in trained_parameters(state)]


def trained_parameters(state: State) -> list[nn.Parameter]:
    """Return all parameters that a Trainer's optimizers update; under FSDP2 they are always DTensors."""
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group['params']]
