"""Read a run's metrics.jsonl, which may still be growing, and downsample its curves for charts."""

import json
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, takewhile
from typing import NamedTuple

from diffusion.runs.run_status import TRAIN_LOSS
from diffusion.storage.text_tables import MAX_LINE_BYTES


class Curve(NamedTuple):
    x: list[int]
    y: list[float]


def downsample(x: Sequence[int], y: Sequence[float], limit: int) -> Curve:
    """Return at most `limit` (four or more) points of a curve: minimum and maximum of each of limit / 2 equal parts.

    The first and the last point are included. A curve with at most `limit` points is returned unchanged.
    """
    if len(x) <= limit:
        return Curve([*x], [*y])
    inner = range(1, len(x) - 1)
    indices = chain([0], *(_extremes(y, part) for part in _parts(inner, limit // 2 - 1)), [len(x) - 1])
    kept = [*indices]
    return Curve([x[index] for index in kept], [y[index] for index in kept])


def averages(x: Sequence[int], y: Sequence[float], count: int) -> Curve:
    """Return the averages of `count` equal parts of a curve, each placed at the middle of the part's batches."""
    parts = _parts(range(len(x)), min(count, len(x)))
    return Curve(
        [(x[part.start] + x[part.stop - 1]) // 2 for part in parts],
        [sum(y[part.start : part.stop]) / len(part) for part in parts],
    )


def _parts(indices: range, count: int) -> list[range]:
    """Split a range of indices into `count` parts (at most its length) whose lengths differ by at most one."""
    size, start = len(indices), indices.start
    edges = [start + index * size // count for index in range(count + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def _extremes(y: Sequence[float], part: range) -> list[int]:
    """Return the indices of the minimum and maximum in a part, in order; only one index if they coincide."""
    values = y[part.start : part.stop]
    low, high = min(values), max(values)
    return sorted({part.start + values.index(low), part.start + values.index(high)})


_SINGLE = re.compile(rb'\{"step": (\d{1,15}), "([^"\\]{1,200})": (-?(?:\d[0-9.eE+-]*|Infinity)|NaN)\}')
"""Pattern of a line with a single metric, like most lines; matching it is four times as fast as parsing JSON."""
SKIPPED = (b'time/', b'trainer/')
"""Prefixes of metrics that Composer logs for every batch and that only count batches and samples."""
MAX_SERIES = 600
"""Maximum number of metrics to keep; callbacks that log a metric per layer can write thousands."""
MAX_NONFINITE = 20


@dataclass
class Series:
    """Values of a metric over batches.

    Attributes:
        steps: Batches, increasing.
        values: Finite values at these batches.
        nonfinite: Batches with NaN or infinite values, with the value as text, such as (812, 'NaN').
        nonfinite_count: Number of NaN or infinite values, of which `nonfinite` holds the first.
    """

    steps: 'array[int]' = field(default_factory=lambda: array('q'))
    values: 'array[float]' = field(default_factory=lambda: array('d'))
    nonfinite: list[tuple[int, str]] = field(default_factory=list)
    nonfinite_count: int = 0

    def add(self, step: int, value: float) -> None:
        """Add a value; it replaces the values at the same and later batches."""
        if self.steps and step <= self.steps[-1]:
            self.cut(step)
        if math.isfinite(value):
            self.steps.append(step)
            self.values.append(value)
            return
        self.nonfinite_count += 1
        if len(self.nonfinite) < MAX_NONFINITE:
            self.nonfinite.append((step, 'NaN' if math.isnan(value) else 'infinite'))

    def cut(self, step: int) -> None:
        """Remove the values at a batch and later ones, because the run repeats batches from there on."""
        keep = len(self.steps)
        while keep and self.steps[keep - 1] >= step:
            keep -= 1
        del self.steps[keep:], self.values[keep:]
        before = [*takewhile(lambda each: each[0] < step, self.nonfinite)]
        if len(before) < len(self.nonfinite):  # values beyond MAX_NONFINITE are later ones
            self.nonfinite, self.nonfinite_count = before, len(before)


class MetricReader:
    """A run's metrics by name, read from metrics.jsonl at once or in pieces.

    If a run resumes from an earlier batch, its values at later batches are dropped, and those of the repeated batches
    take their place.
    """

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.broken_lines = 0
        """Number of lines that are not JSON objects, not counting an unfinished last line."""
        self.dropped: set[str] = set()
        """Names of metrics beyond MAX_SERIES."""
        self.position = 0
        self._rest = b''
        self._last_loss = -1

    @property
    def has_unfinished_line(self) -> bool:
        return bool(self._rest)

    def feed(self, content: bytes) -> None:
        self.position += len(content)
        lines = (self._rest + content).split(b'\n')
        self._rest = lines.pop()
        for step, name, value in self._values(lines):
            if name == TRAIN_LOSS:
                if step <= self._last_loss:
                    self._rewind(step)
                self._last_loss = step
            series = self.series.get(name)
            if series is None:
                if len(self.series) >= MAX_SERIES:
                    self.dropped.add(name)
                    continue
                series = self.series[name] = Series()
            series.add(step, value)

    def _values(self, lines: list[bytes]) -> Iterator[tuple[int, str, float]]:
        names: dict[bytes, str] = {}
        for line in lines:
            if not line or _has_only_skipped(line):
                continue
            single = _SINGLE.fullmatch(line)
            if single is not None:
                name = single[2]
                try:
                    text = names.get(name) or names.setdefault(name, name.decode())
                    yield int(single[1]), text, float(single[3])
                    continue
                except ValueError:  # the regular expression also matches invalid UTF-8, and numbers such as 1.2.3
                    pass
            yield from self._parsed(line)

    def _parsed(self, line: bytes) -> Iterator[tuple[int, str, float]]:
        try:
            values = json.loads(line) if len(line) <= 16 * MAX_LINE_BYTES else None
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            self.broken_lines += 1
            return
        step = values.pop('step', None)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            return
        for name, value in values.items():
            if isinstance(value, int | float) and not name.encode(errors='replace').startswith(SKIPPED):
                try:
                    yield step, name, float(value)
                except OverflowError:  # float() fails for integers with more than 308 digits
                    yield step, name, math.inf

    def _rewind(self, step: int) -> None:
        """Drop values logged by an earlier attempt after the batch at which the run resumed."""
        for name, series in self.series.items():
            # Keep evaluations after `step` batches: they belong to the checkpoint from which the run resumed.
            series.cut(step if name == TRAIN_LOSS else step + 1)


def _has_only_skipped(line: bytes) -> bool:
    """Return True if a line has only SKIPPED metrics, without parsing it."""
    if not line.startswith(SKIPPED, line.find(b', "') + 3):
        return False
    return line.count(b', "') == sum(line.count(b', "' + name) for name in SKIPPED)
