"""Callback that keeps the status files of a run up to date, which `diffusion status` reads."""

import time
from collections.abc import Callable
from pathlib import Path

from composer.core import Callback, Event, State
from composer.loggers import Logger

from diffusion.launch import attempt_recorder, node_status
from diffusion.launch.attempts import Attempt
from diffusion.loggers.batch_timer import BatchTimer
from diffusion.loggers.console_lines import total_batches

RECORD_SECONDS = 30.0
"""Interval at which the progress of an attempt is recorded, for the case that this process is killed."""
_DOING = {
    Event.BEFORE_DATALOADER: node_status.TRAINING,
    Event.BATCH_CHECKPOINT: node_status.SAVING,
    Event.EPOCH_CHECKPOINT: node_status.SAVING,
    Event.EVAL_START: node_status.EVALUATING,
    Event.FIT_END: node_status.SAVING,
}


class RunStatus(Callback):
    """Callback that writes batch, speed and the time of the last batch of this node to the run's files.

    Args:
        run: The run's folder or URL.
    """

    # The training thread only sets attributes; a thread writes them, since file systems can hang.

    def __init__(self, run: Path | str) -> None:
        self.run = run
        self.attempt: Attempt | None = None
        """Record of this attempt, on rank 0 of a run without node entry point."""
        self.on_record: Callable[[], None] = lambda: None
        """Function that is called after the progress of the attempt was recorded, in the thread of the writer."""
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
            self._note_first_batch(state, now)
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

    def _note_first_batch(self, state: State, now: float) -> None:
        if self.attempt is not None and self.attempt.first is None:
            batch = state.timestamp.batch.value
            self.attempt.first, self.attempt.first_at = batch, self._epoch + now
            self.attempt.last, self.attempt.last_at = batch, self._epoch + now

    def _record_progress(self) -> None:
        """Record the progress of this attempt at intervals; runs in the thread of the writer."""
        now = time.monotonic()
        attempt = self.attempt
        if attempt is None or attempt.first is None or attempt.status is not None:
            return
        if now - self._recorded_at >= RECORD_SECONDS or not self._recorded_at:
            self._recorded_at = now
            attempt_recorder.record(self.run, 'progress', attempt)
            self.on_record()
