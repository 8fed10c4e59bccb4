"""Muon: orthogonalized momentum for the matrices in a model's blocks, and AdamW for all other parameters.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
scalable for LLM training", arXiv 2502.16982.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from diffusion.algorithms.average import local_shard
from diffusion.compatibility.private_names import _foreach_add_, _foreach_lerp, _foreach_lerp_, _foreach_mul_
from diffusion.config.declarations import (
    OPTIMIZER_STATE,
    SAME_UPDATE,
    UPDATE,
    AtLeast,
    Between,
    GreaterThan,
    constrained,
)
from diffusion.errors import UserError
from diffusion.models.activation_memory import blocks_of
from diffusion.models.block_matrices import fused_projections, is_matrix, trained_matrices
from diffusion.training.matrix_exchange import layout_of, on_whole_matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients a, b, c of the polynomial a s + b s^3 + c s^5 that a Newton-Schulz iteration applies to each singular
value s (Jordan et al. 2024). Its slope at 0 is large: five iterations move s from [0.0015, 1] into [0.67, 1.21]."""
MIN_NORM = 1e-15
"""Lower bound on the norm by which matrices are divided: zero stays zero, and squares do not underflow in float32."""
MAX_BATCH_ELEMENTS = {'cpu': 2**18, 'cuda': 2**24}
"""Maximum number of matrix elements that a rank orthogonalizes at once, by device type. On GPUs this limits the memory
of a step; on CPUs, batches that fit into the cache are faster (98 ms instead of 114 ms for a U-Net of 4.3 M
parameters)."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates in units of the learning rate; Muon's updates are scaled to it (Liu et al., eq.
4)."""


