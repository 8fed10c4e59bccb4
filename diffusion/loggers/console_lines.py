"""Logger that writes a progress line at intervals, for runs whose output goes to a file instead of a terminal."""

import logging
import time
from typing import Any

from composer.core import State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

log = logging.getLogger(__name__)


class ConsoleLines(LoggerDestination):
    """Logger that writes lines with batch, loss, batches per second and remaining time, and a line per evaluation.

    Args:
        every_seconds: Minimum time between two lines.
    """

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._loss = float('nan')
        self._last_line_time = 0.0
        self._batch = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if 'loss/train/total' in metrics:
            self._loss = float(metrics['loss/train/total'])

    def fit_start(self, state: State, logger: Logger) -> None:
        self._last_line_time, self._batch = time.monotonic(), state.timestamp.batch.value

    def batch_end(self, state: State, logger: Logger) -> None:
        elapsed = time.monotonic() - self._last_line_time
        if elapsed >= self.every_seconds:
            self._log_progress(state, elapsed)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value > self._batch:
            self._log_progress(state, time.monotonic() - self._last_line_time)

    def eval_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0 and state.dataloader_label is not None:
            metrics = state.eval_metrics.get(state.dataloader_label, {})
            figures = ', '.join(f'{name} {float(metric.compute()):.4f}' for name, metric in metrics.items())
            log.info('batch %d, evaluation: %s', state.timestamp.batch.value, figures)

    def _log_progress(self, state: State, elapsed: float) -> None:
        batch = state.timestamp.batch.value
        speed = (batch - self._batch) / elapsed
        self._last_line_time, self._batch = time.monotonic(), batch
        if dist.get_global_rank() == 0:
            log.info(
                'batch %s, loss %.4f, %.2f batches/s%s',
                _format_progress(state),
                self._loss,
                speed,
                _format_remaining(state, speed),
            )


def _format_progress(state: State) -> str:
    """Return the batch number as text, with the total if the training duration is given in batches."""
    end = state.max_duration
    batch = state.timestamp.batch.value
    return f'{batch} of {end.value}' if end is not None and end.unit == TimeUnit.BATCH else str(batch)


def _format_remaining(state: State, speed: float) -> str:
    """Return the estimated remaining time as the end of a line; empty if the duration is not given in batches."""
    end = state.max_duration
    if end is None or end.unit != TimeUnit.BATCH or not speed:
        return ''
    minutes = (end.value - state.timestamp.batch.value) / speed / 60
    return f', {minutes:.1f} minutes left' if minutes < 90 else f', {minutes / 60:.1f} hours left'
