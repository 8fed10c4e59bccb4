"""Work in forked processes: a second job, without a second's import."""

import os
import sys
import traceback
from collections.abc import Callable


def forked(work: Callable[[], object]) -> int:
    """The id of a process that does it, and exits with 0 where it ends well."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def status_of(pid: int) -> int:
    """How a process ended; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_running(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) == (0, 0)
