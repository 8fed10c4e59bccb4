"""Call a function that may block forever, such as a write to a network file system that does not respond."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar('T')


def call_with_limit(function: Callable[[], T], seconds: float, default: T) -> T:
    """Return the result of a function, or the default if it has not returned after some seconds.

    Exceptions of the function are raised here. A call that takes longer continues in a daemon thread, which cannot be
    ended: a system call on a dead mount cannot be interrupted.
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
