"""Downsampling of a metric's values for a chart: the extremes stay, and so do the first and the last value."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple


class Curve(NamedTuple):
    """Points of a curve, in the order of their batches."""

    x: list[int]
    y: list[float]


def downsample(x: Sequence[int], y: Sequence[float], limit: int) -> Curve:
    """Return at most `limit` points of a curve: the smallest and the largest value of each of limit / 2 equal parts.

    The first and the last point are among them. A curve of at most `limit` points stays as it is.

    Args:
        x: Batches, increasing.
        y: Finite values.
        limit: Largest number of points, at least 4.
    """
    if len(x) <= limit:
        return Curve([*x], [*y])
    inner = range(1, len(x) - 1)
    indices = chain([0], *(_extremes(y, part) for part in _parts(inner, limit // 2 - 1)), [len(x) - 1])
    kept = [*indices]
    return Curve([x[index] for index in kept], [y[index] for index in kept])


def averages(x: Sequence[int], y: Sequence[float], count: int) -> Curve:
    """Return the averages of `count` equal parts of a curve, each at the middle of its batches."""
    parts = _parts(range(len(x)), min(count, len(x)))
    return Curve(
        [(x[part.start] + x[part.stop - 1]) // 2 for part in parts],
        [sum(y[part.start : part.stop]) / len(part) for part in parts],
    )


def _parts(indices: range, count: int) -> list[range]:
    """Return a range of indices cut into `count` parts, none of them empty, whose lengths differ by at most one."""
    size, start = len(indices), indices.start
    edges = [start + index * size // count for index in range(count + 1)]
    return [range(low, high) for low, high in pairwise(edges) if high > low]


def _extremes(y: Sequence[float], part: range) -> list[int]:
    """Return the indices of the smallest and the largest value in a part, in order; one if they are the same."""
    values = y[part.start : part.stop]
    low, high = min(values), max(values)
    return sorted({part.start + values.index(low), part.start + values.index(high)})
