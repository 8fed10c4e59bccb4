"""Read all files of a run that a report needs, from a folder or a bucket.

A part that cannot be read becomes a note on the page; only a run without any readable part is an error.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from diffusion.config.resume_rules import past_changes
from diffusion.errors import ExternalError, UserError
from diffusion.report.example_images import SHARE, ExampleReader
from diffusion.report.metric_reader import MetricReader, Series
from diffusion.report.run_parts import (
    CheckpointReader,
    RunCost,
    batch_hours,
    read_evaluations,
    recipe_values,
    run_cost,
    saves_by_place,
    without_secrets,
)
from diffusion.report.sample_sheets import SampledImages, SheetReader
from diffusion.runs import attempts, node_status, run_lock
from diffusion.runs.attempts import ATTEMPTS, Attempt
from diffusion.runs.run_status import METRICS, RECIPE, TRAIN_LOSS, RunReport, inspect_run
from diffusion.storage.places import PATIENT, FileVersion, Listing, files_of_run, is_url
from diffusion.storage.text_tables import parse_json_lines

T = TypeVar('T')
_CHUNK = 2**25
_ATTEMPT_BYTES = 2**24
"""Number of bytes to read from the end of attempts.jsonl for the charts' axis of training hours."""
_TABLE_BYTES = 2**22
"""Number of bytes to read from the end of metrics.jsonl for the last validation loss in a table of runs."""
_VALIDATION = re.compile(r'metrics/.*/loss')
MARKS = {METRICS, ATTEMPTS, run_lock.LOCK, node_status.FOLDER, RECIPE}
"""Files and folders that identify a run: every run has at least one of them."""


@dataclass
class RunContent:
    name: str
    status: RunReport
    series: dict[str, Series] = field(default_factory=dict)
    hours: tuple[list[int], list[float]] | None = None
    """Batches, and the hours of training up to each batch; None if unknown."""
    lost_seconds: dict[str, float] = field(default_factory=dict)
    breakdown: dict[str, float] = field(default_factory=dict)
    cost: RunCost = field(default_factory=RunCost)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    validation: tuple[int, float] | None = None
    """Batch and value of the last validation loss; read only if the run has no evaluations and `curves` is False."""
    images: SampledImages = field(default_factory=SampledImages)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    recipe: str = ''
    changes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def last_validation(metrics: bytes) -> tuple[int, float] | None:
    """Return batch and value of the last validation loss in the end of a metrics file, or None if it has none."""
    for line in reversed(metrics.splitlines()):
        # Parse only lines that contain `metrics/`: most of the others have the metrics of a single batch.
        for values in parse_json_lines(line) if b'"metrics/' in line else ():
            found = [value for name, value in values.items() if _VALIDATION.fullmatch(name)]
            if found and isinstance(values.get('step'), int) and isinstance(found[0], float):
                return values['step'], found[0]
    return None


def looks_like_a_run(listing: Listing) -> bool:
    names = {*listing.files, *listing.folders}
    return bool(names & MARKS) or any(name[:2] == 'ba' and name[2:].isdigit() for name in listing.folders)


