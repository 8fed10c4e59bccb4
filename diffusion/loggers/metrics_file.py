"""Logger that appends a run's metrics to a JSON lines file and draws its loss curve."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.storage.local_files import opener
from diffusion.storage.text_tables import json_objects

TRAIN_LOSS = 'loss/train/total'


class MetricsFile(LoggerDestination):
    """Logger that appends metrics to `folder/metrics.jsonl`: JSON lines with the batch as `step` and metrics by name.

    A resumed run appends to the same file; for batches that it repeats, `read_metrics` keeps the later values. When
    training ends, the loss curve is drawn to `folder/loss.png`.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: str = 'runs') -> None:
        self.folder = Path(folder)
        self._file: TextIO | None = None

    @property
    def path(self) -> Path:
        return self.folder / 'metrics.jsonl'

    def init(self, state: State, logger: Logger) -> None:
        # Only create the folder here: if it is missing later, its file system has been unmounted, and the folder must
        # not be created again.
        if dist.get_global_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() != 0:
            return
        numbers = {name: float(value) for name, value in metrics.items() if is_number(value)}
        if not numbers:
            return
        if self._file is None:
            # The file is line-buffered because a killed run resumes after its last checkpoint without repeating earlier
            # batches, so their metrics must already be in the file.
            self._file = open(self.path, 'a', encoding='utf-8', buffering=1, opener=opener)  # noqa: SIM115
        self._file.write(json.dumps({'step': step} | numbers) + '\n')

    def fit_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0 and self.path.exists():
            draw_loss_curve(self.path, self.folder / 'loss.png')

    def close(self, state: State, logger: Logger) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(path: Path) -> dict[str, dict[int, float]]:
    """Read a metrics file as a mapping: name -> batch -> value. For a repeated batch, the last line counts."""
    series: dict[str, dict[int, float]] = {}
    for values in json_objects(path.read_bytes().splitlines()):
        step = values.pop('step', None)
        for name, value in values.items():
            if step is not None:
                series.setdefault(name, {})[step] = value
    return series


def draw_loss_curve(metrics: Path, out: Path) -> None:
    """Draw the training loss over batches, raw and smoothed, and the validation losses, if any, to a PNG file."""
    from matplotlib.figure import Figure

    series = read_metrics(metrics)
    train = sorted(series.get(TRAIN_LOSS, {}).items())
    if not train:
        return
    steps, losses = zip(*train, strict=True)
    figure = Figure(figsize=(8, 4.5))  # use fixed margins: a computed layout would draw everything twice
    axes = figure.add_axes((0.09, 0.12, 0.88, 0.79))
    axes.plot(steps, losses, linewidth=0.5, alpha=0.35, color='tab:blue')
    axes.plot(steps, smoothed(losses), color='tab:blue', label='training loss, smoothed')
    for name, values in series.items():
        if name.startswith('metrics/') and name.endswith('/loss'):
            axes.plot(
                *zip(*sorted(values.items()), strict=True), marker='o', color='tab:orange', label='validation loss'
            )
    axes.set(xlabel='batch', ylabel='loss', ylim=(0, None), title=metrics.parent.name)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(out, dpi=120)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return an exponentially weighted average around each value, over about 1/50 of the curve."""
    # Average in both directions: an average of earlier values alone would lie above a falling curve.
    keep = math.exp(-100 / max(100, len(values)))
    before, after = _decayed_sums(values, keep), reversed(_decayed_sums(values[::-1], keep))
    return [
        (total + later_total - value) / (weight + later_weight - 1)
        for value, (total, weight), (later_total, later_weight) in zip(values, before, after, strict=True)
    ]


def _decayed_sums(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Return, per value, the sum of it and earlier ones with weights 1, keep, keep**2, ..., and the weights' sum."""
    total, weight, sums = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        sums.append((total, weight))
    return sums


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, 'numel') and value.numel() == 1)
