"""A batch whose loss or gradients are beyond use is not learned from, and its samples are named."""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from composer.core import Callback, Precision, State
from composer.loggers import Logger
from composer.utils import dist, ensure_tuple
from torch import Tensor
from torch.distributed.tensor import DTensor

from diffusion.algorithms.average import unwrapped
from diffusion.callbacks.save_now import save_now
from diffusion.errors import UserError
from diffusion.models import batch_keys

log = logging.getLogger(__name__)

MAX_NAMED = 16
"""Samples named in an error; the file has them all."""

WAY_OUT = 'Look at these samples; lower optimizer.lr, or clip gradients (algorithms.gradient_clipping)'
OR_SKIP = '; or leave such batches out (callbacks.loss_guard.action: skip)'


class BadLoss(UserError):
    """A loss or gradients that no update should be made of.

    A UserError, although it comes in the middle of a run: a retry draws the same samples, noise and timesteps for this
    batch and meets the same loss, until somebody changes the recipe or the data.
    """


class Microbatch(NamedTuple):
    """What is kept of a microbatch until its batch is judged; on its device."""

    loss: Tensor
    """Mean, float32 []."""
    sample_losses: Tensor
    """Float32 [B]."""
    sample_ids: Tensor | None
    """Int64 [B], None where the batch has none."""


class Samples(NamedTuple):
    """The same of a rank's whole batch, on the CPU, to be gathered."""

    losses: list[float]
    ids: list[int]
    at_fault: bool
    """Whether this rank's loss or gradients are not finite."""


