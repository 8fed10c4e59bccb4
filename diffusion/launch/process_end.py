"""End of a process that has used PyTorch, without the finalization of the interpreter."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End this process with an exit status, after its threads and exit handlers.

    While Python finalizes the interpreter, a daemon thread that returns from PyTorch's code is ended inside of that
    code, which aborts the process: a run that ended with a clear error would have been killed by SIGABRT.
    """
    # What the interpreter does first: wait for threads that are no daemons, and call the exit handlers.
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if its descriptor was closed at the start
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(status)
