"""Stop the run or skip the update if loss or gradients are NaN, infinite or exploding, and report the sample IDs.

Also logs the norm of the gradients, which the check computes anyway.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from composer.core import Callback, Precision, State
from composer.loggers import Logger
from composer.utils import dist, ensure_tuple
from torch import Tensor

from diffusion.algorithms.average import FSDP1, unwrapped
from diffusion.algorithms.gradient_clipping import Gradients, gradients_of, summarize_gradients
from diffusion.callbacks.preemption import NOT_SAVED, save_now
from diffusion.callbacks.reduce_once import samples_in
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.host_copy import HostCopy
from diffusion.storage.local_files import append_text

log = logging.getLogger(__name__)

MAX_IDS_SHOWN = 16
"""Maximum number of sample IDs in an error message; bad_batches.jsonl lists all of them."""

GRADIENT_NORM = 'grad_norm/total'
"""Metric: L2 norm of all gradients over all trained parameters and ranks, before clipping."""

REMEDY = 'Inspect these samples; lower optimizer.lr, or clip gradients (algorithms.gradient_clipping)'
OR_SKIP = '; or skip such batches (callbacks.loss_guard.action: skip)'


class BadLoss(UserError):
    """Error for a batch whose loss or gradients cannot be used for an update.

    It is a UserError although it occurs in the middle of a run: a retry would draw the same samples, noise and
    timesteps for this batch and get the same loss until the recipe or the data is changed.
    """


class Microbatch(NamedTuple):
    """Losses and sample IDs of a microbatch of B samples, kept on its device until the whole batch is checked."""

    loss: Tensor
    """Mean loss, float32 []."""
    sample_losses: Tensor
    """Loss per sample, float32 [B]; the mean loss for each sample if the model sets no losses per sample."""
    sample_ids: Tensor | None
    """Sample IDs, int64 [B], or None if the batch has none."""


class Samples(NamedTuple):
    """Losses and sample IDs of a rank's batch, on the CPU, ready to be gathered over all ranks."""

    losses: list[float]
    ids: list[int]
    not_finite: bool
    """True if this rank's loss or gradients are not finite."""


