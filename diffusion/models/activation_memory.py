"""Bytes that a forward pass keeps for the backward pass, counted by running it on fake tensors, which hold no data.

The tensors are fake CPU tensors and not on the meta device: that has no fused attention, and its replacement keeps all
L x L attention weights (70 MiB per sample where a GPU keeps 8).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from diffusion.models.flops import empty_copy

BATCHES = 2, 4
"""Batch sizes of two passes, whose difference is what one sample keeps. A batch of 1 keeps less: some of its transposed
tensors are contiguous, and not copied."""
FLOAT32_ON_CUDA = frozenset(
    ['group_norm', 'layer_norm', 'softmax', 'log_softmax', 'pow', '__pow__', 'rsqrt', 'exp', 'log', 'softplus']
)
"""Functions that CUDA's autocast computes in float32 and the CPU's does not, as far as denoisers use them."""
_WITH_FLOPS = {*flop_registry, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu}


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass keeps: activations per sample, and copies of weights in 16 bits, whatever the batch."""

    kept: int
    kept_between: int
    """Under activation checkpointing: kept between blocks, their inputs included."""
    kept_inside: int
    """Under activation checkpointing: kept inside of the largest block, while it is recomputed."""
    copies: int
    copies_between: int
    copies_inside: int
    largest: int
    """The largest tensor on the way, per sample."""

    def __add__(self, other: 'Activations') -> 'Activations':
        """Both parts of one pass: what is kept adds up, but for what is there for one block at a time."""
        largest = ('kept_inside', 'copies_inside', 'largest')
        mine, theirs = vars(self), vars(other)
        return Activations(
            **{key: max(mine[key], theirs[key]) if key in largest else mine[key] + theirs[key] for key in mine}
        )


def count_activations(module: nn.Module, inputs: Callable[[int], tuple[Any, ...]], precision: str) -> Activations:
    """Run the forward pass of an empty copy of a module, and count what autograd keeps of it.

    Args:
        module: Submodules for which its `fsdp_wrap_fn` is true are those that `speed.compile` compiles.
        inputs: Makes the arguments for a batch size.
        precision: One of
            float32: no autocast;
            half: autocast to 16 bits as CUDA does it, which computes norms in float32;
            half+low_precision_norms: the same with norms in 16 bits (speed.low_precision_norms);
            float32+compile, half+compile: with compiled blocks, which keep no result that is cheap to compute again
            (and so compute norms in float32 without keeping anything in float32).
    """
    flags = set(precision.split('+'))
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = empty_copy(module, 'cpu').train()
        small, large = (_record(copied, inputs(batch), flags) for batch in BATCHES)
    span = BATCHES[1] - BATCHES[0]

    def line(few: int, many: int) -> tuple[int, int]:
        """Bytes per sample, and bytes that do not depend on the batch."""
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
    """Storages that a forward pass keeps, in bytes by address."""

    own: set[int]
    """Addresses of parameters and buffers, which are no activations."""
    outside: dict[int, int] = field(default_factory=dict)
    """Kept between checkpointed blocks."""
    inside: list[dict[int, int]] = field(default_factory=list)
    """Kept inside of each checkpointed block, where it is not recomputed."""
    inputs: dict[int, int] = field(default_factory=dict)
    """Inputs of checkpointed blocks, kept where these are recomputed."""
    outputs: list[int] = field(default_factory=list)
    """Bytes of the largest output of each operation, in order."""
    flops_seen: int = 0
    """Operations so far that torch counts FLOPs for."""
    fused_depth: int = 0
    """How many compiled blocks the pass is inside of."""
    recomputable: set[int] = field(default_factory=set)
    """Storages that a compiled block computes again in the backward pass."""
    _alive: list[Any] = field(default_factory=list)
    _block: dict[int, int] | None = None

    @property
    def total(self) -> int:
        everything = dict(self.outside)
        for block in self.inside:
            everything |= block
        return sum(everything.values())

    @property
    def between(self) -> int:
        return sum((self.outside | self.inputs).values())

    @property
    def blocks(self) -> list[int]:
        known = self.outside | self.inputs
        return [sum(count for key, count in block.items() if key not in known) for block in self.inside]

    def key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.append(storage)  # so that no later storage gets its address
        return storage._cdata

    def keep(self, tensor: Tensor) -> Tensor:
        self._add(tensor, self.outside if self._block is None else self._block)
        return tensor

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
        """Stand in for torch.utils.checkpoint.checkpoint: record the block's inputs and its inside apart."""
        for tensor in tree_leaves(args):
            if isinstance(tensor, Tensor):
                self._add(tensor, self.inputs)
        assert self._block is None, 'checkpointed blocks do not nest'
        self._block = {}
        self.inside.append(self._block)
        out = function(*args)
        self._block = None
        return out

    def _add(self, tensor: Tensor, kept: dict[int, int]) -> None:
        if (key := self.key(tensor)) not in self.own:
            kept[key] = tensor.untyped_storage().nbytes()


