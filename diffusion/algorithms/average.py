"""A running average of the trained weights, placed on the devices as the weights themselves are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard as reshard_fsdp1
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diffusion.errors import UserError

_WRAPPERS = ('_fsdp_wrapped_module.', '_checkpoint_wrapped_module.', '_orig_mod.')
"""What FSDP1, activation checkpointing and torch.compile put into parameter names."""


class WeightAverage:
    """A copy of the trained weights that moves towards them.

    Under FSDP each device holds the average of its own shard. Nothing is held before `start` or `restore`.

    Attributes:
        tensors: Parameter name -> this device's part of the average.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._saved: Mapping[str, Tensor] = {}

    @property
    def started(self) -> bool:
        """Whether there is an average."""
        return bool(self.tensors) or bool(self._saved)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        """Begin with the weights as they are."""
        reshard(model)
        self._parameters = trained_parameters(model)
        self.tensors = {name: _local(weight).clone() for name, weight in self._parameters.items()}
        self._saved = {}

    @torch.no_grad()
    def update(self, model: nn.Module, keep: float) -> None:
        """In place: average = keep * average + (1 - keep) * weights."""
        if _is_fsdp1(model):  # its parameters are views of whatever is there, gathered or not
            reshard(model)
        averages, weights = self.pairs(model)
        torch._foreach_lerp_(averages, weights, 1 - keep)  # type: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Swap average and weights, tensor by tensor."""
        reshard(model)
        for average, weight in zip(*self.pairs(model), strict=True):
            weights = weight.clone()
            weight.copy_(average)
            average.copy_(weights)

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Averages and weights of this device, in one order."""
        self.place(model)
        return list(self.tensors.values()), [_local(weight).detach() for weight in self._parameters.values()]

    # -- checkpoints --

    def whole(self, model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
        """The average by parameter name, gathered; every rank has to call this.

        Args:
            model: The model it is an average of.
            keep: Whether this rank wants the tensors; others take part in the gathering and get none.
        """
        self.place(model)
        if _is_fsdp1(model):
            with self._inside(model):
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                gathered: dict[str, Any] = get_model_state_dict(model, options=options)
            return {name: gathered[name] for name in self.tensors} if keep else {}
        found = {}
        for name, shard in self.shards(model).items():
            # One tensor at a time leaves the device before the next is gathered.
            tensor = shard.full_tensor().cpu() if isinstance(shard, DTensor) else shard
            if keep:
                found[name] = tensor
        return found

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """The average by parameter name, as DTensors where the weights are: what a sharded checkpoint stores."""
        self.place(model)
        return {name: _as(self._parameters[name], average) for name, average in self.tensors.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from whole tensors, or from shards that `blank` made; they are placed when the model is first seen."""
        self._saved = saved
        self.tensors = {}

    def place(self, model: nn.Module) -> None:
        """Put what a checkpoint held where the weights are.

        Raises:
            UserError: It is the average of another architecture.
        """
        if not self._saved:
            return
        reshard(model)
        self._parameters = trained_parameters(model)
        sharded_flat = _is_fsdp1(model)  # FSDP1's parameters are this device's pieces, whose shapes say nothing
        _check_same(self._saved, self._parameters, shapes=not sharded_flat)
        if sharded_flat:
            self.tensors = _placed_by_fsdp1(self._saved, self._parameters, model)
        else:
            self.tensors = {name: _placed(self._saved[name], weight) for name, weight in self._parameters.items()}
        self._saved = {}

    @contextmanager
    def _inside(self, model: nn.Module) -> Iterator[None]:
        self.exchange(model)
        try:
            yield
        finally:
            self.exchange(model)


@runtime_checkable
class Averager(Protocol):
    """An algorithm whose state holds averages of the weights, which are as large as the model.

    Attributes:
        averages: By label; none before they start.
        gathers: Whether `state_dict` holds whole averages, or leaves them to the writer of a sharded checkpoint.
    """

    gathers: bool

    @property
    def averages(self) -> Mapping[str, WeightAverage]: ...

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None: ...


def averages_state(algorithm: Averager, model: nn.Module) -> dict[str, Any]:
    """What an algorithm that averages puts into a checkpoint: whole tensors, or only the labels of its averages.

    Whoever writes a sharded checkpoint stores the tensors itself, and sets `gathers` to False while it asks for the
    rest.
    """
    if not algorithm.gathers:
        return {'sharded_averages': sorted(algorithm.averages)}
    keep = dist.get_global_rank() == 0
    return {'averages': {label: each.whole(model, keep=keep) for label, each in algorithm.averages.items()}}


def blank(model: nn.Module) -> dict[str, Tensor]:
    """Room for an average, placed as the weights are, to read a sharded checkpoint into."""
    return {name: torch.empty_like(weight.detach()) for name, weight in trained_parameters(model).items()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by their name in the bare model."""
    return {_bare(name): weight for name, weight in unwrapped(model).named_parameters() if weight.requires_grad}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP's wrapper, or itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, '')
    return name


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(weight: Tensor, average: Tensor) -> Tensor:
    """A device's part of an average as a tensor of the same kind as the weight."""
    if not isinstance(weight, DTensor):
        return average
    return DTensor.from_local(
        average, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
    )


def _placed(saved: Tensor, weight: Tensor) -> Tensor:
    if isinstance(saved, DTensor):
        return saved.to_local()
    if isinstance(weight, DTensor):
        return distribute_tensor(saved.to(weight.device), weight.device_mesh, weight.placements).to_local()
    return torch.empty_like(weight.detach()).copy_(saved)  # in the weight's own strides, channels_last for one


@torch.no_grad()
def _placed_by_fsdp1(
    saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], model: nn.Module
) -> dict[str, Tensor]:
    """FSDP1 shards flat parameters in its own way: load the average as if it were the weights, and take it back out."""
    weights = {name: weight.detach().clone() for name, weight in parameters.items()}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
    set_model_state_dict(model, dict(saved), options=options)
    placed = {name: weight.detach().clone() for name, weight in parameters.items()}
    for name, weight in parameters.items():
        weight.copy_(weights[name])
    return placed


def _is_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Drop FSDP's gathered copies, which a forward pass leaves at the root: they hide the weights that are kept."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:
                reshard_fsdp1(module, handle, free_unsharded_flat_param=True)


def _check_same(saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], *, shapes: bool) -> None:
    different: Sequence[str] = sorted(set(saved) ^ set(parameters))
    if not different and shapes:
        different = [name for name, weight in parameters.items() if saved[name].shape != weight.shape]
    if different:
        raise UserError(
            f'averages: the checkpoint has {len(saved)} tensors, the model trains {len(parameters)}; '
            f'they differ in {", ".join(different[:3])}: it is of another architecture'
        )
