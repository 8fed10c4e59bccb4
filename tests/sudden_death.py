"""Kill a process at a chosen file operation, so that the moment does not depend on the machine's speed."""

import os
import signal
import sys
from pathlib import Path

EVENTS = {'open', 'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link'}
"""Audit events of Python that count as file operations."""


def die_before(step: int, folder: Path | str, *, with_group: bool = False, after: Path | None = None) -> None:
    """Make this process kill itself with SIGKILL before a certain operation on a file in a folder.

    Args:
        step: Number of the operation; the first is 0. Forked processes count their operations separately.
        folder: The folder, with its subfolders.
        after: Count only operations while this file exists; None counts all.
        with_group: True kills the whole process group when the first of its processes reaches the operation.
    """
    steps = iter(range(step))

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        counts = event in EVENTS and str(arguments[0]).startswith(str(folder)) and (after is None or after.exists())
        if counts and next(steps, None) is None:
            os.kill(0 if with_group else os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
