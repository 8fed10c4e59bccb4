"""Named stages of a forward pass that a profiler can time; without a profiler, a stage costs one function call."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NULL_CONTEXT = nullcontext()


class Listener(Protocol):
    """Interface of a profiler that times named stages of a forward pass."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that a forward pass enters when the named stage starts and leaves when it ends."""
        ...


_listener: Listener | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """Return a context manager around a named part of the forward pass, such as `encode`, which profilers can time."""
    return _NULL_CONTEXT if _listener is None else _listener.stage(name)


def set_listener(listener: Listener | None) -> None:
    """Set the profiler that times the named stages of forward passes in this process; None removes the profiler."""
    global _listener
    _listener = listener
