"""Check that a Trainer's weights are finite, before they are saved and before training starts from them."""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.algorithms.average import Averager, local_shard
from diffusion.compatibility.private_names import _foreach_norm, private_attribute, set_private_attribute
from diffusion.errors import UserError

MAX_NAMES_SHOWN = 3
NOT_SAVED = (
    'they are not saved, and earlier checkpoints are kept; resume from one with a smaller optimizer.lr or clipped '
    'gradients (algorithms.gradient_clipping); callbacks.loss_guard finds the batch'
)


class NonFiniteWeights(UserError):
    """Error for weights that are NaN or infinite.

    It is a UserError although it occurs in the middle of a run: a retry would repeat the same batches with the same
    result until the recipe or the data is changed.
    """


def check_weights(state: State, where: str, remedy: str) -> None:
    """Raise NonFiniteWeights on every rank unless all trained weights and their averages are finite; a collective.

    Reads each weight once and synchronizes with the device, which takes milliseconds per save. The message begins with
    `where`, such as `batch 7`, and ends with `remedy`.
    """
    bad = state.device.tensor_to_device(count_non_finite(tensor for _, tensor in _weights(state)).float())
    dist.all_reduce(bad, reduce_operation='SUM')
    if not bad.item():
        return
    found = dist.all_gather_object([name for name, tensor in _weights(state) if count_non_finite([tensor]).item()])
    names = list(dict.fromkeys(name for each in found for name in each))
    more = f' and {len(names) - MAX_NAMES_SHOWN} more' if len(names) > MAX_NAMES_SHOWN else ''
    listed = ', '.join(names[:MAX_NAMES_SHOWN])
    raise NonFiniteWeights(f'{where}: weights are NaN or infinite, in {listed}{more}; {remedy}')


def check_before_saves(saver: CheckpointSaver) -> None:
    """Make a Composer checkpoint saver check that the weights are finite before each save."""
    # Composer saves at several events, and all of them call this private method. No public method is called for every
    # save.
    save = private_attribute(saver, '_save_checkpoint')
    set_private_attribute(saver, '_save_checkpoint', partial(_save_if_finite, save))


@torch.no_grad()
def count_non_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Count the tensors that contain NaN or infinity, int64 [], on their device and without synchronization."""
    # Skip empty FSDP shards: they have no largest element.
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.int64)
    # Use the largest magnitude: unlike the L2 norm it cannot overflow, and it is NaN if any element is NaN.
    return (~torch.stack([each.float() for each in _foreach_norm(filled, math.inf)]).isfinite()).sum()


def _save_if_finite(save: Any, state: State, logger: Logger) -> None:
    check_weights(state, f'batch {state.timestamp.batch.value}', NOT_SAVED)
    save(state, logger)


def _weights(state: State) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of the trained weights and of their averages, with their names."""
    for name, parameter in state.model.named_parameters():
        if parameter.requires_grad:
            yield name.removeprefix('module.'), local_shard(parameter.detach())
    for algorithm in state.algorithms:
        if isinstance(algorithm, Averager):
            for label, average in algorithm.averages.items():
                yield from ((f'{label} of {name}', tensor) for name, tensor in average.tensors.items())