class LossGuard(Callback):
    """Stop at, or skip, an update whose loss or gradients are not finite or whose loss explodes.

    All ranks judge together, before the optimizer's step. `stop` saves a checkpoint of the weights and the clock from
    before the batch, so that the run can do this batch again, and raises `BadLoss` with the samples' ids. `skip` drops
    the gradients, so that neither weights nor moments change, and goes on with the next batch. Either way
    `folder/bad_batches.jsonl` gets a line.

    Samples are named by their own loss if the model keeps `sample_losses` [B], as LatentDiffusion does. Under precision
    amp_fp16 gradients are not judged: its scaler meets infinite ones as a matter of course.

    Args:
        action: Stop, or skip the update.
        max_skips: Updates that may be skipped within `window` batches before the run stops after all.
        explosion: A loss so many times the median of the last `window` is bad; None turns this off.
        window: Batches; an explosion is not judged before half of them are known.
        check_gradients: Judge gradients too.
        folder: Of the run.
    """

    def __init__(
        self,
        *,
        action: Literal['stop', 'skip'] = 'stop',
        max_skips: int = 10,
        explosion: float | None = 20.0,
        window: int = 100,
        check_gradients: bool = True,
        folder: str = 'runs',
    ) -> None:
        if action not in ('stop', 'skip'):
            raise UserError(f'callbacks.loss_guard.action: {action!r}; use stop or skip')
        if explosion is not None and not explosion > 1:
            raise UserError(f'callbacks.loss_guard.explosion: {explosion} times the median; use more than 1, or null')
        if window < 2:
            raise UserError(f'callbacks.loss_guard.window: {window} batches; use 2 or more')
        if max_skips < 0:
            raise UserError(f'callbacks.loss_guard.max_skips: {max_skips}; use 0 or more')
        self.action = action
        self.max_skips = max_skips
        self.explosion = explosion
        self.window = window
        self.check_gradients = check_gradients
        self.path = Path(folder) / 'bad_batches.jsonl'
        self.history: list[float] = []
        """Losses of the last `window` batches that were learned from."""
        self.skipped: list[int] = []
        """Numbers of the batches that were not."""
        self._microbatches: list[Microbatch] = []
        self._first_batch = 0

    def init(self, state: State, logger: Logger) -> None:
        if self.action == 'skip' and state.precision == Precision.AMP_FP16:
            raise UserError(
                'callbacks.loss_guard.action: skip does not go with precision amp_fp16, whose scaler skips updates by '
                'itself and demands gradients; use stop, or precision amp_bf16'
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        self._first_batch = state.timestamp.batch.value

    def before_train_batch(self, state: State, logger: Logger) -> None:
        # Composer starts a batch again when it finds a smaller microbatch size.
        self._microbatches = []

    def after_loss(self, state: State, logger: Logger) -> None:
        sample_losses = getattr(unwrapped(state.model), 'sample_losses', None)
        self._microbatches.append(observed(state.loss, state.batch, sample_losses))

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # Gradients are complete and clipped (algorithms come first; a norm that is NaN made all of them NaN), and the
        # optimizer has not stepped. With closures, Composer's default outside of fp16, this runs inside its step().
        finite = self._gradients_are_finite(state)
        loss, gradients_finite = over_all_ranks(self._microbatches, finite)
        limit = explosion_limit(self.history, self.explosion, self.window)
        reason = what_is_wrong(loss, gradients_finite, limit, self.history)
        if reason is None:
            self.history = [*self.history, loss][-self.window :]
            return
        ranks = dist.all_gather_object(samples_of(self._microbatches, finite))
        self._act(state, logger, loss, reason, suspects(ranks, limit))

    def state_dict(self) -> dict[str, Any]:
        return {'history': self.history, 'skipped': self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = list(state['history'])[-self.window :]
        self.skipped = list(state['skipped'])

    def _gradients_are_finite(self, state: State) -> Tensor | None:
        if not self.check_gradients or state.precision == Precision.AMP_FP16:
            return None
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        return are_finite(parameter.grad for group in groups for parameter in group['params'])

    def _act(self, state: State, logger: Logger, loss: float, reason: str, ids: list[int]) -> None:
        batch = state.timestamp.batch.value
        recent = sum(each > batch - self.window for each in self.skipped)
        skip = self.action == 'skip' and recent < self.max_skips
        if self.action == 'skip' and not skip:
            reason += f', after {recent} skipped updates in the last {self.window} batches'
        # Its gradients are good for nothing; and for a checkpoint's sake there must be none while the optimizer has no
        # state yet (torch.distributed.checkpoint would leave that out).
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if dist.get_global_rank() == 0:
            line = {
                'batch': batch,
                'epoch': state.timestamp.epoch.value,
                'reason': reason,
                'loss': loss if math.isfinite(loss) else None,
                'median': median(self.history) if self.history else None,
                'sample_ids': ids,
                'action': 'skip' if skip else 'stop',
            }
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open('a', encoding='utf-8') as file:
                file.write(json.dumps(line) + '\n')
        if not skip:
            # A run that stops where it started leaves the checkpoint that it came from, if any, as it is.
            started_here = batch == self._first_batch
            saved = None if started_here else save_now(state, logger)
            what = f'batch {batch}: {reason}; {named(ids, self.path)}; {kept(saved, started_here=started_here)}'
            raise BadLoss(f'{what}. {WAY_OUT}{"" if self.action == "skip" else OR_SKIP}')
        self.skipped = [*self.skipped, batch]
        logger.log_metrics({'loss_guard/skipped_updates': len(self.skipped)})
        log.warning('batch %d: %s; update skipped, %s', batch, reason, named(ids, self.path))


def observed(loss: Any, batch: Any, sample_losses: Tensor | None) -> Microbatch:
    """What to keep of a microbatch: nothing is waited for or moved."""
    if isinstance(loss, Mapping):
        loss = loss['total'] if 'total' in loss else tuple(loss.values())
    # New tensors: Composer scales the loss in place before it goes backward.
    total = torch.stack([part.detach().float().mean() for part in ensure_tuple(loss)]).sum()
    ids = batch.get(batch_keys.SAMPLE_ID) if isinstance(batch, Mapping) else None
    if sample_losses is None or (ids is not None and len(sample_losses) != len(ids)):
        sample_losses = total.expand(1 if ids is None else len(ids))
    return Microbatch(total, sample_losses, ids)


def are_finite(gradients: Iterable[Tensor | None]) -> Tensor:
    """Whether all of this rank's (shards of) gradients are finite; a bool [] on their device."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    if not local:
        return torch.tensor(True)
    return scaled_are_finite(local) if local[0].device.type == 'cpu' else norms_are_finite(local)


def scaled_are_finite(gradients: list[Tensor]) -> Tensor:
    """By the check of GradScaler, with a scale of one; on CPUs it takes half as long as norms."""
    found, scale = torch.zeros((), dtype=torch.float32), torch.ones((), dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)  # type: ignore[reportPrivateImportUsage]
    return found == 0


def norms_are_finite(gradients: list[Tensor]) -> Tensor:
    """By norms, which on GPUs only read, all gradients in one kernel."""
    # Squares of half precision overflow in half precision.
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, 2, dtype=wide)  # type: ignore[reportPrivateImportUsage]
    return torch.stack(norms).sum().isfinite()


def over_all_ranks(microbatches: Sequence[Microbatch], finite: Tensor | None) -> tuple[float, bool]:
    """The mean loss over all samples, and whether gradients are finite (`finite` of every rank)."""
    total = torch.stack([each.loss * len(each.sample_losses) for each in microbatches]).sum()
    count = torch.full_like(total, sum(len(each.sample_losses) for each in microbatches))
    bad = torch.zeros_like(total) if finite is None else (~finite).to(total)
    # One tensor: one collective and one wait for the device a batch.
    figures = torch.stack([total, count, bad])
    dist.all_reduce(figures, reduce_operation='SUM')
    total, count, bad = figures.tolist()
    return total / count, bad == 0


def explosion_limit(history: Sequence[float], explosion: float | None, window: int) -> float:
    """The loss above which a batch is bad."""
    if explosion is None or len(history) < window // 2:
        return math.inf
    middle = median(history)
    # Times of a median say nothing where losses may be zero or below.
    return explosion * middle if middle > 0 else math.inf


def what_is_wrong(loss: float, gradients_finite: bool, limit: float, history: Sequence[float]) -> str | None:
    """What is wrong with a batch, or None."""
    if not math.isfinite(loss):
        return f'loss is {loss}'
    if not gradients_finite:
        return f'gradients are not finite (loss {loss:.4g} is)'
    if loss > limit:
        middle = median(history)
        return f'loss is {loss:.4g}, {loss / middle:.0f} times the median {middle:.4g} of the last {len(history)}'
    return None


def samples_of(microbatches: Sequence[Microbatch], finite: Tensor | None) -> Samples:
    """This rank's samples, for the ranks to exchange."""
    losses = torch.cat([each.sample_losses for each in microbatches]).tolist()
    ids = [int(i) for each in microbatches if each.sample_ids is not None for i in each.sample_ids.tolist()]
    total = torch.stack([each.loss for each in microbatches]).sum()
    at_fault = not bool(total.isfinite()) or not (finite is None or bool(finite))
    return Samples(losses, ids, at_fault)


def suspects(ranks: Sequence[Samples], limit: float) -> list[int]:
    """Ids of the samples to look at, the largest loss first; empty where batches carry no ids.

    Those whose own loss is not finite or above the limit; if there are none, all samples of the ranks whose loss or
    gradients are not finite. (Under DDP that is every rank, since gradients are averaged.)
    """
    pairs = [pair for rank in ranks if rank.ids for pair in zip(rank.losses, rank.ids, strict=True)]
    found = [(loss, i) for loss, i in pairs if not math.isfinite(loss)]
    found = found or sorted([(loss, i) for loss, i in pairs if loss > limit], reverse=True)
    return [i for _, i in found] or [i for rank in ranks if rank.at_fault for i in rank.ids]


def named(ids: Sequence[int], path: Path) -> str:
    """Some of the ids, and where the others are."""
    if not ids:
        return f'the batch has no {batch_keys.SAMPLE_ID} to tell which'
    more = f' and {len(ids) - MAX_NAMED} more, in {path}' if len(ids) > MAX_NAMED else ''
    return f'sample{"s" if len(ids) > 1 else ""} {", ".join(str(i) for i in ids[:MAX_NAMED])}{more}'


def kept(saved: str | None, *, started_here: bool) -> str:
    """What the run can go on from."""
    if started_here:
        return 'nothing was learned since this run started'
    return f'the weights from before it are in {saved}' if saved else 'nothing is saved, for want of a save_folder'
