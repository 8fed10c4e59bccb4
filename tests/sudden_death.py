"""Death at a chosen moment, the same on a fast machine and a slow one."""

import os
import signal
import sys
from pathlib import Path

EVENTS = {'open', 'os.rename', 'os.remove', 'os.rmdir', 'os.mkdir', 'os.link'}


def die_before(step: int, folder: Path | str, *, with_group: bool = False) -> None:
    """Let SIGKILL take this process before its so-manyth operation on a file in a folder; the first is number 0.

    Processes that it forks count for themselves. `with_group` takes all of the process group as soon as one is there.
    """
    steps = iter(range(step))

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(folder)) and next(steps, None) is None:
            os.kill(0 if with_group else os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
