"""The latest metrics for Prometheus' node exporter (its textfile collector), and as lines for scrapers of logs."""

import json
import math
import re
import time
from pathlib import Path
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.files import write_whole


class _Latest(LoggerDestination):
    """Keeps the latest number of each metric on rank zero, and hands them on now and then.

    Args:
        every_seconds: Time between two.
    """

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self.latest: dict[str, float] = {}
        self.run_name = ''
        self._handed_on = -math.inf

    def fit_start(self, state: State, logger: Logger) -> None:
        self.run_name = state.run_name

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() == 0:
            self.latest |= {
                name: float(value)
                for name, value in metrics.items()
                if isinstance(value, int | float) or (hasattr(value, 'numel') and value.numel() == 1)
            }

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.monotonic()
        if dist.get_global_rank() == 0 and now - self._handed_on >= self.every_seconds:
            self._handed_on = now
            self.hand_on(state.timestamp.batch.value)

    def fit_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            self.hand_on(state.timestamp.batch.value)

    def hand_on(self, batch: int) -> None:
        """Write the latest metrics."""
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
            raise ValueError(f'path: {path!r} must end in .prom; the collector reads no other files')
        self.path = Path(path)

    def hand_on(self, batch: int) -> None:
        run = self.run_name.replace('\\', r'\\').replace('"', r'\"')
        lines = []
        for name, value in sorted({**self.latest, 'batch': float(batch)}.items()):
            gauge = 'diffusion_' + re.sub('[^a-zA-Z0-9_]', '_', name)
            shown = {math.inf: '+Inf', -math.inf: '-Inf'}.get(value, 'NaN' if math.isnan(value) else repr(value))
            lines += [f'# TYPE {gauge} gauge', f'{gauge}{{run="{run}"}} {shown}']
        write_whole(self.path, '\n'.join(lines) + '\n')


class JSONLines(_Latest):
    """Prints a line of JSON, `{"batch": 100, "loss/train/total": 0.12, ...}`, as CloudWatch and its like collect it."""

    def hand_on(self, batch: int) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in self.latest.items()}
        print(json.dumps({'time': time.time(), 'run': self.run_name, 'batch': batch} | finite), flush=True)
