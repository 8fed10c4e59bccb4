"""Train a recipe, and signal the last rank at an event: `interrupted_run.py RECIPE OVERRIDES...`.

The environment has the event in INTERRUPTION, as `EVENT BATCH SIGNAL` with Composer's name of the event, the number of
batches done and the number of the signal; in RANDOM_STATES, a file to which each rank appends a digest of its random
state at the start of every batch; in EVENTS, a file to which rank 0 appends each event and the number of batches done.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import pytest
import torch
from callbacks.guarded_run import At
from composer.core import Callback, Event, State
from composer.loggers import Logger
from cpu_autocast import allow_half_precision

from diffusion.launch.workers import end_process
from diffusion.tasks import run_recipe
from diffusion.training import train


class RandomStates(Callback):
    def __init__(self, path: str) -> None:
        self.path = f'{path}-{os.environ["RANK"]}'

    def batch_start(self, state: State, logger: Logger) -> None:
        digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        append(self.path, f'{state.timestamp.batch.value} {digest}\n')


class Events(Callback):
    """Callback that appends each event with the number of batches done to a file."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        append(os.environ['EVENTS'], f'{event.value} {state.timestamp.batch.value}\n')


def append(path: str, line: str) -> None:
    with open(path, 'a') as file:
        file.write(line)


def added_callbacks() -> list[Callback]:
    added: list[Callback] = []
    if 'INTERRUPTION' in os.environ and os.environ['RANK'] == str(int(os.environ['WORLD_SIZE']) - 1):
        event, batch, number = os.environ['INTERRUPTION'].split()
        added.append(At(Event(event), int(batch), lambda: signal.raise_signal(int(number))))
    if 'RANDOM_STATES' in os.environ:
        added.append(RandomStates(os.environ['RANDOM_STATES']))
    if 'EVENTS' in os.environ and os.environ['RANK'] == '0':
        added.append(Events())
    return added


def build_trainer(recipe: Any, *arguments: Any, build: Any = train.build_trainer) -> Any:
    """Build a Trainer with `added_callbacks` before its own, whose Checkpointer must come last."""
    trainer = build(recipe, *arguments)
    trainer.state.callbacks[:0] = added_callbacks()
    return trainer


if __name__ == '__main__':
    allow_half_precision(pytest.MonkeyPatch())
    train.build_trainer = build_trainer
    end_process(run_recipe.main(sys.argv[1:]))
