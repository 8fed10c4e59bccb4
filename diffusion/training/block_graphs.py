"""CUDA graphs of a denoiser's blocks: the host launches two graphs per block instead of hundreds of kernels.

A current GPU computes a microbatch of 16 images faster than the host can launch its kernels. A CUDA graph is a recorded
sequence of kernels that a single call launches. Using one graph per block, instead of one for the whole step, preserves
everything that happens between blocks: DDP reduces the gradients of a block while the next block is computed, and hooks
run.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from diffusion.compatibility.private_names import private_attribute, tree_flatten, tree_unflatten
from diffusion.config.recipe import MAX_GRAPH_SHAPES
from diffusion.errors import UserError

log = logging.getLogger(__name__)

TO_FIX = 'To fix: speed.cuda_graphs=false'

Signature = tuple[object, ...]
_version = attrgetter('_version')


class BlockGraphs:
    """Runs a denoiser's blocks as CUDA graphs during training.

    For each input shape, the first forward pass runs normally and records the blocks' arguments. Before the second
    pass, the forward and backward pass of each block are captured; from then on they are replayed. Three kinds of
    passes never use graphs: passes without gradients, on a CPU, or with input shapes after the first MAX_GRAPH_SHAPES.
    The kernels are the same with and without graphs.

    A graph reads and writes fixed memory addresses. Weights should be changed in place, as optimizers do; if they have
    moved, the graphs are captured again. The next forward pass overwrites the tensors returned by a block.

    Args:
        denoiser: The denoiser, before DDP wraps it.
        blocks: Its blocks, in any order.
    """

    def __init__(self, denoiser: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.replays = 0
        """Number of forward passes replayed so far."""
        self._passes: dict[Signature, _Pass] = {}
        self._current: _Pass | None = None
        self._memory = _SharedMemory()
        self._said: set[str] = set()
        for block in blocks:
            self._wrap(block)
        denoiser.register_forward_pre_hook(self._begin, with_kwargs=True)
        denoiser.register_forward_hook(self._end)

    def _wrap(self, block: nn.Module) -> None:
        """Replace a block's `forward`: in a pass with graphs, `_Pass.run` records its arguments or replays it."""
        plain = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._current is None:
                return plain(*args, **kwargs)
            return self._current.run(block, plain, args, kwargs)

        block.forward = forward

    def _begin(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start a forward pass of the denoiser: choose if blocks run normally, record arguments, or are replayed."""
        self._current = None
        leaves = leaves_of(args, kwargs)
        if not denoiser.training or not torch.is_grad_enabled() or not can_capture(leaves):
            return
        key = signature(leaves)
        found = self._passes.get(key)
        if found is None or not found.is_noted:  # not noted: the pass that recorded the arguments failed, so repeat it
            if key in self._passes or len(self._passes) < MAX_GRAPH_SHAPES:
                self._passes[key] = self._current = _Pass(self._memory)
            else:
                self._say(f'more than {MAX_GRAPH_SHAPES} shapes of inputs: other shapes run without graphs')
        elif self._memory.in_use:
            self._say(
                'a forward pass begins before the backward pass of the last one has ended: it runs without graphs'
            )
        else:
            found.start()
            self.replays += 1
            self._current = found

    def _end(self, *_: object) -> None:
        if self._current is not None:
            self._current.end()
        self._current = None

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log.warning('speed.cuda_graphs: %s', message)


class _Replayed:
    """A replayed forward pass. The autograd graph of its results refers to it, so it is freed together with them."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        """Indices of the blocks whose backward pass is pending, in forward order: the last entry runs next."""


class _SharedMemory:
    """Memory shared by all graphs: the pool for their intermediate results, and the gradients of the weights.

    The pool's contents are valid for one microbatch at a time, from its forward to its backward pass.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.gradients: dict[tuple[nn.Module, nn.Parameter], Tensor] = {}
        self._user: weakref.ref[_Replayed] | None = None

    @property
    def in_use(self) -> bool:
        """True while the backward pass of a replayed forward pass may still come; False once it ran or cannot run."""
        user = None if self._user is None else self._user()
        return user is not None and bool(user.waiting)

    def take(self) -> _Replayed:
        user = _Replayed()
        self._user = weakref.ref(user)
        return user


class _Pass:
    """Block calls in a forward pass with inputs of one shape, in order of execution."""

    def __init__(self, memory: _SharedMemory) -> None:
        self.is_noted = False
        """True after a forward pass that recorded the arguments of all blocks."""
        self._is_captured = False
        self._memory = memory
        self._calls: list[_Call] = []
        self._next = 0
        self._replayed: _Replayed | None = None

    @property
    def _graphed(self) -> list['_Call']:
        """Calls that run as graphs: all except those to frozen blocks before the first trained block."""
        return [each for each in self._calls if each.has_gradients]

    def start(self) -> None:
        """Begin a replayed forward pass; before the first one, and when weights have moved, capture the graphs."""
        if self._is_captured and any(each.has_moved() for each in self._graphed):
            log.warning('speed.cuda_graphs: weights have moved in memory, so their graphs are captured again')
            self._is_captured = False
        if not self._is_captured:
            self._capture()
            self._is_captured = True
        self._next, self._replayed = 0, self._memory.take()

    def end(self) -> None:
        self.is_noted, self._replayed = True, None

    def run(self, block: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block in this pass: in the first pass record its arguments and run it normally, later replay it."""
        leaves = leaves_of(args, kwargs)
        if not self.is_noted:
            self._calls.append(_Call(block, plain, args, kwargs, self._memory))
            return plain(*args, **kwargs)
        place, self._next = self._next, self._next + 1
        call = self._calls[place] if place < len(self._calls) else None
        if call is None or call.block is not block or call.signature != signature(leaves):
            raise UserError(
                f'speed.cuda_graphs: the forward pass runs {type(block).__name__} with other arguments, or in another '
                f'order, than when it was captured. {TO_FIX}'
            )
        if not call.has_gradients:
            return plain(*args, **kwargs)
        assert self._replayed is not None
        self._replayed.waiting.append(place)
        inputs = [each for each in leaves if isinstance(each, Tensor)]
        outputs: Any = _Replay.apply(call, self._replayed, place, *inputs, *call.weights)
        return call.result(outputs)

    def _capture(self) -> None:
        with capturing(self._memory):
            for each in self._graphed:
                each.warm_up()
            # A graph reuses memory from the intermediate results of graphs captured earlier, so capture them in the
            # order in which a step replays them.
            for each in self._graphed:
                each.capture_forward()
            for each in reversed(self._graphed):
                each.capture_backward()


class _Call:
    """A block's forward and backward pass for arguments of one shape; `plain` is the block's original `forward`."""

    def __init__(
        self,
        block: nn.Module,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        memory: _SharedMemory,
    ) -> None:
        leaves, structure = tree_flatten((args, dict(kwargs)))
        self.block = block
        self.signature = signature(leaves)
        self.weights = [each for each in block.parameters() if each.requires_grad]
        self._plain, self._structure, self._memory = plain, structure, memory
        self._tensors = [*block.parameters(), *block.buffers()]
        self._places: list[int] = []
        # Autograd accumulates a weight's gradient in the stream of its first use. For the real weights, which DDP and
        # earlier passes have used, that is the default stream, and a capture must not wait for it. Therefore use
        # aliases.
        self._aliases = {weight: nn.Parameter(weight.detach()) for weight in self.weights}
        # The graphs read their arguments from these tensors; a replay copies the actual arguments into them.
        self._leaves = [
            torch.zeros_like(each).requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
            for each in leaves
        ]
        self._inputs = [each for each in self._leaves if isinstance(each, Tensor)]
        self._outputs: list[Tensor] = []
        self._versions: list[int] = []
        self._output_gradients: list[Tensor] = []

    @property
    def has_gradients(self) -> bool:
        """True if weights of this block or an earlier block are trained."""
        return bool(self.weights) or any(each.requires_grad for each in self._inputs)

    def has_moved(self) -> bool:
        """Return True if the address of a weight or buffer has changed since the capture."""
        return self._places != [each.data_ptr() for each in self._tensors]

    def warm_up(self) -> None:
        """Run the block once without a graph, since libraries benchmark kernels and allocate memory at first use."""
        for weight, alias in self._aliases.items():
            alias.data = weight.detach()
        outputs = self._forward()
        if not all(each.requires_grad for each in outputs):
            raise UserError(
                f'speed.cuda_graphs: {type(self.block).__name__} returns a tensor that requires no gradients. {TO_FIX}'
            )
        self._output_gradients = [torch.zeros_like(each) for each in outputs]
        self._backward()
        self._with_history = []

    def capture_forward(self) -> None:
        private_attribute(self._inputs[0], '_version')  # raises UserError if this PyTorch lacks `_version`
        self._places = [each.data_ptr() for each in self._tensors]
        self._forward_graph = CudaGraph(self._forward, self._memory.pool, type(self.block).__name__)
        self._outputs = [each.detach() for each in self._with_history]

    def capture_backward(self) -> None:
        """Capture the backward pass; the weights' gradients use the same memory for all shapes."""
        self._backward_graph = CudaGraph(self._backward, self._memory.pool, type(self.block).__name__)
        self._memory.gradients |= {
            (self.block, weight): gradient
            for weight, gradient in zip(self.weights, self._weight_gradients, strict=True)
            if gradient is not None
        }
        self._with_history = []  # also drops the tensors saved by the forward pass, whose memory is reused

    def replay_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for static, given in zip(self._inputs, inputs, strict=True):
            static.detach().copy_(given)
        self._forward_graph.replay()
        self._versions = list(map(_version, self._outputs))
        return tuple(each.detach() for each in self._outputs)

    def replay_backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Replay the backward pass, and return the gradients of the inputs and weights."""
        if self._versions != list(map(_version, self._outputs)):
            raise UserError(
                f'speed.cuda_graphs: the output of a {type(self.block).__name__} was changed in place, although the '
                f"block's backward pass may need the original. {TO_FIX}"
            )
        for static, given in zip(self._output_gradients, gradients, strict=True):
            static.copy_(given)
        self._backward_graph.replay()
        of_inputs = [None if each is None else each.detach() for each in self._input_gradients]
        # Return the weights' gradients without `detach`. A new tensor without other references would itself become the
        # weight's gradient, without a copy, and the next replay would overwrite it.
        return [*of_inputs, *self._weight_gradients]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return the block's result in its original structure, with `outputs` as its tensors."""
        if self._is_tensor:
            return outputs[0]
        given = iter(outputs)
        return tree_unflatten([next(given) if each is _TENSOR else each for each in self._result], self._form)

    def _forward(self) -> list[Tensor]:
        """Run the block's `forward`, and return the tensors in its result."""
        # A weight cast that autocast has cached before would be a constant in the graph, and a cast cached during a
        # capture has no value yet. Therefore clear the cache before and after.
        torch.clear_autocast_cache()
        args, kwargs = tree_unflatten(self._leaves, self._structure)
        with _replaced(self.block, self._aliases):
            result = self._plain(*args, **kwargs)
        torch.clear_autocast_cache()
        leaves, self._form = tree_flatten(result)
        self._is_tensor = isinstance(result, Tensor)
        self._result = [_TENSOR if isinstance(each, Tensor) else each for each in leaves]
        self._with_history = [each for each in leaves if isinstance(each, Tensor)]
        return self._with_history

    def _backward(self) -> list[Tensor]:
        """Run the backward pass of the last `_forward`, and return the gradients of the inputs and weights."""
        trained = [each for each in self._inputs if each.requires_grad]
        # Backward passes run outside of autocast.
        with torch.autocast(self._with_history[0].device.type, enabled=False):
            inputs = [*trained, *self._aliases.values()]
            found = torch.autograd.grad(self._with_history, inputs, self._output_gradients, allow_unused=True)
        of_trained = iter(found[: len(trained)])
        self._input_gradients = [next(of_trained) if each.requires_grad else None for each in self._inputs]
        self._weight_gradients = list(found[len(trained) :])
        for place, weight in enumerate(self.weights):
            shared, gradient = self._memory.gradients.get((self.block, weight)), found[len(trained) + place]
            if shared is not None and gradient is not None:
                self._weight_gradients[place] = shared.copy_(gradient)
        return [each for each in (*self._input_gradients, *self._weight_gradients) if each is not None]


class _Replay(torch.autograd.Function):
    """Autograd function that replays the CUDA graphs of a block, given its inputs and weights."""

    @staticmethod
    def forward(ctx: Any, call: _Call, replayed: _Replayed, place: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.replayed, ctx.place, ctx.total = call, replayed, place, len(tensors)
        return call.replay_forward(tensors[: len(tensors) - len(call.weights)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.replayed.waiting.pop() != ctx.place:
            raise UserError(
                f'speed.cuda_graphs: the backward pass of {type(ctx.call.block).__name__} ran in another order than '
                f'the one captured. {TO_FIX}'
            )
        return None, None, None, *ctx.call.replay_backward(gradients)


class CudaGraph:
    """CUDA graph captured from a single call of a function that reads and writes fixed memory addresses.

    Args:
        name: Class of the captured block, for messages.

    Raises:
        UserError: CUDA cannot capture the function.
    """

    def __init__(self, work: Callable[[], list[Tensor]], pool: Any, name: str) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph() would collect garbage and empty torch's cache for each graph. `thread_local` allows other
        # threads in this process, such as a loader's, to make calls that are forbidden during a capture.
        self._graph.capture_begin(pool=pool, capture_error_mode='thread_local')
        try:
            work()
        except Exception as error:
            with suppress(RuntimeError):  # capture_end raises, since the capture is invalid
                self._graph.capture_end()
            raise UserError(f'speed.cuda_graphs: {name} cannot be captured ({error}). {TO_FIX}') from error
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def capturing(memory: _SharedMemory) -> Iterator[None]:
    """Capture graphs inside the context, in a separate stream, without changing the GPU's random number generator."""
    if memory.pool is None:
        memory.pool = torch.cuda.graph_pool_handle()
    random_state, collects = torch.cuda.get_rng_state(), gc.isenabled()
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()  # freeing memory may be forbidden during a capture
    try:
        stream: Any = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
    finally:
        if collects:
            gc.enable()
    torch.cuda.synchronize()
    torch.cuda.set_rng_state(random_state)


@contextmanager
def _replaced(block: nn.Module, aliases: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Let a block compute with aliases in place of its parameters inside the context."""
    places = [
        (module, name, parameter, aliases[parameter])
        for module in block.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in aliases
    ]
    try:
        for module, name, _, alias in places:
            setattr(module, name, alias)
        yield
    finally:
        for module, name, parameter, _ in places:
            setattr(module, name, parameter)


def can_capture(leaves: Sequence[Any]) -> bool:
    """Return True if all tensors are on a GPU."""
    return all(each.is_cuda for each in leaves if isinstance(each, Tensor))


def leaves_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tensors and other values in arguments, in the order of `tree_flatten`."""
    values = [*args, *kwargs.values()]
    # Without nested containers, skip tree_flatten: this takes a tenth of the time.
    return tree_flatten((args, dict(kwargs)))[0] if any(isinstance(each, _CONTAINERS) for each in values) else values


def signature(leaves: Sequence[Any]) -> Signature:
    """Return a key that is equal for arguments that can share a graph: properties of tensors, text of other values."""
    return tuple(
        (each.shape, each.stride(), each.dtype, each.requires_grad) if isinstance(each, Tensor) else repr(each)
        for each in leaves
    )


_CONTAINERS = (tuple, list, dict)
_TENSOR = object()
"""Placeholder for a tensor in the stored structure of a block's result (`_Call.result`)."""
