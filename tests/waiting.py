"""Wait for what another process or thread does."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(
    condition: Callable[[], object],
    seconds: float = 60,
    shown: Callable[[], object] = str,
    *,
    running: Callable[[], object] = lambda: True,
) -> None:
    """Wait until a condition holds; after some seconds, or once `running` is false, fail with what `shown` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert running() and time.monotonic() < deadline, shown()
        time.sleep(0.01)


def press_twice_after(path: Path, answer: Path) -> None:
    """Send SIGINT to this process twice, as Ctrl-C does: once a file exists, and once `answer` exists."""

    def press_twice() -> None:
        wait_until(path.exists)
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(answer.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_twice, daemon=True).start()
