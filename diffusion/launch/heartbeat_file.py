"""Heartbeat files, by which the processes of a node show that they are alive, and the stacks of those that hang.

A rank writes its heartbeat to FOLDER before each batch and before slow work such as a save, and its stacks when it gets
SIGNAL; without FOLDER in its environment it does neither. `diffusion.launch.liveness` uses the same files for the node
entry point. The lock of a run (`run_lock`) does not: it is read on other machines.
"""

import contextlib
import faulthandler
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = 'DIFFUSION_ATTEMPT_FOLDER'
"""Environment variable with the folder of the attempt, on the node's own disk."""
SIGNAL = signal.SIGUSR2
"""Signal at which a process writes the stacks of all its threads."""
SAVING, TRAINING = 'saving', 'training'


class Beat(NamedTuple):
    """The last heartbeat of a rank. Times are by time.monotonic(), the same clock in all processes of a machine."""

    at: float
    """Time of the heartbeat."""
    batch: int
    """Batches that the run has done."""
    doing: str
    """TRAINING, or SAVING for everything that may take much longer than a batch (evaluations included)."""
    first: int
    """Batches that the run had done when this process began its first."""
    first_at: float
    """Time when that batch began."""


def write_heartbeat(path: Path, content: str = '') -> None:
    """Replace a heartbeat file in one step; a write that fails is ignored."""
    # The modification time is set to time.monotonic(): a system clock that is set, or a machine that is suspended, must
    # not end a healthy run. It is also what still works on a full disk, which is no reason to end a run either.
    now = time.monotonic()
    unfinished = path.with_name(f'.{path.name}')
    with contextlib.suppress(OSError):
        try:
            unfinished.write_text(content, encoding='utf-8')  # without fsync: a batch may take less time than that
            os.utime(unfinished, (now, now))
            unfinished.replace(path)
        except OSError:
            os.utime(path, (now, now))


def heartbeat_age(path: Path) -> float:
    """Return the seconds since a heartbeat file was written; infinity if there is none since the machine was booted."""
    try:
        age = time.monotonic() - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf
    return age if age >= 0 else math.inf


def write_stacks_on_signal(environ: Mapping[str, str] = os.environ) -> None:
    """Install the handler of SIGNAL; call this in the very first lines of a program."""
    folder = environ.get(FOLDER)
    if folder is None:
        return
    stacks = open(Path(folder, f'stacks-{_rank(environ)}.txt'), 'w', encoding='utf-8')  # noqa: SIM115 - open for good
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)


def write_beat(batch: int, doing: str, first: int, first_at: float, environ: Mapping[str, str] = os.environ) -> None:
    """Write the heartbeat of this rank; the arguments are the fields of `Beat`."""
    folder = environ.get(FOLDER)
    if folder is not None:
        write_heartbeat(Path(folder, f'beat-{_rank(environ)}'), json.dumps([batch, doing, first, first_at]))


def last_beats(folder: Path) -> dict[int, Beat]:
    """Read the last heartbeat of each rank that has written one."""
    found = {}
    for path in folder.glob('beat-*'):
        at = time.monotonic() - heartbeat_age(path)
        found[int(path.name.rpartition('-')[2])] = Beat(at, *json.loads(path.read_text(encoding='utf-8')))
    return found


def read_stacks(folder: Path) -> dict[int, str]:
    """Read the stacks that ranks have written."""
    found = {int(path.stem.rpartition('-')[2]): path.read_text(encoding='utf-8') for path in folder.glob('stacks-*')}
    return {rank: text for rank, text in sorted(found.items()) if text}


def _rank(environ: Mapping[str, str]) -> str:
    return environ.get('RANK', '0')
