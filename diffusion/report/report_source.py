"""Content of report pages: one run, a comparison of several runs, or a table of all runs in a folder."""

import csv
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from diffusion.config.image_metrics import better_directions
from diffusion.errors import ExternalError, UserError
from diffusion.report.metric_reader import Series, averages, downsample
from diffusion.report.page import MAX_BYTES, report_page
from diffusion.report.run_parts import recipe_differences
from diffusion.report.run_reader import RunContent, RunReader, looks_like_a_run
from diffusion.runs import attempts
from diffusion.runs.run_status import TRAIN_LOSS
from diffusion.storage.places import PATIENT, files_of_run, is_url

MAX_POINTS = 2000
MIN_POINTS = 100
TOTAL_POINTS = 80_000
"""Target for the total points in all curves of a page, which take 2 MB; no curve's limit is below MIN_POINTS."""
IMPORTANT_POINTS = 2000
"""Maximum number of points in the curve of the training loss."""

PUBLISHED = Path(__file__).with_name('published_scores.csv')
"""Scores of published models, each with its source."""
BENCHMARKS = {'geneval': 'GenEval', 'dpg': 'DPG-Bench'}
"""Benchmark in `PUBLISHED` whose scores are drawn beside a metric, by the prefix of the metric's name."""


def page_data(runs: Sequence[RunContent], *, total_points: int = TOTAL_POINTS) -> dict[str, Any]:
    """Return the data of a page about runs (in the order of their colors), with about `total_points` in all curves."""
    limit = _points_per_curve([len(each.steps) for run in runs for each in run.series.values()], total_points)
    metrics = {name for run in runs for each in run.evaluations for name in (*each['metrics'], *each['losses'])}
    metrics |= {name for run in runs for each in run.evaluations for row in each['guidance'] for name in row['metrics']}
    return {
        'generated': time.time(),
        'runs': [_run(run, limit) for run in runs],
        'better': better_directions(metrics),
        'published': published_scores(metrics),
        'differences': recipe_differences([run.recipe for run in runs]) if len(runs) > 1 else [],
    }


