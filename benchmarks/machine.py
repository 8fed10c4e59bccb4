"""Heading and timer shared by the benchmarks."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def heading() -> str:
    """Return a line with the date, the processor, the number of cores of this process and the version of Python."""
    cores = len(os.sched_getaffinity(0))
    return f'{datetime.date.today()}, {processor()}, {cores} core{"s" * (cores > 1)}, {platform.python_version()}'


def processor() -> str:
    """Return the name of the processor."""
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.split(':')[1].strip()
    return platform.processor() or 'unknown processor'


def interleaved_medians(*functions: Callable[[], object], repeats: int) -> list[float]:
    """Return the median seconds of each function.

    The functions run alternately, so that other load on the machine slows all of them equally.
    """
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, found in zip(functions, seconds, strict=True):
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]
