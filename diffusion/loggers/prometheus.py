"""Loggers that export the latest metrics to Prometheus's textfile collector or to log scrapers."""

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
from diffusion.storage.atomic import write_atomically

log = logging.getLogger(__name__)


class _LatestMetrics(LoggerDestination):
    """Base class that keeps the latest value of each metric on rank 0 and exports them at intervals."""

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._latest: dict[str, Any] = {}
        self._last_export = -math.inf

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        # Keep tensors until the export: float() would wait for the GPU in every batch.
        if dist.get_global_rank() == 0:
            self._latest |= {name: value for name, value in metrics.items() if is_number(value)}

    def batch_end(self, state: State, logger: Logger) -> None:
        now = time.monotonic()
        if now - self._last_export >= self.every_seconds:
            self._last_export = now
            self._export_latest(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._export_latest(state)

    def _export_latest(self, state: State) -> None:
        if dist.get_global_rank() == 0:
            batch = {'batch': float(state.timestamp.batch.value)}
            self.export(state.run_name, batch | {name: float(value) for name, value in self._latest.items()})

    def export(self, run: str, metrics: dict[str, float]) -> None:
        """Export a run's latest metrics, the first of which is `batch`; subclasses implement this."""
        raise NotImplementedError


class PrometheusFile(_LatestMetrics):
    """Write a file of gauges such as `diffusion_loss_train_total{run="phase1"} 0.12`, replaced atomically.

    Args:
        path: Path of the file, which must end in .prom and be in node_exporter's --collector.textfile.directory.
        every_seconds: Minimum time between two writes.
    """

    def __init__(self, path: str, *, every_seconds: float = 15.0) -> None:
        super().__init__(every_seconds=every_seconds)
        if not path.endswith('.prom'):
            raise UserError(f'prometheus_file.path: {path!r} must end in .prom; the collector ignores other files')
        self.path = Path(path)

    def export(self, run: str, metrics: dict[str, float]) -> None:
        # Replace the file atomically, since the collector may read it at any time.
        try:
            write_atomically(self.path, exposition(run, metrics))
        except OSError as error:  # losing metrics must not end training
            log.warning('prometheus_file: %s cannot be written (%s)', self.path, error)


class JSONLines(_LatestMetrics):
    """Print a JSON line, `{"batch": 100, "loss/train/total": 0.12, ...}`, for log collectors such as CloudWatch.

    NaN and infinite values, which JSON cannot represent, are null.

    Args:
        every_seconds: Minimum time between two lines.
    """

    def export(self, run: str, metrics: dict[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({'time': time.time(), 'run': run} | finite), flush=True)


def exposition(run: str, metrics: dict[str, float]) -> str:
    """Return metrics in Prometheus's text format 0.0.4; if two metrics get the same name there, the last one counts."""
    label = run.replace('\\', r'\\').replace('"', r'\"').replace('\n', r'\n')
    gauges = {'diffusion_' + re.sub('[^a-zA-Z0-9_]', '_', name): value for name, value in metrics.items()}
    lines = []
    for name, value in gauges.items():
        lines += [f'# TYPE {name} gauge', f'{name}{{run="{label}"}} {_format_value(value)}']
    return '\n'.join(lines) + '\n'


def _format_value(value: float) -> str:
    """Return a number in Prometheus's text format: NaN, +Inf and -Inf for special values."""
    if math.isnan(value):
        return 'NaN'
    return repr(value) if math.isfinite(value) else f'{value:+}'.replace('inf', 'Inf')
