"""Kill a process at a chosen file operation, so that the moment does not depend on the machine's speed."""

import os
import signal
import sys
from pathlib import Path

EVENTS = {'open', 'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link'}
"""Audit events of Python that count as file operations."""


def die_before(step: int, folder: Path | str, *, with_group: bool = False, after: Path | None = None) -> None:
    """Make this process kill itself with SIGKILL before a certain operation on a file in a folder or its subfolders.

    `step` is the number of the operation, from 0, among those while the file `after` exists, if given. Forked processes
    count separately; `with_group` kills the whole process group when the first of them reaches the operation.
    """
    steps = iter(range(step))

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        counts = event in EVENTS and str(arguments[0]).startswith(str(folder)) and (after is None or after.exists())
        if counts and next(steps, None) is None:
            os.kill(0 if with_group else os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
