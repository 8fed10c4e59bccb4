"""Callback that makes FSDP2 reduce gradients once per batch, even if the batch is split into microbatches."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ReduceOnce(Callback):
    """Make FSDP2 reduce gradients, and free gathered weights, only after the last microbatch of a batch."""

    # By default FSDP2 reduces gradients after every microbatch. Composer's `ddp_sync_strategy`, which makes DDP reduce
    # once per batch, has no effect on FSDP2.

    def __init__(self) -> None:
        self._left = 0
        self._modules: list[FSDPModule] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        # Find the modules once: walking through a U-Net's modules takes milliseconds of host time.
        self._modules = list(fsdp_modules(state.model))

    def before_train_batch(self, state: State, logger: Logger) -> None:
        # Count microbatches here, where state.batch is still the whole batch; during forward passes it is a microbatch.
        self._left = number_of_microbatches(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        last = self._left == 0
        # Set the flags of every module, since FSDP2 reads them per module in the backward pass. `recurse=False` because
        # the loop already visits all modules.
        for module in self._modules:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)


def number_of_microbatches(state: State) -> int:
    size = state.device_train_microbatch_size
    assert size is not None
    return -(-samples_in(state.batch) // int(size))


def samples_in(batch: Any) -> int:
    return len(next(iter(batch.values() if isinstance(batch, Mapping) else ensure_tuple(batch))))


def fsdp_modules(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))
