"""What the processes of a node tell its node entry point, by files in a folder of the attempt.

A process writes a beat before each batch and before what may take long, such as a save; and its stacks when it is asked
for them with SIGNAL. It does neither where FOLDER is not set.
"""

import contextlib
import faulthandler
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = 'DIFFUSION_ATTEMPT_FOLDER'
"""Names the folder, on the node's own disk."""
SIGNAL = signal.SIGUSR2
"""Makes a process write the stacks of all its threads."""
SAVING, TRAINING = 'saving', 'training'


class Beat(NamedTuple):
    """What a process does, and since when."""

    at: float
    """By time.time(), when the beat was written."""
    batch: int
    """Batches that the run has done."""
    doing: str
    """training or saving (evaluations and pictures included)."""
    first: int
    """Batches that the run had done when this process began its first."""
    first_at: float
    """When that was."""


def begin(environ: Mapping[str, str] = os.environ) -> None:
    """Let this process write its stacks when it is asked to; for the very first lines of a program."""
    folder = environ.get(FOLDER)
    if folder is None:
        return
    stacks = open(Path(folder, f'stacks-{_rank(environ)}.txt'), 'w', encoding='utf-8')  # noqa: SIM115 - open for good
    faulthandler.register(SIGNAL, file=stacks, all_threads=True)


def write_beat(beat: Beat, environ: Mapping[str, str] = os.environ) -> None:
    """Say that this process is alive."""
    folder = environ.get(FOLDER)
    if folder is None:
        return
    path = Path(folder, f'beat-{_rank(environ)}')
    unfinished = path.with_name(f'.{path.name}')
    try:
        # Not through to the disk: it is for now, and a batch may take less time than that.
        unfinished.write_text(json.dumps(beat), encoding='utf-8')
        unfinished.replace(path)
    except OSError:  # a full disk is no reason to end a run; the last beat is touched, so that it does not look hung
        with contextlib.suppress(OSError):
            os.utime(path)


def last_beats(folder: Path) -> dict[int, Beat]:
    """The last beat of each rank that has given one."""
    found = {}
    for path in folder.glob('beat-*'):
        beat = Beat(*json.loads(path.read_text()))
        found[int(path.name.rpartition('-')[2])] = beat._replace(at=max(beat.at, path.stat().st_mtime))
    return found


def stacks(folder: Path) -> dict[int, str]:
    """What ranks have written of their stacks."""
    found = {int(path.stem.rpartition('-')[2]): path.read_text(encoding='utf-8') for path in folder.glob('stacks-*')}
    return {rank: text for rank, text in sorted(found.items()) if text}


def _rank(environ: Mapping[str, str]) -> str:
    return environ.get('RANK', '0')
