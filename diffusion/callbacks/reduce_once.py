"""Under FSDP2, gradients of a batch that is cut into microbatches are reduced once."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import ensure_tuple
from torch import nn
from torch.distributed.fsdp import FSDPModule


class ReduceOnce(Callback):
    """Let FSDP2 keep gradients and gathered weights on each device until the last microbatch of a batch.

    Composer leaves FSDP2 to reduce gradients after every microbatch; its `ddp_sync_strategy`, by which DDP reduces once
    a batch, is for DDP alone.
    """

    def __init__(self) -> None:
        self._left = 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        # Of the whole batch; while its microbatches are computed, state.batch is one of them.
        self._left = number_of_microbatches(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        last = self._left == 0
        for module in sharded(state.model):
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)


def number_of_microbatches(state: State) -> int:
    """Into how many microbatches Composer cuts this device's batch."""
    size = state.device_train_microbatch_size
    assert size is not None
    return -(-samples_in(state.batch) // int(size))


def samples_in(batch: Any) -> int:
    """Samples of a device's batch, of a mapping or of a sequence of tensors."""
    return len(next(iter(batch.values() if isinstance(batch, Mapping) else ensure_tuple(batch))))


def sharded(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that FSDP2 gathers on their own."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))
