"""Activation memory: bytes that a forward pass keeps for the backward pass, counted on fake tensors without data."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from diffusion.compatibility.private_names import (
    FakeTensorMode,
    TorchDispatchMode,
    private_attribute,
    tree_leaves,
    tree_map,
)
from diffusion.errors import UserError
from diffusion.models.flops import empty_copy

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments for a forward pass."""
BATCHES = 2, 4
"""Batch sizes of the two counted passes; their difference gives the bytes per sample. With a batch size of 1, some
transposed tensors are contiguous, so their copies would not be counted."""
FLOAT32_ON_CUDA = frozenset(
    ['group_norm', 'layer_norm', 'softmax', 'log_softmax', 'pow', '__pow__', 'rsqrt', 'exp', 'log', 'softplus']
)
"""Functions that denoisers use and that autocast computes in float32 on CUDA but not on the CPU."""
_WITH_FLOPS = {*flop_registry, private_attribute(torch.ops.aten, '_scaled_dot_product_flash_attention_for_cpu')}


@dataclass(frozen=True)
class Activations:
    """Activation memory of a module: the bytes that its forward pass keeps for the backward pass.

    Fields `kept...` are activations, in bytes per sample. Fields `copies...` are autocast's 16-bit copies of weights,
    in bytes that do not depend on the batch size.
    """

    kept: int
    """Bytes per sample without activation checkpointing."""
    kept_between: int
    """Bytes per sample kept outside of the blocks under activation checkpointing, including the blocks' inputs."""
    kept_inside: int
    """Bytes per sample kept inside the largest block while activation checkpointing recomputes it."""
    copies: int
    """Bytes of weight copies without activation checkpointing."""
    copies_between: int
    """Bytes of weight copies kept outside of the blocks under activation checkpointing."""
    copies_inside: int
    """Bytes of weight copies kept while activation checkpointing recomputes a block, maximum over the blocks."""
    largest: int
    """Bytes per sample of the largest intermediate tensor."""

    def __add__(self, other: 'Activations') -> 'Activations':
        """Return the memory of two modules in a pass: sums, or maxima for `kept_inside`, `copies_inside`, `largest`."""
        transient = ('kept_inside', 'copies_inside', 'largest')
        first, second = vars(self), vars(other)
        return Activations(
            **{key: max(first[key], second[key]) if key in transient else first[key] + second[key] for key in first}
        )


def count_activations(module: nn.Module, inputs: Callable[[int], Inputs], precision: str) -> Activations:
    """Return the activation memory of a module, counted in forward passes of a copy whose tensors hold no data.

    Args:
        module: Module to measure. Its blocks are the submodules selected by its `fsdp_wrap_fn`; these are also what the
            recipe's `speed.compile` compiles.
        inputs: Function from a batch size to the positional and keyword arguments of the forward pass.
        precision: One of
            float32: no autocast;
            half: 16-bit autocast as on CUDA, with norms in float32;
            half+low_precision_norms: the same with norms in 16 bits (speed.low_precision_norms);
            float32+compile, half+compile: with compiled blocks, which recompute cheap results instead of keeping them;
            norms are computed in float32, but nothing in float32 is kept for them.
    """
    flags = set(precision.split('+'))
    # Use fake CPU tensors: the meta device lacks fused attention, and its replacement keeps all L x L attention weights
    # (70 MiB per sample, where a GPU keeps 8 MiB).
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = empty_copy(module, 'cpu').train()
        small, large = (_record(copied, *inputs(batch), flags) for batch in BATCHES)
    # Activations grow with the batch size, but autocast's weight copies do not, so a line through two passes separates
    # them. A single pass would count the copies, up to 1.7 GB for SD2, as activations of its samples.
    span = BATCHES[1] - BATCHES[0]

    def line(few: int, many: int) -> tuple[int, int]:
        """Return the bytes per sample and the constant bytes, given the bytes for the small and the large batch."""
        slope = (many - few) // span
        return slope, few - BATCHES[0] * slope

    kept, constant = line(small.total, large.total)
    between, constant_between = line(small.between, large.between)
    blocks = [line(few, many) for few, many in zip(small.blocks, large.blocks, strict=True)] or [(0, 0)]
    outputs = [line(few, many)[0] for few, many in zip(small.outputs, large.outputs, strict=True)]
    return Activations(
        kept=kept,
        kept_between=between,
        kept_inside=max(slope for slope, _ in blocks),
        copies=constant,
        copies_between=constant_between,
        copies_inside=max(rest for _, rest in blocks),
        largest=max(outputs, default=0),
    )


