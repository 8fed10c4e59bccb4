"""The end of a process that has run PyTorch, without the finalization of Python's interpreter."""

import atexit
import multiprocessing
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
    kill_daemons()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if its descriptor was closed at the start
        with suppress(OSError, ValueError):  # its reader has gone
            stream.flush()
    os._exit(status)


def kill_daemons() -> None:
    """Kill the daemon processes that this one has started, such as workers of a data loader."""
    # When training ends in the middle of an epoch, nobody tells the workers of its loader to end: they wait for their
    # next batch. Exit handlers of torch wait 5 s for each, where memory is pinned, and one of multiprocessing ends them
    # by SIGTERM and waits without a limit. But they ignore SIGTERM, with which a scheduler stops a whole job, so that a
    # run that was complete would never end.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
