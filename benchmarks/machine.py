"""What every benchmark says first, where and when it ran, and the clock of those that compare."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def heading() -> str:
    """Date, processor, cores that this process may use and Python's version."""
    cores = len(os.sched_getaffinity(0))
    return f'{datetime.date.today()}, {processor()}, {cores} core{"s" * (cores > 1)}, {platform.python_version()}'


def processor() -> str:
    """The processor's name."""
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.split(':')[1].strip()
    return platform.processor() or 'unknown processor'


def seconds_in_turns(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each function; they take turns, so that a slow minute of the machine slows them all."""
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, found in zip(functions, seconds, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]
