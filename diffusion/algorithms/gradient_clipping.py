"""Gradient clipping by norm, value or unit, without device synchronization; `loss_guard` shares the computed norms."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from composer.algorithms import GradientClipping as ComposerGradientClipping
from composer.algorithms.gradient_clipping.gradient_clipping import apply_gradient_clipping
from composer.core import Event, Precision, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diffusion.algorithms.average import FSDP1, local_shard
from diffusion.compatibility.private_names import _foreach_mul_, _foreach_norm
from diffusion.config.declarations import STATELESS, GreaterThan, constrained
from diffusion.errors import UserError


class Gradients(NamedTuple):
    """Norms and finiteness of this rank's N gradients; the tensors are on the gradients' device."""

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
        """Return this rank's summary and the squared norm over all ranks, float64 []; None if unknown. A collective."""


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
    """Return a `GradientSource`'s summary and squared norm over all ranks; None in amp_fp16 or without a source."""
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
    """Scale each clipping unit of this rank's gradient shard in place by min(1, threshold * weight_norm / norm)."""
    # A zero gradient stays zero: 0 / 0 gives the factor 1, and x / 0 is clamped to 1.
    factor = (weight_norm * threshold / norm).nan_to_num(nan=1.0).clamp(max=1.0)
    local_shard(gradient).mul_(factor)
