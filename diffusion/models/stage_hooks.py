"""Stages of a forward pass by name, for whoever times them; they cost a function call while nobody does."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

_NOTHING = nullcontext()


class Listener(Protocol):
    """Is told where stages begin and end."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...


_listener: Listener | None = None


def stage(name: str) -> AbstractContextManager[None]:
    """The work of a stage, such as `encode`, happens inside."""
    return _NOTHING if _listener is None else _listener.stage(name)


def listen(listener: Listener | None) -> None:
    """Tell one listener of the stages of this process from now on, or nobody."""
    global _listener
    _listener = listener