def published_scores(metrics: set[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the published scores for each metric of a benchmark in `BENCHMARKS`, highest first; skip other metrics."""
    with open(PUBLISHED, encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    rows = sorted(({**row, 'score': float(row['score'])} for row in rows), key=lambda row: -row['score'])
    return {
        metric: [row for row in rows if row['benchmark'] == benchmark]
        for metric in sorted(metrics)
        for start, benchmark in BENCHMARKS.items()
        if metric.startswith(start)
    }


def _points_per_curve(lengths: Sequence[int], total: int) -> int:
    """Return the maximum points per curve, at least MIN_POINTS, so that all curves together have at most `total`."""
    low, high = MIN_POINTS, MAX_POINTS
    while low < high:
        middle = (low + high + 1) // 2
        # Count 3/2 points: a downsampled curve also has averages, one per two points.
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
    """Return a curve: points `x`, `y`; if downsampled, averages `mx`, `my`; and batches with NaN or infinity."""
    x, y = downsample(series.steps, series.values, limit)
    curve: dict[str, Any] = {'x': x, 'y': [_rounded(value) for value in y], 'count': len(series.steps)}
    if len(series.steps) > limit:
        mean = averages(series.steps, series.values, limit // 2)
        curve |= {'mx': mean.x, 'my': [_rounded(value) for value in mean.y]}
    if series.nonfinite:
        curve |= {'nonfinite': [step for step, _ in series.nonfinite], 'nonfinite_count': series.nonfinite_count}
    return curve


def _rounded(value: float) -> float:
    """Round a value to 6 significant digits, more than a chart can show."""
    return float(f'{value:.6g}')


REPORT = 'report.html'
_THREADS = 8
"""Number of runs to read at the same time; reading is mostly waiting for the storage."""
_SHOWN_METRICS = ('fid', 'cmmd', 'clip_score', 'retrieval_top1')
"""Metrics of the last evaluation to show in the table; an evaluation without these shows its first two metrics."""


def runs_in(place: str) -> list[str]:
    """Return the names of the runs in a folder or below a URL, sorted; raise UserError if there are none."""
    files = files_of_run(place, PATIENT)
    try:
        names = sorted(files.list().folders)
        with ThreadPoolExecutor(_THREADS) as threads:
            listings = threads.map(files.list, names)
            found = [name for name, each in zip(names, listings, strict=True) if looks_like_a_run(each)]
    except OSError as error:
        raise ExternalError(f'{place}: cannot be read ({error}); try again later') from error
    if not found:
        raise UserError(
            f'{place}: is neither a run nor a folder with runs; give the folder or URL of a run, such as runs/phase1, '
            'or of a folder with runs, such as runs'
        )
    return found


def _table_row(run: RunContent, link: str | None) -> dict[str, Any]:
    status, cost = run.status, run.cost
    cause = status.attempts[-1]['cause'] if status.attempts else None
    ended = None if cause is None else attempts.CAUSES.get(cause, cause)
    return {
        'name': run.name,
        'link': link,
        'state': status.state if status.state != 'ended' or ended is None else f'ended, {ended.removeprefix("ended ")}',
        'kind': _kind(status.state, cause),
        'batch': status.batch,
        'total': status.total_batches,
        'loss': status.last_loss,
        'evaluation': _last_evaluation(run),
        'goodput': status.goodput,
        'device_hours': cost.device_hours,
        'dollars': None if cost.price is None or cost.device_hours is None else cost.price * cost.device_hours,
        'last_activity': status.last_activity,
    }


def _kind(state: str, cause: str | None) -> str:
    """Return the color class of a run in the table, good, bad or plain; `cause` is why its last attempt ended."""
    if state == 'running' or (state == 'ended' and cause == 'done'):
        return 'good'
    return 'bad' if state == 'silent' or (state == 'ended' and cause not in (None, 'preempted', 'stopped')) else 'plain'


def _last_evaluation(run: RunContent) -> str:
    if not run.evaluations:
        return '' if run.validation is None else f'validation loss {run.validation[1]:.4g} (ba{run.validation[0]})'
    last = run.evaluations[-1]
    values = last['metrics'] or last['losses']
    names = [name for name in _SHOWN_METRICS if name in values] or [*values]
    text = ', '.join(f'{name} {values[name]:.4g}' for name in names[:2])
    return f'{text} ({last["checkpoint"]})'


def written_report(place: str, name: str) -> str | None:
    """Return a run page's URL, relative to `place`; None if the page does not exist, or `place` is a URL."""
    if is_url(place):
        return None
    exists = REPORT in files_of_run(f'{place}/{name}').list().files
    # The prefix `./` prevents a name such as `javascript:...` from acting as a URL scheme.
    return f'./{quote(name)}/{REPORT}' if exists else None


IMAGE_BYTES = 1_700_000
"""Maximum total size of a page's images; embedded as base64, they take a third more."""


class Page(NamedTuple):
    data: dict[str, Any]
    images: dict[str, bytes]


class ReportSource(Protocol):
    """Interface for the content of a report page."""

    title: str
    places: list[str]

    def read(self) -> Page:
        """Return the current content."""
        ...

    def write(self) -> str:
        """Return the page's HTML as one file smaller than `MAX_BYTES`; raises the same errors as `read`."""
        ...


class RunsSource:
    """Content of the page for one or several runs; for `price`, see `RunReader`."""

    def __init__(self, places: Sequence[str], *, price: float | None = None) -> None:
        self.places = [*places]
        share = IMAGE_BYTES // len(places)
        self._readers = [RunReader(place, image_bytes=share, price=price) for place in places]
        self.title = ' / '.join(reader.name for reader in self._readers)

    def read(self) -> Page:
        runs, images = self._content()
        return Page({'kind': 'runs', **page_data(runs)}, images)

    def write(self) -> str:
        runs, images = self._content()
        points = TOTAL_POINTS
        while True:
            data = {'kind': 'runs', **page_data(runs, total_points=points)}
            html = report_page(data, title=self.title, places=self.places, images=images)
            if len(html.encode()) < MAX_BYTES:
                return html
            if points < 1000:
                raise UserError(
                    f'a page of {", ".join(self.places)} would have more than {MAX_BYTES / 1e6:.0f} MB; compare fewer '
                    'runs'
                )
            points //= 2

    def _content(self) -> tuple[list[RunContent], dict[str, bytes]]:
        runs = [reader.read() for reader in self._readers]
        return runs, {key: image for run in runs for key, image in run.images.encoded.items()}


class TableSource:
    """Content of the page with all runs in a folder or below a URL; each receipt.json is read only once.

    `link` returns the URL of a run's page by name, or None. For `price`, see `RunReader`.
    """

    def __init__(self, place: str, *, price: float | None, link: Callable[[str], str | None]) -> None:
        self.place, self.price, self.link = place, price, link
        self.places = [self.place]
        self.title = f'Runs in {self.place}'
        self._readers: dict[str, RunReader] = {}

    def read(self) -> Page:
        names = runs_in(self.place)
        for name in names:
            self._readers.setdefault(name, RunReader(f'{self.place}/{name}', price=self.price, curves=False))
        notes: list[str] = []

        def row(name: str) -> dict[str, Any] | None:
            try:
                return _table_row(self._readers[name].read(), self.link(name))
            except (UserError, ExternalError) as error:
                notes.append(str(error))
                return None

        # Use threads: to find out if a run on another machine is alive, its lock is watched for some seconds.
        with ThreadPoolExecutor(_THREADS) as threads:
            rows = [each for each in threads.map(row, names) if each is not None]
        return Page({'kind': 'table', 'generated': time.time(), 'rows': rows, 'notes': sorted(notes)}, {})

    def write(self) -> str:
        return report_page(self.read().data, title=self.title, places=self.places, images={})
