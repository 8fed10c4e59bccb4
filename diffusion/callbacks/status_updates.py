"""Callbacks that update the status files read by `diffusion status`, and the heartbeat files that reveal hangs."""

import time
from collections.abc import Callable
from pathlib import Path

from composer.core import Callback, Event, State
from composer.loggers import Logger

from diffusion.loggers.progress_lines import BatchTimer, total_batches
from diffusion.runs import node_status
from diffusion.runs.attempts import Attempt
from diffusion.runs.heartbeats import SAVING, TRAINING, write_rank_heartbeat

RECORD_SECONDS = 30.0
"""Interval at which the progress of an attempt (one start of the run) is recorded, in case this process is killed."""
_DOING = {
    Event.BEFORE_DATALOADER: node_status.TRAINING,
    Event.BATCH_CHECKPOINT: node_status.SAVING,
    Event.EPOCH_CHECKPOINT: node_status.SAVING,
    Event.EVAL_START: node_status.EVALUATING,
    Event.FIT_END: node_status.SAVING,
}


class RunStatus(Callback):
    """Callback that records this node's batch number, speed and time of the last batch in the run's files."""

    # The training thread only sets attributes; a background thread writes them, since file systems can hang.

    def __init__(self, run: Path | str) -> None:
        self.run = run
        self.attempt: Attempt | None = None
        """Record of this attempt on rank 0; None on other ranks, or if the node entry point writes the record."""
        self.on_record: Callable[[Attempt], None] = lambda attempt: None
        """Function that records the progress of the attempt; called every RECORD_SECONDS in the writer thread."""
        self._timer = BatchTimer()
        self._writer: node_status.StatusWriter | None = None
        self._epoch = time.time() - time.monotonic()
        self._recorded_at = 0.0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            self._start(state)
        if self._writer is None:
            return
        now, status = time.monotonic(), self._writer.status
        status.doing = _DOING.get(event, status.doing)
        if event is Event.BEFORE_DATALOADER:
            self._timer.begin(now)
            if status.total_batches is None:
                status.total_batches = total_batches(state)
            if self.attempt is not None and self.attempt.first is None:
                self.attempt.first = self.attempt.last = state.timestamp.batch.value
                self.attempt.first_at = self.attempt.last_at = self._epoch + now
        elif event is Event.BATCH_END:
            self._timer.end(now)
            self._writer.last_batch_at = now
            status.batch = state.timestamp.batch.value
            status.seconds_per_batch = self._timer.seconds_per_batch
            if self.attempt is not None:
                self.attempt.last, self.attempt.last_at = status.batch, self._epoch + now

    def _start(self, state: State) -> None:
        position = node_status.position_of_node()
        if position is None or self._writer is not None:
            return
        batch = state.timestamp.batch.value
        status = node_status.NodeStatus(*position, batch=batch, total_batches=total_batches(state))
        self._writer = node_status.StatusWriter(self.run, status, on_write=self._record_progress)
        self._writer.start()

    def close(self, state: State, logger: Logger) -> None:
        if self._writer is not None:
            self._writer.stop()
            self._writer = None

    def _record_progress(self) -> None:
        """Record the progress of this attempt at intervals; runs in the writer thread."""
        now = time.monotonic()
        attempt = self.attempt
        if attempt is None or attempt.first is None or attempt.status is not None:
            return
        if now - self._recorded_at >= RECORD_SECONDS or not self._recorded_at:
            self._recorded_at = now
            self.on_record(attempt)


_BEFORE_SLOW_WORK = {Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.EVAL_START, Event.FIT_END}
"""Events before work that can take much longer than a batch: saves, evaluations or uploads."""


class Heartbeat(Callback):
    """Callback that updates this rank's heartbeat file before each batch, save and evaluation, to reveal hangs."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        # The event is BEFORE_DATALOADER instead of BATCH_START, so that a batch includes the wait for its data.
        if event is Event.BEFORE_DATALOADER:
            self.beat(state, TRAINING)
        elif event in _BEFORE_SLOW_WORK:
            self.beat(state)

    def beat(self, state: State, doing: str = SAVING) -> None:
        """Update the heartbeat file; other callbacks call this during work that takes much longer than a batch."""
        batch = state.timestamp.batch.value
        self._first = self._first or (batch, time.monotonic())
        write_rank_heartbeat(batch, doing, *self._first)
