"""End a process that has run PyTorch, without finalizing the Python interpreter."""

import atexit
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End this process with an exit status, after its threads and exit handlers.

    While Python finalizes the interpreter, a daemon thread that returns from PyTorch code is ended there, which aborts
    the process: a run that ended with a clear error would seem to be killed by SIGABRT.
    """
    # The interpreter does the same first: it waits for non-daemon threads, and calls the exit handlers.
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
    # Training that ends in the middle of an epoch leaves the loader workers waiting for their next batch. An exit
    # handler of torch waits 5 s for each of them if memory is pinned; one of multiprocessing sends SIGTERM and waits
    # without a limit. The workers ignore SIGTERM, since schedulers send it to a whole job, so a complete run would
    # never end.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
