"""A forward pass on paper: what each layer holds, computes, and keeps for the backward pass, of one sample.

The networks of this package are written as calls on a Tape, as their forward pass is in torch. So one text gives
parameters, FLOPs and the memory of activations, without torch, for any width, depth and size.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Literal

FLOAT32 = 4
HALF = 2


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor of one sample: [C, H, W] of a picture, [L, D] of tokens, [D] of the timestep.

    Two are the same only if they are one tensor: what several layers keep is kept once.
    """

    shape: tuple[int, ...]
    width: int
    """Bytes an element."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.width


@dataclass(frozen=True)
class Precision:
    """How a pass computes, as autocast decides it."""

    compute: int = HALF
    """Bytes an element of what convolutions, products and attention take and give."""
    norms: int = HALF
    """The same of GroupNorm and LayerNorm; CUDA's autocast widens these to float32 unless told otherwise."""


FULL = Precision(FLOAT32, FLOAT32)
AMP = Precision(HALF, FLOAT32)
AMP_LOW_NORMS = Precision(HALF, HALF)

Kind = Literal['conv', 'linear', 'attention']


@dataclass
class Tape:
    """Adds up a pass. FLOPs count a multiplication and an addition as 2, as torch's FlopCounterMode does."""

    precision: Precision = AMP_LOW_NORMS
    compiles: bool = False
    """Whether torch.compile makes the units below, and so recomputes in the backward pass what is cheap."""
    parameters: int = 0
    matrices: int = 0
    """Parameters of convolutions and products: those that autocast copies to its dtype."""
    matrices_outside: int = 0
    """Those of them outside of recomputed blocks, whose copies stay until the backward pass."""
    flops: Counter[Kind] = field(default_factory=Counter)
    largest: int = 0
    """Bytes of the largest tensor on the way."""
    largest_unit: int = 0
    """Parameters of the largest part that FSDP gathers on its own."""
    in_units: int = 0
    """Parameters of all such parts; the rest is gathered together."""
    _kept: dict[Activation, None] = field(default_factory=dict)
    _kept_outside: dict[Activation, None] = field(default_factory=dict)
    _block: dict[Activation, None] | None = None
    _fuses: bool = False
    _largest_block: int = 0

    @property
    def forward_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def kept_bytes(self) -> int:
        """What autograd keeps for the backward pass."""
        return sum(tensor.bytes for tensor in self._kept)

    @property
    def kept_bytes_recomputing(self) -> int:
        """The same where blocks are recomputed: what stands between blocks, and the inside of the largest one."""
        return sum(tensor.bytes for tensor in self._kept_outside) + self._largest_block

    @contextmanager
    def recomputed(self, *inputs: Activation) -> Iterator[None]:
        """A block that activation checkpointing recomputes from its inputs."""
        assert self._block is None, 'blocks do not nest'
        for tensor in inputs:
            self._kept_outside[tensor] = None
        self._block = {}
        yield
        inside = sum(tensor.bytes for tensor in self._block if tensor not in self._kept_outside)
        self._largest_block = max(self._largest_block, inside)
        self._block = None

    @contextmanager
    def unit(self) -> Iterator[None]:
        """A part that FSDP gathers, and torch.compile compiles, on its own."""
        before, self._fuses = self.parameters, self.compiles
        yield
        self._fuses = False
        self.in_units += self.parameters - before
        self.largest_unit = max(self.largest_unit, self.parameters - before)

    # -- layers --

    def conv(self, x: Activation, channels: int, *, kernel: int = 3, stride: int = 1, padding: int = 1) -> Activation:
        """A convolution with bias; padding is of both sides together halved, as torch's."""
        x = self._cast(x, self.precision.compute)
        inputs, height, width = x.shape
        size = [(side + 2 * padding - kernel) // stride + 1 for side in (height, width)]
        self._hold(channels * inputs * kernel * kernel, channels)
        self.flops['conv'] += 2 * channels * inputs * kernel * kernel * size[0] * size[1]
        self._keep(x)
        return self._new((channels, *size), self.precision.compute)

    def linear(self, x: Activation, features: int, *, bias: bool = True) -> Activation:
        x = self._cast(x, self.precision.compute)
        inputs = x.shape[-1]
        self._hold(features * inputs, features if bias else 0)
        self.flops['linear'] += 2 * features * x.elements
        self._keep(x)
        return self._new((*x.shape[:-1], features), self.precision.compute)

    def group_norm(self, x: Activation, groups: int) -> Activation:
        x = self._cast(x, self.precision.norms)
        self.parameters += 2 * x.shape[0]
        self._keep(x)
        self._keep(Activation((2 * groups,), max(x.width, FLOAT32)))
        return self._new(x.shape, x.width)

    def layer_norm(self, x: Activation) -> Activation:
        x = self._cast(x, self.precision.norms)
        self.parameters += 2 * x.shape[-1]
        self._keep(x)
        self._keep(Activation((2 * x.shape[0],), FLOAT32))
        return self._new(x.shape, x.width)

    def activate(self, x: Activation) -> Activation:
        """SiLU, GELU and the like, which keep their input; compiled, they make it anew from what the norm keeps."""
        if not self._fuses:
            self._keep(x)
        return self._new(x.shape, x.width)

    def geglu(self, x: Activation) -> Activation:
        """The first half times GELU of the second (Shazeer 2020)."""
        self._keep(x)
        half = (*x.shape[:-1], x.shape[-1] // 2)
        if not self._fuses:
            self._keep(self._new(half, x.width))
        return self._new(half, x.width)

    def attention(self, query: Activation, key: Activation, value: Activation, *, heads: int) -> Activation:
        """Fused scaled dot-product attention: keeps no matrix of weights, but its output and a number a row."""
        for tensor in (query, key, value):
            self._keep(tensor)
        tokens, others, width = query.shape[0], key.shape[0], query.shape[1]
        self.flops['attention'] += 4 * tokens * others * width
        self._keep(Activation((heads * tokens,), FLOAT32))
        output = self._new((tokens, width), query.width)
        self._keep(output)
        return output

    def embedding(self, rows: int, features: int) -> None:
        self.parameters += rows * features

    # -- what costs nothing but a tensor --

    def add(self, x: Activation, y: Activation) -> Activation:
        return self._new(max(x.shape, y.shape, key=prod), max(x.width, y.width))

    def concatenate(self, x: Activation, y: Activation) -> Activation:
        return self._new((x.shape[0] + y.shape[0], *x.shape[1:]), max(x.width, y.width))

    def resize(self, x: Activation, size: tuple[int, ...]) -> Activation:
        return self._new((x.shape[0], *size), x.width)

    def reshape(self, x: Activation, shape: tuple[int, ...]) -> Activation:
        """The same numbers in another order, copied."""
        return self._new(shape, x.width)

    # -- bookkeeping --

    def _hold(self, matrix: int, bias: int) -> None:
        self.parameters += matrix + bias
        self.matrices += matrix + bias
        if self._block is None:
            self.matrices_outside += matrix + bias

    def _cast(self, x: Activation, width: int) -> Activation:
        return x if x.width == width else self._new(x.shape, width)

    def _keep(self, x: Activation) -> None:
        self._kept[x] = None
        (self._kept_outside if self._block is None else self._block)[x] = None

    def _new(self, shape: tuple[int, ...], width: int) -> Activation:
        made = Activation(shape, width)
        self.largest = max(self.largest, made.bytes)
        return made