@dataclass
class _Recording:
    """Record of the tensor storages that a forward pass keeps for the backward pass: sizes in bytes, by address."""

    weights: set[int]
    """Addresses of parameters and buffers, which are not activations."""
    outside: dict[int, int] = field(default_factory=dict)
    """Sizes in bytes of the storages kept outside checkpointed blocks, by address."""
    inside: list[dict[int, int]] = field(default_factory=list)
    """One dict per checkpointed block: sizes in bytes, by address, of the storages kept if it were not checkpointed."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Sizes in bytes of the inputs of checkpointed blocks, which are kept for recomputing the blocks, by address."""
    outputs: list[int] = field(default_factory=list)
    """Bytes of the largest output of each operation, in order of execution."""
    flops_seen: int = 0
    """Number of operations so far for which torch counts FLOPs."""
    fused_depth: int = 0
    """Number of nested compiled blocks that the pass is currently inside."""
    recomputable: set[int] = field(default_factory=set)
    """Addresses of storages that a compiled block can recompute in the backward pass."""
    _alive: list[Any] = field(default_factory=list)
    _block: dict[int, int] | None = None

    @property
    def total(self) -> int:
        """Total bytes that the recorded forward pass keeps for the backward pass without activation checkpointing."""
        # Take a union by address: if several functions save a tensor, such as the input of q, k and v, it is one
        # storage.
        everything = dict(self.outside)
        for block in self.inside:
            everything |= block
        return sum(everything.values())

    @property
    def between(self) -> int:
        """Bytes kept outside the model's blocks under activation checkpointing, including the blocks' inputs."""
        return sum((self.outside | self.inputs).values())

    @property
    def blocks(self) -> list[int]:
        """Additional bytes that each block keeps while activation checkpointing recomputes it."""
        # The inputs stay allocated while the block is recomputed, but `between` already counts them.
        known = self.outside | self.inputs
        return [sum(count for key, count in block.items() if key not in known) for block in self.inside]

    def key(self, tensor: Tensor) -> int:
        """Return the address of a tensor's storage, which identifies the storage in this record."""
        storage = tensor.untyped_storage()
        # Keep the storage alive: otherwise its address could be reused, and two storages would count as one.
        self._alive.append(storage)
        return private_attribute(storage, '_cdata')

    def keep(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves for the backward pass, and return the tensor unchanged."""
        self._add(tensor, self.outside if self._block is None else self._block)
        return tensor

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
        """Replacement of torch.utils.checkpoint.checkpoint that records a block's inputs and the tensors it keeps."""
        # The real function would only save the inputs in the forward pass. Running the block once without checkpointing
        # shows what it keeps while it is recomputed.
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._add(tensor, self.inputs)
        assert self._block is None, 'checkpointed blocks do not nest'
        self._block = {}  # `keep` records here until the block ends
        self.inside.append(self._block)
        out = function(*args)
        self._block = None
        return out

    def _add(self, tensor: Tensor, kept: dict[int, int]) -> None:
        if (key := self.key(tensor)) not in self.weights:
            kept[key] = tensor.untyped_storage().nbytes()


class _Operations(TorchDispatchMode):
    """Dispatch mode that records the bytes of each operation's largest output, and counts operations with FLOPs."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recording.flops_seen += func.overloadpacket in _WITH_FLOPS
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        # Skip operations without tensor outputs, such as queries of a tensor's device: torch caches some, so they would
        # be missing in the second pass, and the outputs of both passes are compared one by one.
        if sizes:
            self.recording.outputs.append(max(sizes))
        return out


class _AsOnGPU(TorchFunctionMode):
    """Function mode that makes a pass on the CPU keep the tensors that CUDA's autocast and compiled blocks keep."""

    # torch.compile's partitioner keeps the inputs and results of operations that it does not fuse (convolutions, matrix
    # products, attention), and recomputes the fused ones. Running the partitioner takes minutes for a U-Net. The rule
    # in `_fused` costs nothing and is within 3% of the partitioner's memory: the result of a fused function is
    # recomputable if its input is kept or recomputable, and a recomputable tensor is only kept if a function with FLOPs
    # needs it.

    def __init__(self, recording: _Recording, *, float32_norms: bool) -> None:
        super().__init__()
        self.recording = recording
        self.float32_norms = float32_norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.float32_norms and getattr(func, '__name__', '') in FLOAT32_ON_CUDA:
            args, kwargs = tree_map(_to_float32, (args, kwargs))
        return self._fused(func, args, kwargs) if self.recording.fused_depth else func(*args, **kwargs)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a torch function inside a block, and record the tensors that the compiled block would keep for it."""
        recording, saved = self.recording, list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        # Autograd calls only the innermost hooks: `pack` hides the outer ones, so call `recording.keep` below.
        before = recording.flops_seen
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = func(*args, **kwargs)
        # A kernel with FLOPs reads its saved inputs from memory, so they are kept even if they could be recomputed. A
        # fused function's inputs are recomputed together with the function.
        has_flops = recording.flops_seen > before
        for tensor in saved:
            if has_flops or recording.key(tensor) not in recording.recomputable:
                recording.keep(tensor)
        inputs = {recording.key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # A result can only be recomputed from an input that exists in the backward pass. A function that saves none of
        # its inputs, such as an addition, does not guarantee this.
        if not has_flops and inputs & {recording.key(tensor) for tensor in saved} - recording.weights:
            results = {recording.key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
            # A view shares its input's storage, so it is kept if and only if its input is.
            recording.recomputable |= results - inputs
        return out


def _to_float32(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


def _record(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], flags: set[str]) -> _Recording:
    """Run a forward pass of a module, and return a record of the tensors that autograd keeps for the backward pass."""
    # Exclude the weights, which autograd also saves. Autocast's weight copies are new storages and are counted.
    recording = _Recording(
        {private_attribute(tensor.untyped_storage(), '_cdata') for tensor in (*module.parameters(), *module.buffers())}
    )
    with contextlib.ExitStack() as stack:
        if enable := getattr(module, 'enable_gradient_checkpointing', None):
            # A single pass gives the values with and without checkpointing, since `checkpoint` separately records what
            # blocks keep.
            enable()
            # diffusers looks up the function at each call, so patching it here is sufficient.
            stack.enter_context(mock.patch.object(torch.utils.checkpoint, 'checkpoint', recording.checkpoint))
        if 'compile' in flags:
            stack.enter_context(_compiled_blocks(module, recording))
        # bfloat16 also stands for float16, which has the same size. Unlike CUDA's autocast, the CPU's leaves norms in
        # the precision of their input; _AsOnGPU corrects this.
        stack.enter_context(torch.autocast('cpu', torch.bfloat16, enabled='half' in flags))
        if flags != {'float32'}:
            stack.enter_context(_AsOnGPU(recording, float32_norms=flags == {'half'}))
        stack.enter_context(_Operations(recording))
        stack.enter_context(saved_tensors_hooks(recording.keep, lambda tensor: tensor))
        module(*args, **kwargs)
    if enable is not None and not recording.inside:
        raise UserError(
            f'{type(module).__name__}: enable_gradient_checkpointing() does not reach its blocks, so that their memory '
            'cannot be counted; in forward(), call torch.utils.checkpoint.checkpoint(block, ...) by this full name'
        )
    return recording


@contextlib.contextmanager
def _compiled_blocks(module: nn.Module, recording: _Recording) -> Iterator[None]:
    """Context in which `recording.fused_depth` counts the compiled blocks that the forward pass is inside."""

    def enter(*_: Any) -> None:
        recording.fused_depth += 1

    def leave(*_: Any) -> None:
        recording.fused_depth -= 1

    handles = []
    for block in blocks_of(module):
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return a module's blocks, selected by its `fsdp_wrap_fn`; FSDP and torch.compile treat each block as a unit."""
    is_selected: Any = getattr(module, 'fsdp_wrap_fn', None)
    return [] if is_selected is None else [part for part in module.modules() if is_selected(part)]
