"""Data of a report page as JSON values: downsampled curves of runs, status, evaluations, cost and so on."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from diffusion.report.metric_reader import Series, averages, downsample
from diffusion.report.run_parts import better_directions, recipe_differences
from diffusion.report.run_reader import RunContent
from diffusion.runs import attempts
from diffusion.runs.run_status import TRAIN_LOSS

MAX_POINTS = 2000
"""Largest number of points of a curve."""
MIN_POINTS = 100
TOTAL_POINTS = 80_000
"""Number of points of all curves of a page: 2 MB."""
IMPORTANT_POINTS = 2000
"""Points of the curve of the training loss, however many metrics there are."""


def page_data(runs: Sequence[RunContent], *, total_points: int = TOTAL_POINTS) -> dict[str, Any]:
    """Return the data of a page about one or several runs.

    Args:
        runs: The runs, in the order of their colors.
        total_points: Number of points of all curves together, about.
    """
    limit = _points_per_curve([len(each.steps) for run in runs for each in run.series.values()], total_points)
    metrics = {name for run in runs for each in run.evaluations for name in (*each['metrics'], *each['losses'])}
    metrics |= {name for run in runs for each in run.evaluations for row in each['guidance'] for name in row['metrics']}
    return {
        'generated': time.time(),
        'runs': [_run(run, limit) for run in runs],
        'better': better_directions(metrics),
        'differences': recipe_differences([run.recipe for run in runs]) if len(runs) > 1 else [],
    }


def _points_per_curve(lengths: Sequence[int], total: int) -> int:
    """Return the largest number of points per curve that keeps all curves together at or below `total`."""
    low, high = MIN_POINTS, MAX_POINTS
    while low < high:
        middle = (low + high + 1) // 2
        # A downsampled curve has averages too, one for two of its points.
        points = sum(length if length <= middle else middle * 3 // 2 for length in lengths)
        low, high = (middle, high) if points <= total else (low, middle - 1)
    return low


def _run(run: RunContent, limit: int) -> dict[str, Any]:
    status = asdict(run.status)
    recorded = status.pop('attempts')
    for each in recorded:
        running = each['cause'] == 'running'
        each['reason'] = 'running' if running else attempts.describe_attempt(each['cause'], each['detail'])
    return {
        'name': run.name,
        'status': status,
        'series': {
            name: _curve(series, IMPORTANT_POINTS if name == TRAIN_LOSS else limit)
            for name, series in sorted(run.series.items())
            if series.steps or series.nonfinite
        },
        'hours': run.hours,
        'attempts': recorded,
        'breakdown': run.breakdown,
        'lost': {attempts.CAUSES.get(cause, cause): seconds for cause, seconds in run.lost_seconds.items()},
        'cost': asdict(run.cost),
        'evaluations': run.evaluations,
        'sheets': [asdict(each) for each in run.images.sheets],
        'total_sheets': run.images.total,
        'generated': None if run.images.generated is None else asdict(run.images.generated),
        'checkpoints': run.checkpoints,
        'saves': run.saves,
        'recipe': run.recipe,
        'changes': run.changes,
        'notes': run.notes,
    }


def _curve(series: Series, limit: int) -> dict[str, Any]:
    """Return a curve: points `x`, `y`; averages `mx`, `my` if it was downsampled; and batches with NaN or infinity."""
    x, y = downsample(series.steps, series.values, limit)
    curve: dict[str, Any] = {'x': x, 'y': [_rounded(value) for value in y], 'count': len(series.steps)}
    if len(series.steps) > limit:
        mean = averages(series.steps, series.values, limit // 2)
        curve |= {'mx': mean.x, 'my': [_rounded(value) for value in mean.y]}
    if series.nonfinite:
        curve |= {'nonfinite': [step for step, _ in series.nonfinite], 'nonfinite_count': series.nonfinite_count}
    return curve


def _rounded(value: float) -> float:
    """Return a value with 6 significant digits, more than a chart can show."""
    return float(f'{value:.6g}')
