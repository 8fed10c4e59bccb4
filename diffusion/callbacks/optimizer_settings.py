"""Apply the recipe's optimizer settings and learning rate schedule to a run that resumes with different ones.

Loading a checkpoint also restores the settings of its optimizer and scheduler. Without this callback a run would
silently keep the former weight decay, betas, epsilon and base learning rate.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State, Timestamp
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

log = logging.getLogger(__name__)

MUON_SETTINGS = ('momentum', 'nesterov', 'newton_schulz_steps', 'newton_schulz_dtype')
SETTINGS = ('betas', 'eps', 'weight_decay', *MUON_SETTINGS)
"""Names of the parameter group settings of all supported optimizers, except the learning rate."""
MAX_CALM_FACTOR = 2.0
"""A change of the learning rate on resume is logged as a warning if it rises or falls by more than this factor."""


class OptimizerSettings(Callback):
    """Callback that records the settings an optimizer was built with, and applies changed settings on resume.

    If the schedule or the length of the run changes, the log reports the learning rates of the last batch before the
    resume and the first batch after it. Create this callback before the Trainer adds a scheduler to the optimizer.

    Settings that training itself changes, such as the learning rate under a schedule, are replaced only if the recipe
    has changed; otherwise a resumed run equals an uninterrupted one bit for bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, schedule: Mapping[str, Any]) -> None:
        self.groups = [_settings(group) for group in optimizer.param_groups]
        self.schedule = dict(schedule)
        self._saved: dict[str, Any] = {}
        self._last: dict[str, Any] = {}

    def batch_start(self, state: State, logger: Logger) -> None:
        rate = state.optimizers[0].param_groups[0]['lr']
        # Skip a rate on the GPU: reading it would make the host wait.
        known = not (isinstance(rate, Tensor) and rate.is_cuda)
        length = state.dataloader_len
        self._last = {
            'rate': float(rate) if known else None,
            'batches_per_epoch': None if length is None else int(length),
        }

    def state_dict(self) -> dict[str, Any]:
        return {'groups': self.groups, 'schedule': self.schedule, 'last': self._last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def after_load(self, state: State, logger: Logger) -> None:
        if not state.timestamp.batch.value:
            return
        groups = state.optimizers[0].param_groups
        # If trainer.load_ignore_keys dropped the saved record, compare with the settings of the loaded optimizer.
        saved = self._saved.get('groups') or [_settings(group) for group in groups]
        for group, before, now in zip(groups, saved, self.groups, strict=True):
            group.update({key: now[key] for key in SETTINGS if key in now and before.get(key) != now[key]})
        before, now = ([group['lr'] for group in each] for each in (saved, self.groups))
        if not self._saved or self._saved['schedule'] != self.schedule or before != now:
            saved_rate = float(groups[0]['lr'])
            set_learning_rates(state, now)
            self._log_rates(state.timestamp.batch.value, saved_rate, float(groups[0]['lr']))

    def _log_rates(self, batch: int, saved: float, now: float) -> None:
        """Log a change of the learning rate on resume; it is a warning if the factor exceeds MAX_CALM_FACTOR."""
        if dist.get_global_rank() != 0 or math.isclose(saved, now, rel_tol=1e-9):
            return
        last = self._saved.get('last', {}).get('rate')
        jumps = not 1 / MAX_CALM_FACTOR <= now / (last or saved or now or 1) <= MAX_CALM_FACTOR
        text = describe_rates(batch, last=last, saved=saved, now=now)
        log.log(logging.WARNING if jumps else logging.INFO, 'resumed with another schedule: %s', text)


def describe_rates(batch: int, *, last: float | None, saved: float, now: float) -> str:
    """Return the learning rates around a resume as text, such as `learning rate 1e-05 in batch 7, 4e-05 in batch 8`.

    Args:
        batch: Number of the first batch after the resume; `now` is its learning rate.
        last: Learning rate of the batch before; None if unknown (not recorded if on a GPU, or not in the checkpoint).
        saved: Learning rate that the first batch would have had without changes.
    """
    before = saved if last is None else last
    factor = f' ({now / before:.4g} times)' if before else ''
    start = f'{last:.4g} in batch {batch - 1}, ' if last is not None else ''
    same = math.isclose(saved, now, rel_tol=1e-9)
    return f'learning rate {start}{now:.4g} in batch {batch}{factor}' + (f', {saved:.4g} without changes' * (not same))


def set_learning_rates(state: State, base: list[float]) -> None:
    """Set the base learning rates of the parameter groups, and the scheduled rates for the next batch."""
    groups = state.optimizers[0].param_groups
    for group, rate in zip(groups, base, strict=True):
        _set_rate(group, rate)
        if state.schedulers or 'initial_lr' in group:
            group['initial_lr'] = rate
    for scheduler in state.schedulers:
        scheduler.base_lrs = list(base)
        for group, rate, factor in zip(groups, base, factors_of(scheduler, state), strict=True):
            _set_rate(group, rate * factor)


def factors_of(scheduler: Any, state: State) -> list[float]:
    """Return the factors by which a Composer scheduler multiplies the groups' base learning rates in the next batch."""
    # Composer steps a scheduler before it counts the batch that has just ended, so batch n + 1 gets the rate for time
    # n. Evaluate the schedule one batch earlier here too; the next batch then has the same rate as without the restart.
    now = state.timestamp
    state.timestamp = one_batch_earlier(now)
    try:
        return [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    finally:
        state.timestamp = now


def one_batch_earlier(now: Timestamp) -> Timestamp:
    batch, sample = now.batch.value, now.sample.value
    return now.copy(batch=batch - 1, sample=sample * (batch - 1) // batch)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: group[key] for key in ('lr', *SETTINGS) if key in group}
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in found.items()}


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group['lr'], Tensor):
        group['lr'].fill_(rate)
    else:
        group['lr'] = rate
