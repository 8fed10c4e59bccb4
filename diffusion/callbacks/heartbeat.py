"""Callback that writes a rank's heartbeat file, so that the node entry point can detect hangs."""

import time

from composer.core import Callback, Event, State
from composer.loggers import Logger

from diffusion.launch.heartbeat_file import SAVING, TRAINING, write_rank_heartbeat

_BEFORE_SLOW_WORK = {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.EVAL_START, Event.FIT_END}
"""Events before work that can take much longer than a batch: saves, evaluations and uploads."""


class Heartbeat(Callback):
    """Callback that updates this rank's heartbeat file before each batch, save and evaluation, to reveal hangs."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        # The event is BEFORE_DATALOADER instead of BATCH_START, so that a batch includes the wait for its data.
        if event is Event.BEFORE_DATALOADER:
            self._beat(state, TRAINING)
        elif event in _BEFORE_SLOW_WORK:
            self._beat(state, SAVING)

    def beat_in_slow_work(self, state: State) -> None:
        """Update the heartbeat file; other callbacks call this within work that takes much longer than a batch."""
        self._beat(state, SAVING)

    def _beat(self, state: State, doing: str) -> None:
        batch = state.timestamp.batch.value
        self._first = self._first or (batch, time.monotonic())
        write_rank_heartbeat(batch, doing, *self._first)
