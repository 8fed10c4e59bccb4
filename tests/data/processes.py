"""Work in forked processes: a second job, without a second's import."""

import os
import signal
import sys
import traceback
from collections.abc import Callable


class Forked:
    """A process that does some work, and exits with 0 where that ends well."""

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
        """Its exit status; negative for a signal."""
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
