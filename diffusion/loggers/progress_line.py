"""Logger that shows the progress of training and evaluation in the status line of a terminal."""

import time

from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.loggers import status_line
from diffusion.loggers.console_lines import ConsoleLines, total_batches

REFRESH_SECONDS = 0.2


class ProgressLine(ConsoleLines):
    """Show batch, loss, speed and remaining time in the status line; log a line at the end and per evaluation.

    The terminal must have a status line, see `diffusion.loggers.status_line.install`.
    """

    # Composer's progress bar is not used: it shares rows with log messages, counts evaluations as training time, and
    # prints hyperparameters of Composer first.

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
    """Return True on the rank that shows a status line: rank 0 at a terminal, unless `trainer.progress_bar` is off."""
    return progress_bar and dist.get_global_rank() == 0 and status_line.install()


def with_bar(text: str, batch: int, total: int | None) -> str:
    """Return a progress text after a bar with 1/8 of the terminal's columns, or the text alone if it does not fit."""
    if total is None:
        return text
    width = status_line.columns() // 8
    done = width * min(batch, total) // total
    text_with_bar = f'[{"#" * done}{"." * (width - done)}] {text}'
    return text_with_bar if len(text_with_bar) <= status_line.columns() else text
