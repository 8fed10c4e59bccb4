"""Callbacks for tests that need a slow run, or one that is killed; a recipe has them with `imports: [slow_parts]`."""

import os
import signal
import time
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger

from diffusion.config import registry


class SlowBatch(Callback):
    """Write a file when so many batches are done, and then wait before the next one."""

    def __init__(self, *, batch: int, file: str, seconds: float) -> None:
        self.batch, self.file, self.seconds = batch, Path(file), seconds

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            self.file.touch()
            time.sleep(self.seconds)


class SlowStart(Callback):
    """Write a file while the Trainer is built, and then wait."""

    def __init__(self, *, file: str, seconds: float) -> None:
        Path(file).touch()
        time.sleep(seconds)


class Killed(Callback):
    """Kill this process when so many batches are done, as if the machine failed."""

    def __init__(self, *, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch and 'SPARED' not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)


registry.register('callback', 'killed', Killed)
registry.register('callback', 'slow_batch', SlowBatch)
registry.register('callback', 'slow_start', SlowStart)