class _Operations(TorchDispatchMode):
    """Notes the size of every operation's largest output, and which operations have FLOPs."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.recording.flops_seen += func._overloadpacket in _WITH_FLOPS
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if sizes:  # others are questions, for a tensor's device, which caches answer
            self.recording.outputs.append(max(sizes))
        return out


class _AsOnGPU(TorchFunctionMode):
    """Lets torch's functions keep what they would keep on a GPU: CUDA's autocast, and compiled blocks.

    torch.compile's partitioner keeps the inputs and results of what it does not fuse (convolutions, products,
    attention), and computes again what was fused. Running the partitioner itself takes minutes for a U-Net. This rule
    takes nothing, and is within 3 % of it: a fused function whose input is kept (or recomputable) has a recomputable
    result, and a recomputable tensor is kept only for a function with FLOPs.
    """

    def __init__(self, recording: _Recording, *, wide_norms: bool) -> None:
        super().__init__()
        self.recording = recording
        self.wide_norms = wide_norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wide_norms and getattr(func, '__name__', '') in FLOAT32_ON_CUDA:
            args, kwargs = tree_map(_widened, (args, kwargs))
        return self._fused(func, args, kwargs) if self.recording.fused_depth else func(*args, **kwargs)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        recording, saved = self.recording, list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        before = recording.flops_seen
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = func(*args, **kwargs)
        has_flops = recording.flops_seen > before
        for tensor in saved:
            if has_flops or recording.key(tensor) not in recording.recomputable:
                recording.keep(tensor)
        inputs = {recording.key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        if not has_flops and inputs & {recording.key(tensor) for tensor in saved} - recording.own:
            results = {recording.key(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
            recording.recomputable |= results - inputs  # a view is as good as what it is a view of
        return out


def _widened(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if narrow else value


def _record(module: nn.Module, args: tuple[Any, ...], flags: set[str]) -> _Recording:
    recording = _Recording({tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())})
    with contextlib.ExitStack() as stack:
        if enable := getattr(module, 'enable_gradient_checkpointing', None):
            enable()
            stack.enter_context(mock.patch.object(torch.utils.checkpoint, 'checkpoint', recording.checkpoint))
        if 'compile' in flags:
            stack.enter_context(_compiled_blocks(module, recording))
        # bfloat16 stands for float16 as well; the CPU's autocast leaves norms in the precision of their input.
        stack.enter_context(torch.autocast('cpu', torch.bfloat16, enabled='half' in flags))
        if flags != {'float32'}:
            stack.enter_context(_AsOnGPU(recording, wide_norms=flags == {'half'}))
        stack.enter_context(_Operations(recording))
        stack.enter_context(saved_tensors_hooks(recording.keep, lambda tensor: tensor))
        module(*args)
    return recording


@contextlib.contextmanager
def _compiled_blocks(module: nn.Module, recording: _Recording) -> Iterator[None]:
    """Track how deep the pass is in compiled blocks."""

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
    """The submodules that FSDP gathers, and torch.compile compiles, on their own: by the module's `fsdp_wrap_fn`."""
    chosen: Any = getattr(module, 'fsdp_wrap_fn', None)
    return [] if chosen is None else [part for part in module.modules() if chosen(part)]
