"""Heartbeat files that show the progress of a node's ranks, detection of hangs, and stack dumps of hung ranks.

Each rank writes its heartbeat to the folder in `ATTEMPT_FOLDER_VARIABLE` before each batch and before slow work such as
a save, and dumps its stacks on `STACK_DUMP_SIGNAL`. If the variable is not set, the rank writes neither.
`diffusion.launch.liveness` uses the same file format for the node entry point. The run lock (`run_lock`) has its own
format, because other machines read it.

The timeout of collectives is longer than every time limit of the watchdog, so that the watchdog ends a hanging run
first: a collective that times out fails on the ranks that wait in it, which would hide the rank that hangs.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from diffusion.errors import UserError
from diffusion.runs import environment
from diffusion.storage.local_files import open_own_file

ATTEMPT_FOLDER_VARIABLE = 'DIFFUSION_ATTEMPT_FOLDER'
"""Environment variable with the attempt's folder on the node's local disk."""
STACK_DUMP_SIGNAL = signal.SIGUSR2
"""Signal that makes a process write the stacks of all its threads."""
HARDWARE_FAULT = 'hardware-fault.txt'
SAVING, TRAINING = 'saving', 'training'
HANG_SECONDS = 900.0
"""Default minimum time without a heartbeat after which a run counts as hanging."""
MEDIAN_STEPS = 10
"""A run counts as hanging only after this number of median batch times without a heartbeat."""
SLOW_WORK_FACTOR = 4
"""Factor by which the time limit is longer in the first batch, saves and evaluations. No limit is more than this
multiple of the run's `hang_seconds`."""
COLLECTIVE_MARGIN_SECONDS = 60.0
"""Time by which the timeout of collectives exceeds the watchdog's longest time limit, for the nodes to collect the
stacks of their ranks."""
UNWATCHED_TIMEOUT_SECONDS = 1800.0
"""Timeout of collectives without a watchdog. It must be long enough for a save, during which the other ranks wait: 14
GB (SD2 with optimizer and one average) at 8 MB/s."""


class Beat(NamedTuple):
    """Last heartbeat of a rank. Times are from time.monotonic(), which is the same for all processes on a machine."""

    at: float
    batch: int
    """Number of batches that the run has completed."""
    doing: str
    """TRAINING, or SAVING for any work that may take much longer than a batch, such as saves and evaluations."""
    first: int
    """Number of batches that the run had completed when this process's first batch began."""
    first_at: float


