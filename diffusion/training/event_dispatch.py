"""Faster dispatch of Composer's events: a callback is called only for the events that it handles."""

import os
from functools import cache, partial

from composer import Trainer
from composer.core import Callback, Event
from composer.loggers import LoggerDestination

from diffusion.compatibility.private_names import set_private_attribute


def call_only_handlers(trainer: Trainer) -> None:
    """Make a Trainer's engine skip callbacks and loggers that do nothing at an event; the order does not change."""
    # Composer calls every callback at every event, and formats a line for a debug log first: 10 microseconds for each
    # of 25 events of 16 callbacks, which is 4 ms per step, a fifth of a step on 128 H100. Nearly all do nothing. These
    # methods of the engine are private; with a profiler or Composer's debug log they stay as they are.
    engine = trainer.engine
    if engine.state.profiler is not None or os.environ.get('ENGINE_DEBUG'):
        return

    def dispatch(event: Event | str, *, to_loggers: bool) -> None:
        event = Event(event)
        for callback in engine.state.callbacks:
            if isinstance(callback, LoggerDestination) == to_loggers and handles(callback, event.value):
                callback.run_event(event, engine.state, engine.logger)

    set_private_attribute(engine, '_run_loggers', partial(dispatch, to_loggers=True))
    set_private_attribute(engine, '_run_nonlogger_callbacks', partial(dispatch, to_loggers=False))


def handles(callback: Callback, event: str) -> bool:
    """Return True if a callback does something at an event, named as the method for it, such as `batch_end`."""
    # A method may be replaced on the object, too.
    changed = callback.__dict__
    return event in changed or 'run_event' in changed or _class_handles(type(callback), event)


@cache
def _class_handles(kind: type[Callback], event: str) -> bool:
    """Return True if a class of callbacks has a method for an event, or handles events by itself."""
    overrides_all = kind.run_event not in (Callback.run_event, LoggerDestination.run_event)
    return overrides_all or getattr(kind, event) not in (getattr(Callback, event), getattr(LoggerDestination, event))
