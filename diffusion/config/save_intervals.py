"""Values of `trainer.save_interval` beside Composer's durations: seconds, minutes, hours, and `auto`."""

import re
from typing import Any

AUTO = 'auto'
"""Interval that is computed from the measured duration of saves and from the failures of the run."""
_UNITS = {'s': 1.0, 'sec': 1.0, 'm': 60.0, 'min': 60.0, 'h': 3600.0}
_INTERVAL = re.compile(rf'(\d+(?:\.\d+)?)({"|".join(sorted(_UNITS, key=len, reverse=True))})')


def seconds_of(interval: Any) -> float | None:
    """Return the seconds of an interval such as `90s`, `10m` or `2h`; None for `auto` and for Composer's durations."""
    found = _INTERVAL.fullmatch(interval) if isinstance(interval, str) else None
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def is_time(interval: Any) -> bool:
    """Return True for `auto` and for times longer than 0."""
    return interval == AUTO or bool(seconds_of(interval))
