"""Running average of the trained weights, sharded across devices like the weights themselves."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diffusion.compatibility.private_names import _foreach_lerp_
from diffusion.errors import UserError

FSDP1 = 'FSDP1 is not supported; use FSDP2 (FSDP2Config), whose reshard_after_forward=False is SHARD_GRAD_OP'
_WRAPPERS = ('_checkpoint_wrapped_module.', '_orig_mod.')
"""Prefixes that activation checkpointing and torch.compile insert into parameter names."""


class WeightAverage:
    """Running average of a model's trained weights.

    Under FSDP each device stores the average of its own shard in `tensors`, by parameter name. No memory is allocated
    before `start` or `restore`.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._saved: Mapping[str, Tensor] = {}

    @property
    def started(self) -> bool:
        return bool(self.tensors) or bool(self._saved)

    @torch.no_grad()
    def start(self, model: nn.Module) -> None:
        reshard(model)
        self._parameters = trained_parameters(model)
        self.tensors = {name: local_shard(weight).clone() for name, weight in self._parameters.items()}
        self._saved = {}

    @torch.no_grad()
    def update(self, model: nn.Module, keep: float) -> None:
        """Update the average in place with the model's weights: average = keep * average + (1 - keep) * weights."""
        # Do not call `reshard`: FSDP2's shards are valid without it, and the freed weights would be gathered again.
        averages, weights = self.pairs(model)
        _foreach_lerp_(averages, weights, 1 - keep)

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Swap the average with the model's weights in place; a second call swaps them back."""
        reshard(model)
        # Swap one tensor at a time: the temporary copy is the size of one tensor, not of the model.
        for average, weight in zip(*self.pairs(model), strict=True):
            copied = weight.clone()
            weight.copy_(average)
            average.copy_(copied)

    def pairs(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """Return this device's shards of the average and of the weights, in the same order; call it under no_grad."""
        self.place(model)
        return list(self.tensors.values()), [local_shard(weight) for weight in self._parameters.values()]

    def whole(self, model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
        """Gather the full average by parameter name; a collective. Ranks with keep=False get {}, to save memory."""
        self.place(model)
        gathered = {}
        for name, shard in self.shards(model).items():
            # Move each tensor to the CPU before gathering the next, so that the device holds one full tensor at a time.
            tensor = shard.full_tensor().cpu() if isinstance(shard, DTensor) else shard
            if keep:
                gathered[name] = tensor
        return gathered

    def shards(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the average by parameter name for a sharded checkpoint: DTensors wherever the weights are DTensors."""
        self.place(model)
        return {name: _with_sharding_of(self._parameters[name], average) for name, average in self.tensors.items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Store a saved average (full tensors or shards); it is sharded by the next method that receives the model."""
        # Do not shard the tensors yet: that requires the model, which `Algorithm.load_state_dict` does not receive.
        self._saved = saved
        self.tensors = {}

    def place(self, model: nn.Module) -> None:
        """Shard the tensors from `restore`, if any, like the weights; UserError if their names or shapes differ."""
        if not self._saved:
            return
        reshard(model)
        self._parameters = trained_parameters(model)
        _check_same(self._saved, self._parameters)
        self.tensors = {name: _shard_like(self._saved[name], weight) for name, weight in self._parameters.items()}
        self._saved = {}


@runtime_checkable
class Averager(Protocol):
    """Interface of algorithms that save weight averages in checkpoints; each average is as large as the model.

    Attributes:
        averages: Weight averages by label, such as `ema` or `width0.05`; empty before averaging starts.
        gathers: True if `state_dict` contains the full averages; False if the sharded checkpoint writer saves them.
    """

    gathers: bool

    @property
    def averages(self) -> Mapping[str, WeightAverage]: ...

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None: ...


def averages_state(algorithm: Averager, model: nn.Module) -> dict[str, Any]:
    """Return the full averages of an averaging algorithm for a checkpoint, or only their labels if `gathers` is False.

    `averages` maps each label to the full tensors by parameter name, or to {} on ranks other than 0. The writer of a
    sharded checkpoint sets `gathers` to False while it collects state, and saves the tensors itself.
    """
    if not algorithm.gathers:
        return {'sharded_averages': sorted(algorithm.averages)}
    keep = dist.get_global_rank() == 0
    return {'averages': {label: each.whole(model, keep=keep) for label, each in algorithm.averages.items()}}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return a model's trained parameters by name, without the name prefixes that FSDP, DDP and torch.compile add."""
    return {_bare_name(name): weight for name, weight in unwrapped(model).named_parameters() if weight.requires_grad}


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _bare_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, '')
    return name


def local_shard(tensor: Tensor) -> Tensor:
    """Return this device's shard of a DTensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_sharding_of(weight: Tensor, average: Tensor) -> Tensor:
    """Wrap an average's local shard as a DTensor sharded like its weight; return it as is if the weight is plain."""
    if not isinstance(weight, DTensor):
        return average
    # Shards may be uneven, so pass the global shape; run_check=False avoids a collective per tensor.
    return DTensor.from_local(
        average, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
    )


def _shard_like(saved: Tensor, weight: Tensor) -> Tensor:
    """Return this device's shard of a tensor from a checkpoint, with the weight's device, sharding and strides."""
    if isinstance(saved, DTensor):
        return saved.to_local()
    if isinstance(weight, DTensor):
        return distribute_tensor(saved.to(weight.device), weight.device_mesh, weight.placements).to_local()
    # empty_like keeps the weight's strides (for example channels_last); the checkpoint's strides may differ.
    return torch.empty_like(weight.detach()).copy_(saved)


def reshard(model: nn.Module) -> None:
    """Free FSDP2's gathered weights, so that the model's parameters are this device's shards; UserError for FSDP1."""
    # The root module keeps its weights gathered after a forward pass. Until they are freed, `named_parameters` returns
    # the gathered copies, and writes to those are lost at the next all-gather.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, FullyShardedDataParallel):
            raise UserError(FSDP1)


def _check_same(saved: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    different: Sequence[str] = sorted(set(saved) ^ set(parameters))
    if not different:
        different = [name for name, weight in parameters.items() if saved[name].shape != weight.shape]
    if different:
        raise UserError(
            f'averages: the checkpoint has {len(saved)} tensors, the model trains {len(parameters)}; '
            f'they differ in {", ".join(different[:3])}; the checkpoint belongs to another architecture'
        )
