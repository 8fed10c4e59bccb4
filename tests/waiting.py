"""Wait for what another process or thread does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60, shown: Callable[[], object] = str) -> None:
    """Wait until a condition holds; after some seconds, fail with what `shown` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.02)
