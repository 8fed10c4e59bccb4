"""The Trainer's work per step: less of it, with the same calls in the same order."""

from collections import Counter
from typing import Any

import pytest
from callbacks.guarded_run import make_data, make_trainer, run_to_end
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger, LoggerDestination

from diffusion.training.performance import reduce_step_overhead

CALLS: list[tuple[str, str]] = []


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


class Applied(Algorithm):
    def match(self, event: Event, state: State) -> bool:
        return event in (Event.AFTER_LOSS, Event.BATCH_END, Event.EPOCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        CALLS.append((type(self).__name__, event.value))


def calls_of_a_run(*, fast: bool, algorithms: bool = True) -> list[tuple[str, str]]:
    CALLS.clear()
    replaced = Callback()  # gets a method for an event after the Trainer was built, as profilers give it
    trainer = make_trainer(
        make_data()[:16],
        [One(), Every(), replaced, Two()],
        duration='2ep',
        algorithms=[Applied()] if algorithms else None,
        loggers=[Destination()],
    )
    if fast:
        reduce_step_overhead(trainer)
    replaced.before_backward = lambda state, logger: CALLS.append(('Replaced', 'before_backward'))  # type: ignore[method-assign]
    run_to_end(trainer)
    return list(CALLS)


@pytest.mark.parametrize('algorithms', [True, False])
def test_calls_and_their_order_are_those_of_composer(algorithms):
    ours = calls_of_a_run(fast=True, algorithms=algorithms)
    assert ours == calls_of_a_run(fast=False, algorithms=algorithms)
    counts = Counter(ours)
    assert counts['Applied', 'after_loss'] == counts['Applied', 'batch_end'] == 4 * algorithms
    assert counts['One', 'batch_end'] == counts['Two', 'after_loss'] == counts['Replaced', 'before_backward'] == 4
    assert counts['Every', 'batch_start'] == 4


def test_callbacks_without_a_method_for_an_event_are_not_called(monkeypatch):
    called = []
    monkeypatch.setattr(Callback, 'run_event', lambda self, event, *_: called.append((type(self), event.value)))
    calls_of_a_run(fast=True)
    assert called.count((One, 'batch_end')) == 4 and (One, 'batch_start') not in called
