"""Heartbeat files that show that the ranks of a node make progress, and stack dumps of hung ranks.

Each rank writes its heartbeat to the folder named by `ATTEMPT_FOLDER_VARIABLE` before each batch and before slow work
such as a save, and dumps its stacks on `STACK_DUMP_SIGNAL`. If the variable is not set, the rank writes neither.
`diffusion.launch.liveness` uses the same file format for the node entry point. The run lock (`run_lock`) has a format
of its own, because other machines read it.
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

from diffusion.storage.own_files import open_own_file

ATTEMPT_FOLDER_VARIABLE = 'DIFFUSION_ATTEMPT_FOLDER'
"""Environment variable with the folder of the attempt, on the local disk of the node."""
STACK_DUMP_SIGNAL = signal.SIGUSR2
"""Signal on which a process writes the stacks of all its threads."""
HARDWARE_FAULT = 'hardware-fault.txt'
SAVING, TRAINING = 'saving', 'training'


class Beat(NamedTuple):
    """Last heartbeat of a rank. Times are from time.monotonic(), which all processes of a machine share."""

    at: float
    """Time of the heartbeat."""
    batch: int
    """Number of batches that the run has completed."""
    doing: str
    """TRAINING, or SAVING for all work that may take much longer than a batch (evaluations included)."""
    first: int
    """Number of batches that the run had completed when this process began its first batch."""
    first_at: float
    """Time when the first batch of this process began."""


def write_heartbeat(path: Path, content: str = '') -> None:
    """Replace a heartbeat file atomically, with time.monotonic() as modification time; a failed write is ignored."""
    # The modification time is set to time.monotonic(), because a system clock that is adjusted or a machine that is
    # suspended must not end a healthy run. Setting the time also works on a full disk, where the new content cannot be
    # written: a full disk does not mean that the run hangs.
    now = time.monotonic()
    unfinished = path.with_name(f'.{path.name}')
    with contextlib.suppress(OSError):
        try:
            descriptor = open_own_file(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            with open(descriptor, 'w', encoding='utf-8') as file:  # no fsync: it can take longer than a batch
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
    # time.monotonic() restarts at boot, so a file from before it can appear to be from the future.
    return age if age >= 0 else math.inf


def write_stacks_on_signal(environ: Mapping[str, str] = os.environ) -> None:
    """Make this process write the stacks of its threads to a file on SIGUSR2; call this first in a training program."""
    folder = environ.get(ATTEMPT_FOLDER_VARIABLE)
    if folder is None:
        return
    # faulthandler keeps the file descriptor and writes from the signal handler in C, so it works while the interpreter
    # is blocked in a collective. The file must stay open for the life of the process.
    stacks = open(Path(folder, f'stacks-{_rank(environ)}.txt'), 'w', encoding='utf-8')  # noqa: SIM115
    faulthandler.register(STACK_DUMP_SIGNAL, file=stacks, all_threads=True)


def write_rank_heartbeat(
    batch: int, doing: str, first: int, first_at: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Write this rank's heartbeat file with the fields of `Beat`; do nothing without `ATTEMPT_FOLDER_VARIABLE`."""
    folder = environ.get(ATTEMPT_FOLDER_VARIABLE)
    if folder is not None:
        write_heartbeat(Path(folder, f'beat-{_rank(environ)}'), json.dumps([batch, doing, first, first_at]))


def report_hardware_fault(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Report the hardware fault that ends the run to the node entry point; every rank calls this with the same text."""
    folder = environ.get(ATTEMPT_FOLDER_VARIABLE)
    if folder is not None:
        with contextlib.suppress(OSError):  # the exit status alone is enough to act on
            Path(folder, HARDWARE_FAULT).write_text(text, encoding='utf-8')


def reported_hardware_fault(folder: Path) -> str:
    """Return the hardware fault that the ranks of a node have reported, or an empty string."""
    with contextlib.suppress(OSError):
        return (folder / HARDWARE_FAULT).read_text(encoding='utf-8')
    return ''


def last_beats(folder: Path) -> dict[int, Beat]:
    """Read the heartbeat files in a folder; return the last heartbeat of each rank that has written one, by rank."""
    found = {}
    for path in folder.glob('beat-*'):
        at = time.monotonic() - heartbeat_age(path)
        found[int(path.name.rpartition('-')[2])] = Beat(at, *json.loads(path.read_text(encoding='utf-8')))
    return found


def read_stacks(folder: Path) -> dict[int, str]:
    """Return the thread stacks that ranks have written to files in a folder, by rank."""
    # A file may end within a character while its rank still writes.
    texts = {path: path.read_text(encoding='utf-8', errors='replace') for path in folder.glob('stacks-*')}
    found = {int(path.stem.rpartition('-')[2]): text for path, text in texts.items()}
    return {rank: text for rank, text in sorted(found.items()) if text}


def _rank(environ: Mapping[str, str]) -> str:
    return environ.get('RANK', '0')