class LossGuard(Callback):
    """Callback that stops the run or skips the update if loss or gradients are not finite, or if the loss explodes.

    All ranks decide together, before the optimizer's step. `stop` saves a checkpoint of the state before the batch, so
    that a restart repeats the batch, and raises `BadLoss` with the sample IDs. `skip` drops the gradients, so that
    neither the weights nor the optimizer's moments change, and continues with the next batch. Both append a line to
    `folder/bad_batches.jsonl`.

    Logs `grad_norm/total` for every batch whose gradients are finite: the L2 norm of the gradients over all parameters
    and ranks, before clipping.

    If the model sets `sample_losses` [B], as LatentDiffusion does, the reported samples are those whose own loss is
    bad. With precision amp_fp16, infinite gradients are ignored: they are normal, and the loss scaler handles them.

    Args:
        action: `stop` or `skip`.
        max_skips: Maximum number of updates skipped within `window` batches before the run stops.
        explosion: A loss larger than this multiple of the median of the last `window` losses is bad; None turns this
            check off.
        window: Number of batches in the window; explosions are checked once half of it is filled.
        check_gradients: If True, check gradients too, and log their norm.
        folder: The run's folder.
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
        self.on_bad_batch: Callable[[str], None] = lambda text: None
        """Called on rank 0 with a description of each bad batch, before it is skipped or the run stops."""
        self.history: list[float] = []
        """Losses of the last `window` batches that were not skipped."""
        self.skipped: list[int] = []
        """Numbers of the batches that were skipped."""
        self._microbatches: list[Microbatch] = []
        self._gradients: Gradients | None = None
        self._figures: Tensor | None = None
        self._pending: HostCopy | None = None
        self._samples_left = 0
        self._first_batch = 0
        self._hooked = self._has_closure = False

    def init(self, state: State, logger: Logger) -> None:
        if self.action == 'skip' and state.precision == Precision.AMP_FP16:
            raise UserError(
                'callbacks.loss_guard.action: skip does not support precision amp_fp16, whose loss scaler '
                'already skips updates and requires gradients; use stop, or precision amp_bf16'
            )

    def fit_start(self, state: State, logger: Logger) -> None:
        self._first_batch = state.timestamp.batch.value
        if state.fsdp_config_version == 1:
            raise UserError(FSDP1)
        for optimizer in () if self._hooked else state.optimizers:
            optimizer.register_step_pre_hook(partial(self._decide_after_closure, state, logger))
        self._hooked = True

    def before_train_batch(self, state: State, logger: Logger) -> None:
        # Composer repeats a batch when automatic microbatching reduces the microbatch size. Drop the microbatches of
        # the first try.
        self._microbatches = []
        self._gradients = self._figures = self._pending = None
        self._samples_left = samples_in(state.batch)

    def after_loss(self, state: State, logger: Logger) -> None:
        sample_losses = getattr(unwrapped(state.model), 'sample_losses', None)
        self._microbatches.append(record_microbatch(state.loss, state.batch, sample_losses))

    def after_backward(self, state: State, logger: Logger) -> None:
        # Read the gradients after the last microbatch's backward pass, averaged over ranks but not yet clipped. At
        # AFTER_TRAIN_BATCH, clipping and other algorithms would have run. Here state.batch is the microbatch.
        self._samples_left -= samples_in(state.batch)
        if self.check_gradients and self._samples_left <= 0:
            self._gradients = summarize_gradients(gradients_of(state))

    def gradients_of_batch(self, state: State) -> tuple[Gradients, Tensor] | None:
        """Return this rank's gradient summary and the squared norm over all ranks, None if unchecked; a collective."""
        if self._gradients is None:
            return None
        return self._gradients, self._reduced_figures(state)[-1]

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # The optimizer has not stepped yet at AFTER_TRAIN_BATCH. Reading loss and norm here would make the host wait
        # for the GPU, just before Composer waits for the loss at the end of its closure. Instead, start the copy now
        # and read it after Composer has waited but before the update (`_decide_after_closure`). With fp16, Composer
        # passes no closure, so read it here.
        self._pending = HostCopy(self._reduced_figures(state))
        if not self._has_closure:
            self._decide(state, logger)

    def _decide_after_closure(
        self, state: State, logger: Logger, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Optimizer pre-step hook that makes the closure, if any, call `_decide` after the batch's backward passes."""
        # Composer runs the whole batch in a closure inside optimizer.step(), so the step cannot be prevented. `_act`
        # drops the gradients instead.
        closure = kwargs.get('closure')
        self._has_closure = closure is not None
        if closure is None:
            return None

        def checked(*rest: Any, **more: Any) -> Any:
            loss = closure(*rest, **more)
            self._decide(state, logger)
            return loss

        return args, kwargs | {'closure': checked}

    def _decide(self, state: State, logger: Logger) -> None:
        """Read the batch's loss and gradient norm, log the norm, and skip the update or stop if the batch is bad."""
        if self._pending is None:
            return
        total, count, bad, squares = self._pending.read()
        self._pending = None
        loss, norm = total / count, math.sqrt(squares) if squares >= 0 else math.nan
        scaled = state.precision == Precision.AMP_FP16
        if scaled and state.scaler is not None:
            norm /= state.scaler.get_scale()
        if self._gradients is not None and math.isfinite(norm):
            logger.log_metrics({GRADIENT_NORM: norm})
        limit = explosion_limit(self.history, self.explosion, self.window)
        reason = find_problem(loss, bad == 0, limit, self.history)
        if reason is None:
            self.history = [*self.history, loss][-self.window :]
            return
        # Gather per-sample losses and copy them to the CPU only now that a batch is bad on some rank. All ranks get
        # here together, since the loss and the flag were reduced over all ranks.
        ranks = dist.all_gather_object(samples_of(self._microbatches, self._finite(state)))
        self._act(state, logger, loss, reason, suspects(ranks, limit))

    def _reduced_figures(self, state: State) -> Tensor:
        """Return the result of `reduce_over_ranks` for this batch, computed once per batch; a collective."""
        if self._figures is None:
            squared_norm = None if self._gradients is None else self._gradients.squared_norm
            self._figures = reduce_over_ranks(self._microbatches, self._finite(state), squared_norm)
        return self._figures

    def _finite(self, state: State) -> Tensor | None:
        """Return bool [], True if this rank's gradients are finite; None with amp_fp16 or if they are not checked."""
        scaled = state.precision == Precision.AMP_FP16
        return None if self._gradients is None or scaled else self._gradients.finite

    def state_dict(self) -> dict[str, Any]:
        return {'history': self.history, 'skipped': self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = list(state['history'])[-self.window :]
        self.skipped = list(state['skipped'])

    def _act(self, state: State, logger: Logger, loss: float, reason: str, ids: list[int]) -> None:
        """Skip the update of a bad batch or stop the run: drop its gradients, record it, and warn or raise BadLoss."""
        batch = state.timestamp.batch.value
        recent = sum(skipped > batch - self.window for skipped in self.skipped)
        skip = self.action == 'skip' and recent < self.max_skips
        if self.action == 'skip' and not skip:
            reason += f', after {recent} skipped updates in the last {self.window} batches'
        # An optimizer step without gradients changes neither weights nor moments. Gradients must also be gone before a
        # save: if an optimizer has no state yet, torch's get_optimizer_state_dict initializes it only if no parameter
        # has a gradient; otherwise the checkpoint would lack that state.
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if dist.get_global_rank() == 0:
            append_bad_batch(
                self.path,
                batch=batch,
                epoch=state.timestamp.epoch.value,
                reason=reason,
                loss=loss,
                history=self.history,
                sample_ids=ids,
                action='skip' if skip else 'stop',
            )
            action = 'update skipped' if skip else 'the run stops'
            self.on_bad_batch(f'batch {batch}: {reason}; {action}; {describe_samples(ids, self.path)}')
        if not skip:
            # If the run stops at its first batch, the checkpoint it resumed from already has this state. Do not
            # overwrite it: it may be the only good one.
            started_here = batch == self._first_batch
            saved = None if started_here else save_now(state, logger)
            checkpoint = describe_checkpoint(saved, started_here=started_here)
            what = f'batch {batch}: {reason}; {describe_samples(ids, self.path)}; {checkpoint}'
            raise BadLoss(f'{what}. {REMEDY}{"" if self.action == "skip" else OR_SKIP}')
        self.skipped = [*self.skipped, batch]
        logger.log_metrics({'loss_guard/skipped_updates': len(self.skipped)})
        log.warning('batch %d: %s; update skipped, %s', batch, reason, describe_samples(ids, self.path))


def record_microbatch(loss: Any, batch: Any, sample_losses: Tensor | None) -> Microbatch:
    """Record a microbatch without waiting for the GPU; if `sample_losses` is not [B], samples get the mean loss."""
    if isinstance(loss, Mapping):
        loss = loss['total'] if 'total' in loss else tuple(loss.values())
    # Create new tensors, since Composer scales the loss in place before the backward pass.
    total = torch.stack([part.detach().float().mean() for part in ensure_tuple(loss)]).sum()
    ids = batch.get(batch_keys.SAMPLE_ID) if isinstance(batch, Mapping) else None
    if sample_losses is None or (ids is not None and len(sample_losses) != len(ids)):
        sample_losses = total.expand(1 if ids is None else len(ids))
    return Microbatch(total, sample_losses, ids)


def append_bad_batch(
    path: Path,
    *,
    batch: int,
    epoch: int,
    reason: str,
    sample_ids: Sequence[int],
    loss: float = math.nan,
    history: Sequence[float] = (),
    action: Literal['skip', 'stop'] = 'stop',
) -> None:
    line = {
        'batch': batch,
        'epoch': epoch,
        'reason': reason,
        'loss': loss if math.isfinite(loss) else None,
        'median': median(history) if history else None,
        'sample_ids': list(sample_ids),
        'action': action,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with append_text(path) as file:
        file.write(json.dumps(line) + '\n')


def reduce_over_ranks(
    microbatches: Sequence[Microbatch], finite: Tensor | None, squared_norm: Tensor | None = None
) -> Tensor:
    """Sum losses, counts and squared gradient norms of a batch over all ranks, on the device; a collective.

    `finite`, bool [], is None if gradients are not checked. Returns the sum of the losses of all samples, number of
    samples, number of ranks with gradients that are not finite, and squared norm of the gradients, float64 [4].
    """
    total = torch.stack([each.loss * len(each.sample_losses) for each in microbatches]).sum().double()
    count = torch.full_like(total, sum(len(each.sample_losses) for each in microbatches))
    bad = torch.zeros_like(total) if finite is None else (~finite).to(total)
    squares = torch.zeros_like(total) if squared_norm is None else squared_norm.to(total)
    # A single tensor needs only one collective and one copy to the host per batch.
    figures = torch.stack([total, count, bad, squares])
    dist.all_reduce(figures, reduce_operation='SUM')
    return figures


def explosion_limit(history: Sequence[float], explosion: float | None, window: int) -> float:
    """Return the loss above which a batch is bad: a multiple of the median of `history`.

    Infinity means no limit: `explosion` is None, `history` is shorter than half the window, or the median is not
    positive.
    """
    if explosion is None or len(history) < window // 2:
        return math.inf
    middle = median(history)
    # A multiple of the median is not a meaningful limit for losses that can be zero or negative.
    return explosion * middle if middle > 0 else math.inf


def find_problem(loss: float, gradients_finite: bool, limit: float, history: Sequence[float]) -> str | None:
    """Return a description of a batch's bad loss or gradients, such as `loss is nan`, or None if both are good."""
    if not math.isfinite(loss):
        return f'loss is {loss}'
    if not gradients_finite:
        return f'gradients are not finite (loss {loss:.4g})'
    if loss > limit:
        middle = median(history)
        return f'loss is {loss:.4g}, {loss / middle:.0f} times the median {middle:.4g} of the last {len(history)}'
    return None


def samples_of(microbatches: Sequence[Microbatch], finite: Tensor | None) -> Samples:
    losses = torch.cat([each.sample_losses for each in microbatches]).tolist()
    ids = [int(i) for each in microbatches if each.sample_ids is not None for i in each.sample_ids.tolist()]
    total = torch.stack([each.loss for each in microbatches]).sum()
    not_finite = not bool(total.isfinite()) or not (finite is None or bool(finite))
    return Samples(losses, ids, not_finite)


def suspects(ranks: Sequence[Samples], limit: float) -> list[int]:
    """Return the IDs of suspicious samples in a bad batch; empty if samples have no IDs.

    Suspicious samples are those whose own loss is not finite; if all are finite, those whose loss is above the limit,
    largest first; if all are below it too, all samples of ranks whose loss or gradients are not finite. (Under DDP
    gradients are averaged over ranks, so this means all samples of all ranks.)
    """
    pairs = [pair for rank in ranks if rank.ids for pair in zip(rank.losses, rank.ids, strict=True)]
    found = [(loss, i) for loss, i in pairs if not math.isfinite(loss)]
    found = found or sorted([(loss, i) for loss, i in pairs if loss > limit], reverse=True)
    return [i for _, i in found] or [i for rank in ranks if rank.not_finite for i in rank.ids]


def describe_samples(ids: Sequence[int], path: Path) -> str:
    if not ids:
        return f'samples unknown, the batch has no {batch_keys.SAMPLE_ID}'
    more = f' and {len(ids) - MAX_IDS_SHOWN} more, in {path}' if len(ids) > MAX_IDS_SHOWN else ''
    return f'sample{"s" if len(ids) > 1 else ""} {", ".join(str(i) for i in ids[:MAX_IDS_SHOWN])}{more}'


def describe_checkpoint(saved: str | None, *, started_here: bool) -> str:
    if started_here:
        return 'no update was made since this run started'
    return f'the weights before this batch are in {saved}' if saved else NOT_SAVED
