"""Named stages of a forward pass that a profiler can time; without a listener a stage costs one function call."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NULL_CONTEXT = nullcontext()


class Listener(Protocol):
    """Interface of profilers that time stages."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that is entered when a stage begins and left when it ends."""
        ...


_listener: Listener | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """Return the context manager in which the work of a stage, such as `encode`, runs."""
    return _NULL_CONTEXT if _listener is None else _listener.stage(name)


def listen(listener: Listener | None) -> None:
    """Set the listener that receives the stages of this process; None removes it."""
    global _listener
    _listener = listener
