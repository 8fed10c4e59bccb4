"""Logger that writes a progress line at intervals, for runs whose output goes to a file instead of a terminal."""

import logging
import time
from typing import Any

from composer.core import State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.loggers.batch_timer import BatchTimer
from diffusion.loggers.metrics_file import TRAIN_LOSS

log = logging.getLogger(__name__)


class ConsoleLines(LoggerDestination):
    """Log a line with batch, loss, speed and remaining time, and a line per evaluation with its metrics.

    Speed and remaining time are those of training alone: the evaluations, image grids and saves to come are not
    included (see `diffusion.loggers.batch_timer`).

    Args:
        every_seconds: Minimum time between two lines.
    """

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._timer = BatchTimer()
        self._loss = float('nan')
        self._reported_at = 0.0
        self._reported_batch = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        # The Trainer logs the loss right after it has waited for the device: the batch is computed. At BATCH_END,
        # other callbacks would already have run.
        if TRAIN_LOSS in metrics:
            self._loss = float(metrics[TRAIN_LOSS])
            self._timer.end(time.monotonic())

    def fit_start(self, state: State, logger: Logger) -> None:
        self._reported_at, self._reported_batch = time.monotonic(), state.timestamp.batch.value

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._timer.begin(time.monotonic())

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() - self._reported_at >= self.every_seconds:
            self._report(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value > self._reported_batch:
            self._report(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        # A Trainer without max_duration does not train: the program itself shows the metrics.
        if dist.get_global_rank() == 0 and state.dataloader_label is not None and state.max_duration is not None:
            metrics = state.eval_metrics.get(state.dataloader_label, {})
            figures = ', '.join(f'{name}={float(metric.compute()):.4f}' for name, metric in metrics.items())
            log.info('batch %d, evaluation: %s', state.timestamp.batch.value, figures)

    def _report(self, state: State) -> None:
        self._reported_at, self._reported_batch = time.monotonic(), state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            log.info('%s', self._progress(state))

    def _progress(self, state: State) -> str:
        """Return batch, loss, speed and remaining time, as far as they are known."""
        batch, total = state.timestamp.batch.value, total_batches(state)
        parts = [f'batch {batch}' if total is None else f'batch {batch} of {total}', f'loss {self._loss:.4f}']
        seconds = self._timer.seconds_per_batch
        if seconds is not None:
            parts.append(f'{1 / seconds:.2f} batches/s' if seconds < 1 else f'{seconds:.2f} s/batch')
            if total is not None and batch < total:
                parts.append(f'{format_duration((total - batch) * seconds)} left')
        return ', '.join(parts)


def total_batches(state: State) -> int | None:
    """Return the number of batches of a whole training; None if its duration is not given in batches or epochs.

    Call it while the training data are loaded, since an epoch is one of the loader in use.
    """
    end = state.max_duration
    if end is not None and end.unit == TimeUnit.BATCH:
        return end.value
    if end is not None and end.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        return end.value * int(state.dataloader_len)
    return None


def format_duration(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 90:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.1f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'
