"""Run a function in a forked process, as a second job that need not import everything again."""

import os
import signal
import sys
import traceback
from collections.abc import Callable


class Forked:
    """Forked process that calls a function and exits with 0, or with 1 if the function raises."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if not self.pid:
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

    def running(self) -> bool:
        return self._ended(os.WNOHANG) is None

    def wait(self) -> int:
        """Wait for the process to end and return its exit status, negative for a signal."""
        status = self._ended(0)
        assert status is not None
        return status

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def _ended(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status
