"""Storage faults at chosen file operations, in this process (`active`) and in processes of the fork server.

A process that the fork server starts with the variables of `environment` installs the faults before it runs its
command; so do all ranks of a launched job, whose `run.py` is `forkserver.py`.
"""

import contextlib
import errno
import importlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = 'STORAGE_FAULTS'
"""Environment variable with the faults of a process as JSON."""
EVENTS = {'os.mkdir': 'mkdir', 'os.rename': 'rename', 'os.remove': 'remove', 'os.symlink': 'link'}
EVENTS |= dict.fromkeys(('os.scandir', 'os.listdir'), 'list')
"""Operation of each of Python's audit events, other than `open`."""
QUICK = {
    'diffusion.checkpointing.checkpoint_store:RETRY_PAUSES_SECONDS': (0.01, 0.01),
    'diffusion.checkpointing.checkpointer:LAST_SAVE_PAUSES_SECONDS': (0.01, 0.01),
    'diffusion.storage.local_files:VISIBLE_SECONDS': 0.5,
}
"""Values of constants, by `module:name`, with which retries take no time."""


@dataclass(frozen=True)
class Fault:
    """Error or delay of a file operation.

    Attributes:
        operation: `create` (open for writing), `open` (for reading), `write` (of a checkpoint's state.pt), `read` (of a
            file that is hashed), `fsync`, `mkdir`, `rename`, `link`, `list` or `remove`.
        path: Regular expression that is searched in the path.
        error: Name of the errno of the OSError, such as ESTALE; empty raises none.
        sleep: Seconds by which the operation is delayed.
        skip: Number of matching operations before the first fault, of all processes together.
        times: Number of faults, of all processes together; -1 for all further operations.
        rank: Rank that has the fault; None for all.
    """

    operation: str
    path: str
    error: str = ''
    sleep: float = 0.0
    skip: int = 0
    times: int = -1
    rank: int | None = None


_faults: list[Fault] = []
_folder: Path | None = None
_state = threading.local()
_installed = False


def environment(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """Return the environment variable that gives faults to processes of the fork server, whose retries take no time.

    They count the operations in an existing folder.
    """
    return {VARIABLE: json.dumps({'faults': [asdict(each) for each in faults], 'folder': str(folder)})}


def install_from_environment() -> None:
    """Install the faults of this process, if it has any."""
    if VARIABLE not in os.environ:
        return
    content = json.loads(os.environ[VARIABLE])
    for where, value in QUICK.items():
        module, _, name = where.partition(':')
        setattr(importlib.import_module(module), name, value)
    _start([Fault(**each) for each in content['faults']], Path(content['folder']))


@contextlib.contextmanager
def active(folder: Path, *faults: Fault) -> Iterator[None]:
    """Install faults in this process for the duration of a block; `folder` is an empty folder for counting."""
    folder.mkdir(exist_ok=True)
    _start(faults, folder)
    try:
        yield
    finally:
        _faults.clear()


def _start(faults: Sequence[Fault], folder: Path) -> None:
    global _folder, _installed
    rank = int(os.environ.get('RANK', '0'))
    _faults[:] = [each for each in faults if each.rank in (None, rank)]
    _folder = folder
    if _installed:
        return
    _installed = True
    sys.addaudithook(_on_event)
    _replace('fsync', 'fsync')
    _replace('preadv', 'read')
    from diffusion.checkpointing.checkpoint_store import HashingWriter

    plain = HashingWriter.write

    def write(writer: Any, data: bytes) -> int:
        count = plain(writer, data)
        _meet('write', str(getattr(writer._file, 'name', '')))
        return count

    HashingWriter.write = write  # type: ignore[method-assign]


def _replace(name: str, operation: str) -> None:
    """Replace a function of `os` whose first argument is a descriptor."""
    plain = getattr(os, name)

    def replaced(descriptor: Any, *arguments: Any) -> Any:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        with contextlib.suppress(FileNotFoundError):
            _meet(operation, os.readlink(f'/proc/self/fd/{number}'))
        return plain(descriptor, *arguments)

    setattr(os, name, replaced)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if not _faults:
        return
    operation = EVENTS.get(event)
    if event == 'open':
        mode, flags = arguments[1], arguments[2]
        writes = any(letter in mode for letter in 'wxa+') if isinstance(mode, str) else bool(flags & os.O_CREAT)
        operation = 'create' if writes else 'open'
    if operation is not None:
        for path in arguments[:2]:
            if isinstance(path, str | Path):
                _meet(operation, os.path.abspath(path))


def _meet(operation: str, path: str) -> None:
    """Raise or wait if a fault matches an operation."""
    if getattr(_state, 'busy', False):
        return
    _state.busy = True
    try:
        for index, fault in enumerate(_faults):
            if fault.operation != operation or not re.search(fault.path, path):
                continue
            if (fault.skip or fault.times >= 0) and not fault.skip <= _count(index) < (
                sys.maxsize if fault.times < 0 else fault.skip + fault.times
            ):
                continue
            time.sleep(fault.sleep)
            if fault.error:
                number = getattr(errno, fault.error)
                raise OSError(number, os.strerror(number), path)
    finally:
        _state.busy = False


def _count(index: int) -> int:
    """Return the number of earlier operations that matched a fault, in all processes."""
    assert _folder is not None
    number = 0
    while True:
        try:
            os.close(os.open(_folder / f'{index}-{number}', os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            number += 1


def met(folder: Path) -> int:
    """Return the number of operations that were counted in a folder."""
    return len([*folder.glob('*-*')])
