"""Tells the node entry point that a rank makes progress."""

import time

from composer.core import Callback, Event, State
from composer.loggers import Logger

from diffusion.launch.heartbeat import SAVING, TRAINING, Beat, write_beat

_LONG = {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.EVAL_START, Event.FIT_END}
"""After which something may take much longer than a batch: saves, evaluations, uploads."""


class Heartbeat(Callback):
    """Writes a beat before each batch, and before what may take long; see `diffusion.launch.heartbeat`."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        # A batch begins with the wait for its data.
        if event is not Event.BEFORE_DATALOADER and event not in _LONG:
            return
        now, batch = time.time(), state.timestamp.batch.value
        self._first = self._first or (batch, now)
        write_beat(Beat(now, batch, TRAINING if event is Event.BEFORE_DATALOADER else SAVING, *self._first))
