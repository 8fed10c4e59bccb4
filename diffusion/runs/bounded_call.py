"""Call a function that may block forever, such as a write to a network file system that does not respond."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar('T')

STORAGE_SECONDS = 10.0
"""Maximum time to wait for shared storage, which may itself be what hangs."""


def call_with_limit(function: Callable[[], T], seconds: float, default: T) -> T:
    """Return the result of a function, or the default if the function does not return within `seconds`.

    Exceptions of the function are raised here. After the time limit, the call continues in a daemon thread, because a
    system call on a dead mount cannot be interrupted.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else default


def storage_problem(function: Callable[[], object], seconds: float | None = None) -> str:
    """Call a function on shared storage for at most `seconds` (default: STORAGE_SECONDS); return '' or what failed."""

    def run() -> str:
        try:
            function()
        except OSError as error:
            return str(error) or type(error).__name__
        return ''

    return call_with_limit(run, STORAGE_SECONDS if seconds is None else seconds, 'its storage does not respond')


def within_limit(function: Callable[[], object], seconds: float | None = None) -> bool:
    """Call a function like `storage_problem`; return True if it succeeded, False if it failed or exceeded the limit."""
    return not storage_problem(function, seconds)
