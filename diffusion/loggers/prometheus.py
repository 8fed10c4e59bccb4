"""The latest metrics for who comes by and takes them: Prometheus' textfile collector, and scrapers of logs."""

import json
import logging
import math
import re
import time
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.errors import UserError
from diffusion.loggers.metrics_file import is_number
from diffusion.storage.atomic import write_whole

log = logging.getLogger(__name__)


class _Latest(LoggerDestination):
    """Keeps the latest number of each metric on rank zero, and gives them out now and then.

    Args:
        every_seconds: Time between two.
    """

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._latest: dict[str, Any] = {}
        self._run = ''
        self._gave = -math.inf

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        # Not a number yet: that would wait for the GPU at every batch.
        if dist.get_global_rank() == 0:
            self._latest |= {name: value for name, value in metrics.items() if is_number(value)}

    def fit_start(self, state: State, logger: Logger) -> None:
        self._run = state.run_name

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.monotonic()
        if now - self._gave >= self.every_seconds:
            self._gave = now
            self._give(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._give(state)

    def _give(self, state: State) -> None:
        if dist.get_global_rank() == 0:
            batch = {'batch': float(state.timestamp.batch.value)}
            self.give(self._run, batch | {name: float(value) for name, value in self._latest.items()})

    def give(self, run: str, metrics: dict[str, float]) -> None:
        """Give out the latest metrics of a run, the batch first."""
        raise NotImplementedError


class PrometheusFile(_Latest):
    """Writes a file of gauges such as `diffusion_loss_train_total{run="phase1"} 0.12`, whole each time.

    Args:
        path: In the folder that node_exporter's --collector.textfile.directory names; it must end in .prom.
        every_seconds: Time between two.
    """

    def __init__(self, path: str, *, every_seconds: float = 15.0) -> None:
        super().__init__(every_seconds=every_seconds)
        if not path.endswith('.prom'):
            raise UserError(f'prometheus_file.path: {path!r} must end in .prom; the collector reads no other files')
        self.path = Path(path)

    def give(self, run: str, metrics: dict[str, float]) -> None:
        try:
            write_whole(self.path, exposition(run, metrics))
        except OSError as error:  # no reason to end a training
            log.warning('prometheus_file: %s cannot be written (%s)', self.path, error)


class JSONLines(_Latest):
    """Prints a line of JSON, `{"batch": 100, "loss/train/total": 0.12, ...}`, as CloudWatch and its like collect it.

    A number that JSON has no word for is null.

    Args:
        every_seconds: Time between two.
    """

    def give(self, run: str, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({'time': time.time(), 'run': run} | finite), flush=True)


def exposition(run: str, metrics: dict[str, float]) -> str:
    """Gauges in Prometheus' text format, version 0.0.4; of two names that read the same there, the later."""
    label = run.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')
    gauges = {'diffusion_' + re.sub('[^a-zA-Z0-9_]', '_', name): value for name, value in metrics.items()}
    lines = []
    for name, value in gauges.items():
        lines += [f'# TYPE {name} gauge', f'{name}{{run="{label}"}} {_shown(value)}']
    return '\n'.join(lines) + '\n'


def _shown(value: float) -> str:
    if math.isnan(value):
        return 'NaN'
    return repr(value) if math.isfinite(value) else f'{value:+}'.replace('inf', 'Inf')