def write_heartbeat(path: Path, content: str = '') -> None:
    """Replace a heartbeat file atomically, with time.monotonic() as the modification time; ignore failed writes."""
    # Set the modification time to time.monotonic(), because an adjusted system clock or a suspended machine must not
    # end a healthy run. Set it even if the content cannot be written, as on a full disk: the run does not hang.
    now = time.monotonic()
    unfinished = path.with_name(f'.{path.name}')
    with contextlib.suppress(OSError):
        try:
            descriptor = open_own_file(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            with open(descriptor, 'w', encoding='utf-8') as file:  # do not fsync, which can take longer than a batch
                file.write(content)
            os.utime(unfinished, (now, now))
            unfinished.replace(path)
        except OSError:
            os.utime(path, (now, now), follow_symlinks=False)


def heartbeat_age(path: Path) -> float:
    """Return the seconds since a heartbeat file was written; infinity if there is none since the last boot."""
    try:
        age = time.monotonic() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    # time.monotonic() restarts at boot, so a file from before the boot can appear to be from the future.
    return age if age >= 0 else math.inf


def write_stacks_on_signal(environ: Mapping[str, str] = os.environ) -> None:
    """Make this process write its threads' stacks to a file on SIGUSR2; call this first in a training program."""
    folder = environ.get(ATTEMPT_FOLDER_VARIABLE)
    if folder is None:
        return
    # faulthandler keeps the file descriptor and writes from a signal handler in C, so it works even if the interpreter
    # is blocked in a collective. The file must stay open until the process ends.
    stacks = open(Path(folder, f'stacks-{environ.get("RANK", 0)}.txt'), 'w', encoding='utf-8')  # noqa: SIM115
    faulthandler.register(STACK_DUMP_SIGNAL, file=stacks, all_threads=True)


def write_rank_heartbeat(
    batch: int, doing: str, first: int, first_at: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Write this rank's heartbeat file, with the fields of `Beat`; do nothing without `ATTEMPT_FOLDER_VARIABLE`."""
    if (folder := environ.get(ATTEMPT_FOLDER_VARIABLE)) is not None:
        write_heartbeat(Path(folder, f'beat-{environ.get("RANK", 0)}'), json.dumps([batch, doing, first, first_at]))


def report_hardware_fault(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the node entry point that a hardware fault ends the run; every rank calls this with the same text."""
    if (folder := environ.get(ATTEMPT_FOLDER_VARIABLE)) is not None:
        with contextlib.suppress(OSError):  # ignore a failed write: the exit status is sufficient
            Path(folder, HARDWARE_FAULT).write_text(text, encoding='utf-8')


def reported_hardware_fault(folder: Path) -> str:
    """Return the hardware fault that a node's ranks have reported, or an empty string."""
    with contextlib.suppress(OSError):
        return (folder / HARDWARE_FAULT).read_text(encoding='utf-8')
    return ''


def last_beats(folder: Path) -> dict[int, Beat]:
    """Read the heartbeat files in a folder, and return each rank's last heartbeat, by rank."""
    found = {}
    for path in folder.glob('beat-*'):
        at = time.monotonic() - heartbeat_age(path)
        found[int(path.name.rpartition('-')[2])] = Beat(at, *json.loads(path.read_text(encoding='utf-8')))
    return found


def read_stacks(folder: Path) -> dict[int, str]:
    """Return the thread stacks that ranks have written to files in a folder, by rank."""
    # While a rank is writing, its file may end in the middle of a character.
    texts = {path: path.read_text(encoding='utf-8', errors='replace') for path in folder.glob('stacks-*')}
    found = {int(path.stem.rpartition('-')[2]): text for path, text in texts.items()}
    return {rank: text for rank, text in sorted(found.items()) if text}


class Watchdog:
    """Estimates the batch time from heartbeats, and reports a hang if the next heartbeat is overdue.

    Args:
        begin: Start time of the processes, from time.monotonic().
    """

    def __init__(self, begin: float, hang_seconds: float = HANG_SECONDS) -> None:
        self.hang_seconds = hang_seconds
        self._newest = Beat(begin, -1, SAVING, -1, begin)
        self._steps: deque[float] = deque(maxlen=100)

    def check(self, beats: Mapping[int, Beat], now: float) -> str | None:
        """Update the batch-time estimate from the last heartbeats; return a description of the hang, if any."""
        # Use the newest heartbeat of all ranks. In each batch, every rank waits for all others, so a hung rank stops
        # all heartbeats, whereas a rank that is merely slow does not look hung.
        newest = max([*beats.values(), self._newest])
        if newest.batch > self._newest.batch >= 0:
            self._steps.append((newest.at - self._newest.at) / (newest.batch - self._newest.batch))
        self._newest = newest
        limit = self.limit()
        if now - newest.at <= limit:
            return None
        since = 'the start' if newest.batch < 0 else f'batch {newest.batch}'
        return f'no heartbeat for {now - newest.at:.0f} s since {since} (limit {limit:.0f} s)'

    def limit(self) -> float:
        """Return the time in seconds after the last heartbeat at which the run counts as hanging."""
        # The median is robust against single slow batches, such as batches with a save or an evaluation.
        typical = MEDIAN_STEPS * statistics.median(self._steps) if self._steps else 0.0
        # The first batch waits for downloads and the compiler, and a save or an evaluation may take many batch times.
        slow_work = self._newest.doing == SAVING or self._newest.batch == self._newest.first
        limit = max(typical, self.hang_seconds) * (SLOW_WORK_FACTOR if slow_work else 1)
        # Bound the limit: the timeout of collectives, set before the first batch, must be longer than any limit.
        return min(limit, longest_limit(self.hang_seconds))


def longest_limit(hang_seconds: float) -> float:
    """Return the upper bound in seconds on a watchdog's time limits."""
    return SLOW_WORK_FACTOR * hang_seconds


def hang_seconds_of(environ: Mapping[str, str] = os.environ) -> float:
    """Return the minimum time in seconds without a heartbeat after which this job counts as hanging.

    Raises:
        UserError: The environment variable is not a number above 0.
    """
    text = environ.get(environment.HANG_SECONDS, str(HANG_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float('inf'):
        raise UserError(f'{environment.HANG_SECONDS}: {text!r} is not a number of seconds above 0; correct or unset it')
    return seconds


def collective_timeout(environ: Mapping[str, str] = os.environ) -> float:
    """Return the default timeout of a rank's collectives in seconds: longer than every limit of the watchdog.

    `environ` is the rank's environment. Only ranks that the node entry point has started have a watchdog.
    """
    if ATTEMPT_FOLDER_VARIABLE not in environ:
        return UNWATCHED_TIMEOUT_SECONDS
    return longest_limit(hang_seconds_of(environ)) + COLLECTIVE_MARGIN_SECONDS


def early_timeout_warning(dist_timeout: float, hang_seconds: float) -> str | None:
    """Return a warning if a recipe's collective timeout is shorter than the watchdog's longest limit, else None."""
    # Only warn, because a hang still ends the run: a collective times out with status 1, and the nodes save the stacks
    # of the ranks that still run.
    longest = longest_limit(hang_seconds)
    if dist_timeout > longest:
        return None
    first = 'all hangs' if dist_timeout <= hang_seconds else 'hangs in saves, evaluations and the first batch'
    return (
        f"trainer.dist_timeout: {dist_timeout:g} s is shorter than the watchdog's limits of {hang_seconds:g} s "
        f'({longest:g} s for slow work), so {first} end as a failed collective on a rank that only waits; remove '
        f'dist_timeout, which gives {longest + COLLECTIVE_MARGIN_SECONDS:g} s, or lower hang_seconds'
    )
