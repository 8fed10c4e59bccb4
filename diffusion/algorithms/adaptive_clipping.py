"""Adaptive gradient clipping (Brock et al. 2021, arXiv 2102.06171), also for gradients that FSDP2 shards.

The gradient of each unit i is scaled by min(1, threshold * |W_i| / |G_i|). A unit is a row of a matrix or an output
channel of a convolution, over all their other dimensions; a vector or a scalar is one unit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffusion.algorithms.average import local_shard
from diffusion.algorithms.gradient_norms import copies_of_shard


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], threshold: float) -> None:
    """Clip the gradients of parameters in place; a collective if ranks hold parts of a unit.

    Args:
        parameters: Tensors, or DTensors that this rank has a shard of; those without a gradient are skipped.
        threshold: Largest norm of a unit's gradient, as a multiple of the norm of its weights.
    """
    pairs = [(each, each.grad) for each in parameters if each.grad is not None]
    split = [(weight, gradient) for weight, gradient in pairs if splits_units(gradient)]
    whole = [(weight, gradient) for weight, gradient in pairs if not splits_units(gradient)]
    for weight, gradient in whole:
        _scale(gradient, _unit_norms(local_shard(weight)), _unit_norms(local_shard(gradient)), threshold)
    if not split:
        return
    weights, gradients = zip(*split, strict=True)
    norms = _norms_over_ranks([*weights, *gradients])
    for gradient, weight_norm, norm in zip(gradients, norms[: len(split)], norms[len(split) :], strict=True):
        _scale(gradient, weight_norm, norm, threshold)


def splits_units(tensor: Tensor) -> bool:
    """Return True if a tensor is a DTensor and its shards hold parts of units, such as parts of a vector or of rows."""
    if not isinstance(tensor, DTensor):
        return False
    dims = {placement.dim for placement in tensor.placements if placement.is_shard()}  # type: ignore[attr-defined]
    # FSDP2 shards the first dimension alone unless its configuration names another one.
    assert len(dims) <= 1, f'sharded in several dimensions: {tensor.placements}'
    return bool(dims) and (tensor.ndim <= 1 or dims != {0})


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the L2 norm of each unit of a tensor, which broadcasts with it: [] or [units, 1, ...]."""
    if tensor.ndim <= 1:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _norms_over_ranks(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the norms of the units of DTensors over all ranks, by a single all-reduce of their squares."""
    shards = [local_shard(each) for each in tensors]
    # Sum in float64, so that any number of ranks gives the same float32 value as one process.
    squares = [
        _unit_norms(each.double()).square() / copies_of_shard(of) for each, of in zip(shards, tensors, strict=True)
    ]
    total = torch.cat([each.flatten() for each in squares])
    dist.all_reduce(total, reduce_operation='SUM')
    parts = total.sqrt().split([each.numel() for each in squares])
    return [part.view_as(own).to(shard.dtype) for part, own, shard in zip(parts, squares, shards, strict=True)]


def _scale(gradient: Tensor, weight_norm: Tensor, norm: Tensor, threshold: float) -> None:
    """Scale this rank's part of a gradient in place by min(1, threshold * weight_norm / norm) of each unit."""
    # A gradient of zeros stays as it is: 0 / 0 gives the factor 1, and x / 0 is clamped to 1.
    factor = (weight_norm * threshold / norm).nan_to_num(nan=1.0).clamp(max=1.0)
    local_shard(gradient).mul_(factor)