class RunReader:
    """Reads a run; further calls of `read` reuse the metrics, receipts and images that have not changed.

    Args:
        image_bytes: Maximum total size of the images in bytes; 0 means no images.
        price: US dollars per device-hour; None means the price of the run's GPUs in planning/gpus.yaml.
        curves: False saves time by reading no metrics except the last training loss and, without evaluations, the
            last validation loss.
    """

    def __init__(self, place: str, *, image_bytes: int = 0, price: float | None = None, curves: bool = True) -> None:
        self.place, self.price, self._curves = place, price, curves
        self._files = files_of_run(self.place, PATIENT)
        self._metrics = MetricReader()
        self._metrics_version: FileVersion | tuple[int, int] | None = None
        self._checkpoints = CheckpointReader(self._files)
        self._sheets = SheetReader(self._files, image_bytes) if image_bytes else None
        self._examples = ExampleReader(self._files, round(image_bytes * SHARE))

    @property
    def name(self) -> str:
        return self.place.rpartition('/')[2] if is_url(self.place) else Path(self.place).resolve().name

    def read(self) -> RunContent:
        """Return the current content of the run's files; raise UserError if there are none."""
        notes: list[str] = []
        try:
            listing = self._files.list()
        except OSError as error:
            raise ExternalError(f'{self.place}: cannot be read ({error}); try again later') from error
        if not looks_like_a_run(listing):
            raise UserError(
                f'{self.place}: has none of the files of a run ({METRICS}, {ATTEMPTS}, checkpoints); give the folder '
                'or URL of a run, such as runs/phase1, or of a folder with runs'
            )

        def tried(what: str, read: Callable[[], T], default: T) -> T:
            try:
                return read()
            except OSError as error:
                notes.append(f'{what} could not be read: {error}')
                return default

        status = tried('The state of the run', self._status, RunReport(self.place, 'unknown'))
        content = RunContent(self.name, status, notes=notes)
        if self._curves:
            tried(METRICS, lambda: self._read_metrics(listing, notes), None)
        content.series = self._metrics.series
        records = tried(ATTEMPTS, lambda: self._files.read(ATTEMPTS, tail_bytes=_ATTEMPT_BYTES), None)
        content.hours = batch_hours(parse_json_lines(records or b''))
        content.evaluations = tried('The evaluations', lambda: read_evaluations(self._files, notes), [])
        if not self._curves and not content.evaluations:
            metrics = tried(METRICS, lambda: self._files.read(METRICS, tail_bytes=_TABLE_BYTES), None)
            content.validation = last_validation(metrics or b'')
        content.checkpoints = tried('The checkpoints', lambda: self._checkpoints.read(listing, notes), [])
        content.saves = saves_by_place(content.series)
        self._add_recipe(content, tried(RECIPE, lambda: self._files.read(RECIPE), None) or b'')
        if (sheets := self._sheets) is not None:
            examples = tried('The images', lambda: self._examples.read(content.evaluations, notes), {})
            reserved = sum(map(len, examples.values()))
            content.images = tried('The images', lambda: sheets.read(listing.files, notes, reserved), SampledImages())
            content.images.encoded |= examples
        tried('The status of the nodes', lambda: self._complete_status(content), None)
        self._add_attempts(content)
        return content

    def _status(self) -> RunReport:
        try:
            return inspect_run(self.place)
        except UserError:  # the run has only a recipe so far, and no status
            return RunReport(self.place, 'starting')

    def _read_metrics(self, listing: Listing, notes: list[str]) -> None:
        if is_url(self.place):
            version = listing.files.get(METRICS)
            if version is not None and version != self._metrics_version:
                content = self._files.read(METRICS) or b''
                self._metrics, self._metrics_version = MetricReader(), version
                self._metrics.feed(content)
        elif METRICS in listing.files and Path(self.place, METRICS).is_file():  # opening a pipe would block
            self._read_metrics_file(Path(self.place, METRICS))
        reader = self._metrics
        if not reader.position:
            notes.append(f'No {METRICS}: the run has not logged anything, or has no `metrics_file` logger.')
        if reader.broken_lines:
            notes.append(f'{METRICS}: {reader.broken_lines:,} lines are damaged and were left out.')
        if reader.has_unfinished_line:
            notes.append(f'{METRICS}: its last line is not complete and was left out.')
        if reader.dropped:
            notes.append(f'{METRICS}: {len(reader.dropped):,} of its metrics were left out, since it has very many.')
        for name, series in reader.series.items():
            if series.nonfinite_count:
                first, kind = series.nonfinite[0]
                notes.append(
                    f'{name}: {series.nonfinite_count:,} values are NaN or infinite; the first one is {kind}, at batch '
                    f'{first:,}.'
                )

    def _read_metrics_file(self, path: Path) -> None:
        """Read what was appended to a file, or the whole file if it was replaced."""
        with path.open('rb') as file:
            status = path.stat()
            identity = (status.st_dev, status.st_ino)
            if identity != self._metrics_version or status.st_size < self._metrics.position:
                self._metrics, self._metrics_version = MetricReader(), identity
            file.seek(self._metrics.position)
            while content := file.read(_CHUNK):
                self._metrics.feed(content)

    def _add_recipe(self, content: RunContent, encoded: bytes) -> None:
        text = encoded.decode(errors='replace')
        if not text:
            content.notes.append(f'No {RECIPE}: the run has not begun to train.')
            return
        values = recipe_values(text)
        if not values:
            content.notes.append(f'{RECIPE} is not YAML that can be understood.')
        content.recipe = without_secrets(text, values)
        content.changes = [each._asdict() for each in past_changes(content.recipe)]

    def _complete_status(self, content: RunContent) -> None:
        """Add to the run's status values from other files: the last loss, the batch and the total number of batches."""
        status, loss = content.status, content.series.get(TRAIN_LOSS, Series())
        if loss.steps:
            status.batch = max(status.batch or 0, loss.steps[-1] + 1)
            status.last_loss = loss.values[-1]
        if status.total_batches is None and status.duration and status.duration[:-2].isdigit():
            status.total_batches = int(status.duration[:-2]) if status.duration.endswith('ba') else None
        if status.total_batches is None:
            totals = [each.total_batches for each, _ in node_status.read_statuses(self.place)]
            status.total_batches = next((total for total in totals if isinstance(total, int)), None)

    def _add_attempts(self, content: RunContent) -> None:
        status = content.status
        recorded = [Attempt(**each) for each in status.attempts]
        if recorded and status.state not in ('ended', 'unknown'):
            recorded[-1].end = max(recorded[-1].end, time.time() if not is_url(self.place) else 0.0)
        if recorded:
            found, lost = attempts.time_breakdown(recorded)
            content.breakdown = asdict(found)
            content.lost_seconds = {cause: seconds for cause, seconds in lost.items() if seconds > 0}
            status.goodput = found.goodput
            status.attempts = [asdict(each) for each in recorded]
        left = None
        seconds = self._seconds_per_batch(status, recorded)
        if status.total_batches is not None and status.batch is not None and seconds is not None:
            left = max(0, status.total_batches - status.batch) * seconds / 3600
        world_sizes = [each['devices'] for each in content.checkpoints if each.get('devices')]
        content.cost = run_cost(recorded, world_sizes=world_sizes, hours_left=left, price=self.price)

    @staticmethod
    def _seconds_per_batch(status: RunReport, recorded: Sequence[Attempt]) -> float | None:
        """Return the recent time per batch as reported by nodes, else the last attempt's average; None if unknown."""
        if status.batches_per_second:
            return 1 / status.batches_per_second
        for each in reversed(recorded):
            if each.first is not None and each.last is not None and each.last > each.first:
                return (each.last_at - each.first_at) / (each.last - each.first)
        return None
