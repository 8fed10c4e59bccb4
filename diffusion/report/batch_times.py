"""Hours of a run at each batch, from the records of its attempts; an axis for charts."""

from collections.abc import Iterable, Mapping
from typing import Any

from diffusion.report.downsampling import Curve

MAX_POINTS = 400
"""Largest number of points of the axis; between two of them, hours are interpolated."""
HOUR = 3600


def batch_hours(records: Iterable[Mapping[str, Any]]) -> Curve | None:
    """Return batches and the hours of the run's attempts up to each, increasing; None if no batch was recorded.

    Time between attempts does not count. If a batch was repeated, its last time counts.

    Args:
        records: Records of attempts.jsonl, in order.
    """
    before, begin, latest = 0.0, None, 0.0
    points: list[tuple[int, float]] = []
    for record in records:
        times = [record.get(key) for key in ('begin', 'at', 'first_at', 'last_at')]
        if not all(isinstance(each, int | float) and 0 <= each < 1e11 for each in times):
            continue
        if begin is None or record['begin'] != begin:
            before, begin, latest = before + latest, record['begin'], 0.0
        latest = max(latest, record['at'] - begin)
        for batch, at in ((record.get('first'), record['first_at']), (record.get('last'), record['last_at'])):
            if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch < 2**53 or at < begin:
                continue
            hours = (before + at - begin) / HOUR
            while points and (points[-1][0] >= batch or points[-1][1] > hours):
                points.pop()
            points.append((batch, hours))
    if len(points) < 2:
        return None
    if len(points) > MAX_POINTS:
        last = len(points) - 1
        points = [points[round(index * last / (MAX_POINTS - 1))] for index in range(MAX_POINTS)]
    return Curve([batch for batch, _ in points], [round(hours, 6) for _, hours in points])