def muon_groups(model: nn.Module, *, convolutions: bool = True, split_projections: bool = True) -> list[dict[str, Any]]:
    """Return a model's parameter groups for `Muon`: one group updated by Muon itself and one updated by AdamW.

    Muon updates the weights of linear layers and convolutions inside blocks, which are the modules selected by a
    `fsdp_wrap_fn` in the model. AdamW updates the rest: embeddings, norms, biases, first and last layers, text
    encoders. Frozen parameters are omitted.

    Args:
        model: A ComposerModel, or any module that has a `fsdp_wrap_fn` itself or in a submodule.
        convolutions: True includes convolutions; their weights [out, in, height, width] are treated as matrices [out,
            in * height * width].
        split_projections: True orthogonalizes the query, key and value matrices of a fused projection separately; the
            denoiser families declare these layers. False treats the layer's weight as one matrix.

    Raises:
        UserError: The model has no blocks, or its blocks have no trained matrices.
    """
    matrices = {
        id(weight): weight for block in _blocks(model) for weight in trained_matrices(block, convolutions=convolutions)
    }
    if not matrices:
        raise UserError(
            f'muon: {type(model).__name__} has no blocks with trained matrices; set `fsdp_wrap_fn`, a function that '
            'returns True for a block, on the module that contains the blocks; or pass parameter groups of your own; '
            'or use optimizer adamw'
        )
    others = [each for each in model.parameters() if each.requires_grad and id(each) not in matrices]
    fused = fused_projections(model) if split_projections else {}
    parts = [fused.get(each, 1) for each in matrices]
    groups: list[dict[str, Any]] = [{'params': list(matrices.values()), 'algorithm': 'muon', 'parts': parts}]
    return [*groups, {'params': others, 'algorithm': 'adamw'}] if others else groups


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, selected by the `fsdp_wrap_fn` of any of its modules."""
    return [block for module in model.modules() for block in blocks_of(module)]


def orthogonalize(matrices_NRC: Tensor, *, steps: int) -> Tensor:
    """Approximate U V^T of the singular value decomposition U S V^T of each matrix, as [N, R, C].

    The singular values of the result are close to 1, or 0 for a matrix of zeros. Newton-Schulz iterations compute all
    matrices together with batched products, in their own dtype. Scaling a matrix does not change its result.

    Args:
        matrices_NRC: The matrices, in the dtype of the computation; bfloat16 is accurate enough.
        steps: Number of iterations; 5 in Jordan et al.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", algorithm 2.
    """
    tall = matrices_NRC.shape[-2] > matrices_NRC.shape[-1]
    # Transpose so that the Gram matrices X X^T have the size of the smaller side.
    x = matrices_NRC.mT if tall else matrices_NRC
    precise = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=precise).clamp(min=MIN_NORM)
    x = (x / norms).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


class Muon(Optimizer):
    """Optimizer that updates matrices with their orthogonalized momentum, and other parameters with AdamW.

    The update of a matrix W [R, C] with gradient G, momentum M and learning rate lr, weight decay w:

        M <- m M + (1 - m) G;  U = m M + (1 - m) G with Nesterov momentum, else M
        W <- (1 - lr w) W - lr 0.2 sqrt(max(R, C)) orthogonalize(U)

    The scale gives updates the same root mean square as AdamW's, so that AdamW's learning rate and weight decay can be
    reused. Weights of equal shape are orthogonalized in one batch. Under DDP and FSDP2 each rank orthogonalizes some of
    the matrices, and the ranks exchange the results, so every rank must call `step` with gradients for the same
    parameters.

    A parameter group has the key `algorithm`: 'muon' or 'adamw'. A group without this key is split: Muon updates its
    matrices, including embeddings, and AdamW updates the rest. A group with 'muon' may have the key `parts`: for each
    weight, the number of matrices stacked along its rows, such as 3 for fused queries, keys and values. Each of these
    matrices is orthogonalized separately. `muon_groups(model)` creates groups from a model's layers.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        adamw_lr: Learning rate of parameters updated by AdamW; `lr` by default.
        weight_decay: Decoupled weight decay of all parameters: each step multiplies weights by 1 - lr * weight_decay.
        momentum: Decay rate of Muon's momentum.
        nesterov: Use Nesterov momentum in Muon.
        newton_schulz_steps: Number of Newton-Schulz iterations per orthogonalization.
        newton_schulz_dtype: Data type of the orthogonalization; auto means bfloat16 on GPUs and the weights' dtype on
            CPUs.
        convolutions: Also apply Muon to weights with more than two dimensions, flattened to [out, in * height * width].
            This does not affect groups with the key `algorithm`.
        split_projections: Orthogonalize the matrices in a fused projection of queries, keys and values separately, as
            Jordan et al. recommend. Only used by `muon_groups`, which knows these layers.
        betas: Decay rates of AdamW's two moments.
        eps: Term that AdamW adds to the denominator.
        fused: Use the fused AdamW kernel for parameters updated by AdamW.

    Raises:
        UserError: A setting is out of range, or a group with `algorithm: muon` has a parameter that is not a matrix.
    """

    parameter_groups = staticmethod(muon_groups)
    """Function that returns a model's parameter groups; called when a recipe's optimizer is built."""

    @constrained
    def __init__(
        self,
        params: Iterable[Any],
        lr: Annotated[float, GreaterThan(0)] = 1e-3,
        *,
        adamw_lr: Annotated[float | None, GreaterThan(0), UPDATE] = None,
        weight_decay: Annotated[float, AtLeast(0)] = 0.01,
        momentum: Annotated[float, Between(0, 1), UPDATE] = 0.95,
        nesterov: Annotated[bool, UPDATE] = True,
        newton_schulz_steps: Annotated[int, AtLeast(1), UPDATE] = 5,
        newton_schulz_dtype: Annotated[Literal['auto', 'bfloat16', 'float32'], SAME_UPDATE] = 'auto',
        convolutions: Annotated[bool, OPTIMIZER_STATE] = True,
        split_projections: Annotated[bool, UPDATE] = True,
        betas: Annotated[tuple[float, float], Between(0, 1)] = (0.9, 0.999),
        eps: Annotated[float, AtLeast(0)] = 1e-8,
        fused: Annotated[bool | None, SAME_UPDATE] = None,
    ) -> None:
        if len(betas) != 2:
            raise UserError(f'betas: {list(betas)} has {len(betas)} numbers; give two')
        self.convolutions = convolutions
        self._parts: dict[int, tuple[int, ...]] = {}
        self.adamw_lr = lr if adamw_lr is None else adamw_lr
        defaults = {
            'lr': lr,
            'weight_decay': weight_decay,
            'momentum': momentum,
            'nesterov': nesterov,
            'newton_schulz_steps': newton_schulz_steps,
            'newton_schulz_dtype': newton_schulz_dtype,
            'betas': tuple(betas),
            'eps': eps,
            'fused': fused,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; a group without `algorithm` is split into matrices for Muon and the rest for AdamW."""
        given = param_group['params']
        items = [given] if isinstance(given, Tensor) else list(given)
        chosen = param_group.get('algorithm')
        if chosen not in (None, 'muon', 'adamw'):
            raise UserError(f'muon: a parameter group has algorithm {chosen!r}; use muon or adamw')
        self._keep_parts(param_group, [_shape(each) for each in items])
        wrong = [list(_shape(each)) for each in items if chosen == 'muon' and not is_matrix(_shape(each))]
        if wrong:
            raise UserError(
                f'muon: a parameter of shape {wrong[0]} is in a group with algorithm muon, but is not a matrix of at '
                'least two rows and columns; move it to a group with algorithm adamw'
            )
        parts: dict[str, list[Any]] = {'muon': [], 'adamw': []}
        for item in items:
            fits = is_matrix(_shape(item), convolutions=self.convolutions)
            parts[chosen or ('muon' if fits else 'adamw')].append(item)
        for algorithm, part in parts.items():
            if part:
                settings = {'lr': self.adamw_lr if algorithm == 'adamw' else self.defaults['lr']} | param_group
                settings |= {'params': part, 'algorithm': algorithm}
                super().add_param_group({key: value for key, value in settings.items() if key != 'parts'})

    def _keep_parts(self, param_group: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
        """Store a new group's `parts` in `self._parts`, by the index that the group will have in `param_groups`."""
        # Do not store `parts` in the group itself: a checkpoint restores the group's keys, but a run may change `parts`
        # on resume. Composer removes all groups for FSDP2 and adds them again in the same order, so their indices do
        # not change.
        parts = param_group.get('parts')
        if parts is None:
            return
        if param_group.get('algorithm') != 'muon' or len(parts) != len(shapes):
            raise UserError('muon: parts require a group with algorithm muon, and one number per weight')
        for number, shape in zip(parts, shapes, strict=True):
            if number < 1 or shape[0] % number:
                raise UserError(f'muon: the rows of a weight {list(shape)} do not divide into {number} equal matrices')
        self._parts[len(self.param_groups)] = tuple(parts)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            trained = [each for each in group['params'] if each.grad is not None]
            if group['algorithm'] == 'muon':
                parts = self._parts.get(index, (1,) * len(group['params']))
                numbers = [
                    number for weight, number in zip(group['params'], parts, strict=True) if weight.grad is not None
                ]
                self._update_matrices(group, trained, numbers)
            elif trained:
                self._update_by_adamw(group, trained)
        return loss

    def _update_matrices(self, group: dict[str, Any], weights: list[Tensor], parts: list[int]) -> None:
        """Update a group's weights with their orthogonalized momentum; weight i consists of parts[i] matrices."""
        if any(each.ndim < 2 for each in weights):
            # FSDP1 has replaced the weights with flat shards since the optimizer was built.
            raise UserError('muon: the matrices were flattened, as FSDP1 does; use FSDP2 or DDP')
        first = 0  # index of the batch's first matrix: matrices are dealt out to the ranks in turn
        for batch, number in _batches(weights, parts):
            self._update_batch(group, batch, first, parts=number)
            first += len(batch)

    def _update_batch(self, group: dict[str, Any], batch: list[Tensor], first: int, *, parts: int) -> None:
        """Update weights of equal shape on one device; each weight stacks the rows of `parts` matrices."""
        momentum, lr = group['momentum'], float(group['lr'])
        weights = [local_shard(each) for each in batch]
        rows, columns = _size(batch[0])
        gradients = [local_shard(each.grad) for each in batch if each.grad is not None]
        momenta = [local_shard(self._state(each, 'momentum_buffer')) for each in batch]
        _foreach_lerp_(momenta, gradients, 1 - momentum)
        updates = _foreach_lerp(gradients, momenta, momentum) if group['nesterov'] else momenta
        dtype = _dtype(group['newton_schulz_dtype'], weights[0])
        stack = torch.stack([each.reshape(-1, columns).to(dtype) for each in updates])
        del updates
        function = functools.partial(_orthogonalize_parts, parts=parts, steps=group['newton_schulz_steps'])
        directions = on_whole_matrices(function, stack, layout_of(batch[0]), rows=rows, first=first)
        directions = directions.to(weights[0].dtype, memory_format=torch.contiguous_format)
        _foreach_mul_(weights, 1 - lr * group['weight_decay'])
        shaped = [direction.reshape(weight.shape) for direction, weight in zip(directions, weights, strict=True)]
        _foreach_add_(weights, shaped, alpha=-lr * RMS_OF_ADAMW * math.sqrt(max(rows // parts, columns)))

    def _update_by_adamw(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        fused = bool(group['fused'])
        for weight in weights:
            state = self.state[weight]
            if 'step' not in state:
                # Fused kernels need the step counter on the weights' device, other implementations on the CPU.
                double = torch.get_default_dtype() == torch.float64 and not fused
                dtype, device = torch.float64 if double else torch.float32, weight.device if fused else 'cpu'
                state['step'] = torch.zeros((), dtype=dtype, device=device)
        # Pass this device's shards: operations on many DTensors have ten times the host overhead (see AdamW).
        adamw(
            [local_shard(each) for each in weights],
            [local_shard(each.grad) for each in weights if each.grad is not None],
            [local_shard(self._state(each, 'exp_avg')) for each in weights],
            [local_shard(self._state(each, 'exp_avg_sq')) for each in weights],
            [],
            [self.state[each]['step'] for each in weights],
            fused=group['fused'],
            amsgrad=False,
            beta1=group['betas'][0],
            beta2=group['betas'][1],
            lr=group['lr'],
            weight_decay=group['weight_decay'],
            eps=group['eps'],
            maximize=False,
        )

    def _state(self, weight: Tensor, name: str) -> Tensor:
        """Return a state tensor of a weight, sharded like the weight; zeros before the first step."""
        state = self.state[weight]
        if name not in state:
            state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state[name]


def _orthogonalize_parts(weights_NRC: Tensor, *, parts: int, steps: int) -> Tensor:
    """Orthogonalize the `parts` matrices that are stacked along the rows of each weight."""
    rows, columns = weights_NRC.shape[-2:]
    return orthogonalize(weights_NRC.reshape(-1, rows // parts, columns), steps=steps).reshape(weights_NRC.shape)


def _batches(weights: list[Tensor], parts: list[int]) -> Iterator[tuple[list[Tensor], int]]:
    """Yield batches of weights of equal shape, with their common number of `parts`; the same batches on all ranks."""
    groups: dict[Any, list[Tensor]] = {}
    for weight, number in zip(weights, parts, strict=True):
        sharding = (weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else None
        groups.setdefault((_size(weight), number, weight.dtype, weight.device, sharding), []).append(weight)
    for (_, number, *_), same in groups.items():
        limit = MAX_BATCH_ELEMENTS['cpu' if same[0].device.type == 'cpu' else 'cuda']
        each_rank = max(1, limit // same[0].numel())
        length = each_rank * layout_of(same[0]).ranks
        yield from ((same[start : start + length], number) for start in range(0, len(same), length))


def _size(weight: Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a weight viewed as a matrix; if it is sharded, of the whole weight."""
    return weight.shape[0], math.prod(weight.shape[1:])


def _shape(item: Tensor | tuple[str, Tensor]) -> tuple[int, ...]:
    return tuple((item if isinstance(item, Tensor) else item[1]).shape)


def _dtype(name: str, weight: Tensor) -> torch.dtype:
    if name == 'auto':
        return weight.dtype if weight.device.type == 'cpu' else torch.bfloat16
    return {'bfloat16': torch.bfloat16, 'float32': torch.float32}[name]
