"""Stop a run whose loss is NaN or infinite before its weights are saved; used by every run without `loss_guard`."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from composer.callbacks import CheckpointSaver
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.algorithms.average import unwrapped
from diffusion.callbacks.loss_guard import (
    REMEDY,
    BadLoss,
    append_bad_batch,
    describe_samples,
    record_microbatch,
    samples_of,
    suspects,
)
from diffusion.callbacks.preemption import NOT_SAVED, SavesInTime
from diffusion.compatibility.private_names import tree_map
from diffusion.models import batch_keys

FULL_GUARD = '; callbacks.loss_guard stops before such an update, or skips it'


class LastMicrobatch(NamedTuple):
    """References to a microbatch's values, which are read only if the loss of the batch is bad."""

    loss: Any
    """Composer's `state.loss`: a tensor or a collection of tensors."""
    batch: dict[str, Tensor]
    """The sample IDs, int64 [B], under their batch key; empty if the batch has no IDs."""
    sample_losses: Tensor | None
    """Loss per sample, float32 [B]; None if the model does not set it."""


class NaNGuard(Callback):
    """Callback that stops all ranks with `BadLoss` after a batch whose loss is NaN or infinite.

    It reads the mean loss over all ranks, already fetched by Composer for its log, so it needs no synchronization
    or collective, and all ranks reach the same decision. The bad batch has already updated the weights by then, so they
    are not saved; a background save of earlier weights is completed. `LossGuard` prevents the update instead, checks
    gradients too, and can skip batches.

    A line is appended to `folder/bad_batches.jsonl`.

    Args:
        check_loss: False turns the check off. Weights that are not finite are not saved in either case.
        folder: The run's folder.
    """

    def __init__(self, *, check_loss: bool = True, folder: str = 'runs') -> None:
        self.check_loss = check_loss
        self.path = Path(folder) / 'bad_batches.jsonl'
        self.on_bad_batch: Callable[[str], None] = lambda text: None
        """Called on rank 0 with a description of the bad batch, before the run stops."""
        self._microbatches: list[LastMicrobatch] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self._microbatches = []

    def after_loss(self, state: State, logger: Logger) -> None:
        # Keep only references: launching a kernel per microbatch would be the largest cost of this callback.
        batch = state.batch if isinstance(state.batch, Mapping) else {}
        ids = {key: batch[key] for key in (batch_keys.SAMPLE_ID,) if key in batch}
        loss = tree_map(Tensor.detach, state.loss)
        self._microbatches.append(LastMicrobatch(loss, ids, getattr(unwrapped(state.model), 'sample_losses', None)))

    def batch_end(self, state: State, logger: Logger) -> None:
        losses = getattr(state, 'total_loss_dict', None) or {}
        bad = {name: value for name, value in losses.items() if not math.isfinite(value)}
        if self.check_loss and bad:
            self._stop(state, logger, next(iter(bad.values())))

    def _stop(self, state: State, logger: Logger, loss: float) -> None:
        """Raise BadLoss with the batch, its samples and the newest checkpoint; a collective."""
        batch, reason = state.timestamp.batch.value - 1, f'loss is {loss}'
        microbatches = [record_microbatch(*each) for each in self._microbatches]
        ids = suspects(dist.all_gather_object(samples_of(microbatches, None)), math.inf)
        samples = describe_samples(ids, self.path)
        if dist.get_global_rank() == 0:
            epoch = state.previous_timestamp.epoch.value if state.previous_timestamp is not None else 0
            append_bad_batch(self.path, batch=batch, epoch=epoch, reason=reason, sample_ids=ids)
            self.on_bad_batch(f'batch {batch}: {reason}; the run stops; {samples}')
        raise BadLoss(f'batch {batch}: {reason}; {samples}; {_newest_checkpoint(state, logger)}. {REMEDY}{FULL_GUARD}')


def _newest_checkpoint(state: State, logger: Logger) -> str:
    """Wait for a running background save, and return a phrase that names the newest checkpoint; a collective."""
    savers = [each for each in state.callbacks if isinstance(each, CheckpointSaver) and not each.weights_only]
    if not savers:
        return NOT_SAVED
    if isinstance(savers[0], SavesInTime):
        savers[0].finish_save(logger)
    names = dist.all_gather_object([str(each) for each in savers[0].saved_checkpoints[-1:]])
    newest = next((name for each in names for name in each), None)
    if newest is None:
        return 'nothing is saved yet, since this run started'
    return f'the newest checkpoint, from before this batch, is {newest}'
