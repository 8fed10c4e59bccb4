"""Dispatch of events: each callback gets the events that it handles, in Composer's order, and no others."""

from collections import Counter
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.core.engine import Engine
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diffusion.training.event_dispatch import call_only_handlers

CALLS: list[tuple[str, str]] = []


class Regression(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return outputs.square().mean()


class One(Callback):
    def batch_end(self, state: State, logger: Logger) -> None:
        CALLS.append((type(self).__name__, 'batch_end'))


class Two(One):
    def after_loss(self, state: State, logger: Logger) -> None:
        CALLS.append((type(self).__name__, 'after_loss'))


class Every(Callback):
    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        CALLS.append((type(self).__name__, event.value))


class Destination(LoggerDestination):
    def batch_end(self, state: State, logger: Logger) -> None:
        CALLS.append((type(self).__name__, 'batch_end'))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        CALLS.append((type(self).__name__, 'log_metrics'))


class Replaced(Callback):
    """Gets a method for an event after the Trainer was built, as profilers give it."""


def calls_of_a_run(*, fast: bool) -> list[tuple[str, str]]:
    CALLS.clear()
    replaced = Replaced()
    trainer = Trainer(
        model=Regression(),
        train_dataloader=DataLoader([torch.ones(2)] * 4, batch_size=2),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD(Regression().parameters(), lr=0.1),
        max_duration='2ep',
        callbacks=[One(), Every(), replaced, Two()],
        loggers=[Destination()],
        device='cpu',
        progress_bar=False,
    )
    if fast:
        call_only_handlers(trainer)
    replaced.before_backward = lambda state, logger: CALLS.append(('Replaced', 'before_backward'))  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return list(CALLS)


def test_calls_and_their_order_are_those_of_composer():
    ours = calls_of_a_run(fast=True)
    assert ours == calls_of_a_run(fast=False)
    counts = Counter(ours)
    assert counts['One', 'batch_end'] == counts['Two', 'after_loss'] == counts['Replaced', 'before_backward'] == 4
    assert counts['Every', 'batch_start'] == 4


def test_callbacks_without_a_method_for_an_event_are_not_called(monkeypatch):
    called = Counter()
    original = Callback.run_event

    def counting(self: Callback, event: Event, state: State, logger: Logger) -> None:
        called[type(self).__name__, event.value] += 1
        original(self, event, state, logger)

    monkeypatch.setattr(Callback, 'run_event', counting)
    calls_of_a_run(fast=True)
    assert called['One', 'batch_end'] == 4
    assert called['One', 'batch_start'] == 0


def test_debug_log_of_composer_keeps_its_dispatch(monkeypatch):
    monkeypatch.setenv('ENGINE_DEBUG', '1')
    used = []
    monkeypatch.setattr(Engine, '_run_nonlogger_callbacks', lambda engine, event: used.append(event))
    calls_of_a_run(fast=True)
    assert Event.BATCH_END in used


@pytest.fixture(autouse=True)
def _no_calls_left():
    yield
    CALLS.clear()
