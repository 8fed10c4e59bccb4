"""Loggers that show a run's progress: in a terminal's status line, or as lines at intervals in a log file."""

import logging
import math
import time
from typing import Any

from composer.core import State, TimeUnit
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.loggers import status_line
from diffusion.loggers.metrics_file import TRAIN_LOSS

HORIZON_SECONDS = 60.0
"""Time constant of the average: a batch this long ago has 1/e times the weight of the latest batch."""
MIN_KEEP = 0.9
"""Lower bound on the factor by which the weight of older batches decays per batch, so that the average covers at least
about ten batches."""


class BatchTimer:
    """Exponential average of training batch durations, excluding slow work between batches.

    A batch begins with the wait for its data and ends when its loss is known. The time between batches counts only up
    to the duration of the preceding batch. So callbacks that run after every batch count, but evaluations,
    image grids and saves, which take much longer than a batch, do not. The first batch does not count either, since
    compilation and the start of the data loader make it slow.
    """

    def __init__(self) -> None:
        self._begin: float | None = None
        self._end: float | None = None
        # Decayed sums, whose ratio is the average without the bias of an initial value.
        self._seconds = 0.0
        self._batches = 0.0

    def begin(self, now: float) -> None:
        """Record the time, in seconds, at which the wait for a batch begins."""
        self._begin = now
        self._gap = now - (self._end or now)

    def end(self, now: float) -> None:
        """Record the time, in seconds, at which the batch's loss is known."""
        first, self._end = self._end is None, now
        if first or self._begin is None:
            return
        batch = now - self._begin
        seconds = batch + min(self._gap, batch)
        keep = max(MIN_KEEP, math.exp(-seconds / HORIZON_SECONDS))
        self._seconds = keep * self._seconds + seconds
        self._batches = keep * self._batches + 1

    @property
    def seconds_per_batch(self) -> float | None:
        """Average duration of recent batches; None before the second batch."""
        return self._seconds / self._batches if self._seconds else None


log = logging.getLogger(__name__)


class ConsoleLines(LoggerDestination):
    """Log a line with batch, loss, speed and remaining time, and a line per evaluation with its metrics.

    Speed and remaining time only cover training, not future evaluations, image grids and saves (see `BatchTimer`).

    Args:
        every_seconds: Minimum time between two lines.
    """

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._timer = BatchTimer()
        self._loss = float('nan')

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        # The batch ends here: the Trainer logs the loss right after the device has computed the batch. At BATCH_END,
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
        # A Trainer without max_duration only evaluates: the program that created it shows the metrics itself.
        if dist.get_global_rank() == 0 and state.dataloader_label is not None and state.max_duration is not None:
            metrics = state.eval_metrics.get(state.dataloader_label, {})
            figures = ', '.join(f'{name}={float(metric.compute()):.4f}' for name, metric in metrics.items())
            log.info('batch %d, evaluation: %s', state.timestamp.batch.value, figures)

    def _report(self, state: State) -> None:
        self._reported_at, self._reported_batch = time.monotonic(), state.timestamp.batch.value
        if dist.get_global_rank() == 0:
            log.info('%s', self._progress(state))

    def _progress(self, state: State) -> str:
        batch, total = state.timestamp.batch.value, total_batches(state)
        parts = [f'batch {batch}' if total is None else f'batch {batch} of {total}', f'loss {self._loss:.4f}']
        seconds = self._timer.seconds_per_batch
        if seconds is not None:
            parts.append(f'{1 / seconds:.2f} batches/s' if seconds < 1 else f'{seconds:.2f} s/batch')
            if total is not None and batch < total:
                parts.append(f'{format_duration((total - batch) * seconds)} left')
        return ', '.join(parts)


def total_batches(state: State) -> int | None:
    """Return the run's number of batches, assuming equal epochs; None if unknown, such as for a length in samples."""
    end = state.max_duration
    if end is not None and end.unit == TimeUnit.BATCH:
        return end.value
    if end is not None and end.unit == TimeUnit.EPOCH and state.dataloader_len is not None:
        return end.value * int(state.dataloader_len)
    return None


def format_duration(seconds: float) -> str:
    if seconds < 90:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.1f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'


REFRESH_SECONDS = 0.2


class ProgressLine(ConsoleLines):
    """Show batch, loss, speed and remaining time in the status line; log a line at the end and per evaluation.

    Requires a status line; see `diffusion.loggers.status_line.install`.
    """

    # Composer's progress bar is not used: it shares lines with log messages, counts evaluations as training time, and
    # first prints Composer's hyperparameters.

    def __init__(self) -> None:
        super().__init__()
        self._shown_at = 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._is_due():
            status_line.show(with_bar(self._progress(state), state.timestamp.batch.value, total_batches(state)))

    def fit_end(self, state: State, logger: Logger) -> None:
        status_line.show('')
        super().fit_end(state, logger)

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self._is_due():
            trained, batch, total = state.timestamp.batch.value, state.eval_timestamp.batch.value, state.dataloader_len
            after = f'batch {trained}, ' if trained else ''
            status_line.show(f'{after}evaluation batch {batch}' + ('' if total is None else f' of {int(total)}'))

    def eval_end(self, state: State, logger: Logger) -> None:
        status_line.show('')
        super().eval_end(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        status_line.show('')

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now - self._shown_at < REFRESH_SECONDS:
            return False
        self._shown_at = now
        return True


def has_terminal(progress_bar: bool) -> bool:
    """Reserve a status line on rank 0 at a terminal, unless `progress_bar` is off; return True if there is one."""
    return progress_bar and dist.get_global_rank() == 0 and status_line.install()


def with_bar(text: str, batch: int, total: int | None) -> str:
    """Put a bar of 1/8 of the terminal's width before a text, unless `total` is None or both do not fit in a row."""
    if total is None:
        return text
    width = status_line.columns() // 8
    done = width * min(batch, total) // total
    text_with_bar = f'[{"#" * done}{"." * (width - done)}] {text}'
    return text_with_bar if len(text_with_bar) <= status_line.columns() else text
