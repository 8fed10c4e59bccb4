"""Gradient clipping by norm, value or unit, without device synchronization; norms are shared with the loss guard."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import torch
from composer.algorithms import GradientClipping as ComposerGradientClipping
from composer.algorithms.gradient_clipping.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffusion.algorithms.average import FSDP1, local_shard
from diffusion.algorithms.gradient_norms import (
    Gradients,
    GradientSource,
    copies_of_shard,
    gradients_of,
    summarize_gradients,
    trained_parameters,
)
from diffusion.compatibility.private_names import _foreach_mul_
from diffusion.config.declarations import STATELESS, GreaterThan, constrained
from diffusion.errors import UserError

EPSILON = 1e-6
"""Number added to the norm before dividing by it, as in torch.nn.utils.clip_grad_norm_."""


class GradientClipping(ComposerGradientClipping):
    """Clip the gradients of each batch before the optimizer's step.

    `norm` scales all gradients by min(1, threshold / norm) where the norm covers all parameters and ranks, as
    `torch.nn.utils.clip_grad_norm_` does. `value` limits each element to [-threshold, threshold]. `adaptive` limits the
    gradient of each output unit to `threshold` times the norm of its weights (Brock et al. 2021).

    Args:
        clipping_type: `norm`, `value` or `adaptive`.
        clipping_threshold: The limit, more than 0.
    """

    on_resume = STATELESS

    # Composer's class calls clip_grad_norm_ with the DTensors of FSDP2. For the 686 tensors of Stable Diffusion 2 this
    # costs 10 ms of host overhead, half of a step on 128 GPUs; on CPUs it loops over parameters in Python. The loss
    # guard needs the same norms, so this class computes and reduces them once for both. Composer's `adaptive` changes
    # norms of DTensors in place before they are reduced over ranks, and therefore does not clip 1-D gradients.

    @constrained
    def __init__(
        self, clipping_type: Literal['norm', 'value', 'adaptive'], clipping_threshold: Annotated[float, GreaterThan(0)]
    ) -> None:
        super().__init__(clipping_type, clipping_threshold)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event != Event.AFTER_TRAIN_BATCH:
            return
        if state.fsdp_config_version == 1:
            raise UserError(FSDP1)
        if self.clipping_type == 'adaptive':
            clip_adaptively(trained_parameters(state), self.clipping_threshold)
            return
        if self.clipping_type == 'value':
            apply_gradient_clipping(state.model, 'value', self.clipping_threshold, fsdp_enabled=False)
            return
        gradients, squared_norm = _known_gradients(state) or _summarized(state)
        clip_by_norm(gradients, squared_norm, self.clipping_threshold)


@torch.no_grad()
def clip_by_norm(gradients: Gradients, squared_norm: Tensor, threshold: float) -> None:
    """Scale gradients in place by min(1, threshold / norm); the norm stays on the device, so the host does not wait."""
    if not gradients.local:
        return
    # For unsharded gradients, compute the factor exactly as torch.nn.utils.clip_grad_norm_ does.
    whole = not gradients.is_sharded
    norm = torch.linalg.vector_norm(gradients.norms) if whole else squared_norm.sqrt().to(gradients.norms.dtype)
    factor = (threshold / (norm + EPSILON)).clamp(max=1.0)
    _foreach_mul_(gradients.local, factor.to(gradients.local[0].dtype))


def _known_gradients(state: State) -> tuple[Gradients, Tensor] | None:
    """Return a callback's gradient summary and squared norm over all ranks; None without one, or in amp_fp16."""
    if state.precision == Precision.AMP_FP16:
        return None  # the callback's summary is of gradients that Composer had not unscaled yet
    source = next((each for each in state.callbacks if isinstance(each, GradientSource)), None)
    return None if source is None else source.gradients_of_batch(state)


def _summarized(state: State) -> tuple[Gradients, Tensor]:
    """Return a summary of the gradients and their squared norm over all ranks; a collective if they are sharded."""
    gradients = summarize_gradients(gradients_of(state))
    total = gradients.squared_norm.clone()
    if gradients.is_sharded:
        dist.all_reduce(total, reduce_operation='SUM')
    return gradients, total


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], threshold: float) -> None:
    """Limit each unit's gradient norm to `threshold` times its weight norm; a collective if ranks split units."""
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
    """Return True if a tensor's sharding splits clipping units (vectors, or rows of matrices) across ranks."""
    if not isinstance(tensor, DTensor):
        return False
    dims = {placement.dim for placement in tensor.placements if placement.is_shard()}  # type: ignore[attr-defined]
    # FSDP2 shards only the first dimension unless configured otherwise.
    assert len(dims) <= 1, f'sharded in several dimensions: {tensor.placements}'
    return bool(dims) and (tensor.ndim <= 1 or dims != {0})


def _unit_norms(tensor: Tensor) -> Tensor:
    """Return the L2 norm of each clipping unit, in a shape that broadcasts with the tensor: [] or [units, 1, ...]."""
    if tensor.ndim <= 1:
        return torch.linalg.vector_norm(tensor)
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _norms_over_ranks(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the norms of each tensor's clipping units over all ranks; a single all-reduce sums the squares."""
    shards = [local_shard(each) for each in tensors]
    # Sum in float64, so that the float32 result does not depend on the number of ranks.
    squares = [
        _unit_norms(each.double()).square() / copies_of_shard(of) for each, of in zip(shards, tensors, strict=True)
    ]
    total = torch.cat([each.flatten() for each in squares])
    dist.all_reduce(total, reduce_operation='SUM')
    parts = total.sqrt().split([each.numel() for each in squares])
    return [part.view_as(own).to(shard.dtype) for part, own, shard in zip(parts, squares, shards, strict=True)]


def _scale(gradient: Tensor, weight_norm: Tensor, norm: Tensor, threshold: float) -> None:
    """Scale each unit of this rank's part of a gradient in place by min(1, threshold * weight_norm / norm)."""
    # A zero gradient stays zero: 0 / 0 gives the factor 1, and x / 0 is clamped to 1.
    factor = (weight_norm * threshold / norm).nan_to_num(nan=1.0).clamp(max=1.0)
    local_shard(gradient).mul_(factor)
