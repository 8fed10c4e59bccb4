"""Apply the recipe's optimizer settings and learning rate schedule to a run that resumes with other values.

Loading a checkpoint also restores the settings of its optimizer and scheduler. Without this callback a run would
silently keep the former weight decay, betas, epsilon and base learning rate.
"""

from collections.abc import Mapping
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor

MUON_SETTINGS = ('momentum', 'nesterov', 'newton_schulz_steps', 'newton_schulz_dtype')
SETTINGS = ('betas', 'eps', 'weight_decay', *MUON_SETTINGS)
"""Settings of a parameter group besides the learning rate, of all optimizers that have them."""


class OptimizerSettings(Callback):
    """Callback that records the settings an optimizer was built with, and applies those that change on resume.

    Settings that training itself changes, such as the learning rate under a schedule, are replaced only if the recipe
    has changed; otherwise a resumed run equals an uninterrupted one bit for bit.

    Args:
        optimizer: The optimizer, before the Trainer adds a scheduler to it.
        schedule: Plain values that determine the learning rate schedule, to recognize a change.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, schedule: Mapping[str, Any]) -> None:
        self.groups = [_settings(group) for group in optimizer.param_groups]
        self.schedule = dict(schedule)
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {'groups': self.groups, 'schedule': self.schedule}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = state

    def after_load(self, state: State, logger: Logger) -> None:
        if not state.timestamp.batch.value:
            return
        groups = state.optimizers[0].param_groups
        # A checkpoint of an earlier version has no record; its optimizer's own values are compared then.
        saved = self._saved.get('groups') or [_settings(group) for group in groups]
        for group, before, now in zip(groups, saved, self.groups, strict=True):
            group.update({key: now[key] for key in SETTINGS if key in now and before.get(key) != now[key]})
        before, now = ([group['lr'] for group in each] for each in (saved, self.groups))
        if not self._saved or self._saved['schedule'] != self.schedule or before != now:
            set_learning_rates(state, now)


def set_learning_rates(state: State, base: list[float]) -> None:
    """Set the base learning rates of the parameter groups, and the rates of the next batch by the schedule."""
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
    """Return the factor of each group's base learning rate in the next batch, for a scheduler that Composer built."""
    # Composer steps a scheduler before it counts the batch that has just ended, so that batch n + 1 gets the rate of
    # time n. So evaluate the schedule one batch earlier; the next batch then gets the rate it would have had without
    # the restart.
    now = state.timestamp
    batch, sample = now.batch.value, now.sample.value
    state.timestamp = now.copy(batch=batch - 1, sample=sample * (batch - 1) // batch)
    try:
        return [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    finally:
        state.timestamp = now


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group as plain values."""
    found = {key: group[key] for key in ('lr', *SETTINGS) if key in group}
    found = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in found.items()}


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Set a group's learning rate, in place if it is a tensor."""
    if isinstance(group['lr'], Tensor):
        group['lr'].fill_(rate)
    else:
        group['lr'] = rate
