"""Output streams that discard text once the terminal, or the reader of the pipe, is gone."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""Errors of a write to a terminal that was closed, or to a pipe without a reader."""


class _DiscardingStream:
    """Wrapper that discards text which the stream can no longer write; it forwards everything else to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write(''.join(lines))

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                raise
            # Redirect the descriptor, not only the stream: the interpreter flushes what is buffered when it exits, and
            # would replace the exit status by 120 if that failed. Libraries write to the descriptor too.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def discarding_lost_output() -> Iterator[None]:
    """Discard the output of the `with` block once it can no longer be written, instead of raising OSError."""
    # A run receives SIGHUP when its terminal is closed, and must still save. Every message would raise otherwise.
    before = sys.stdout, sys.stderr
    guarded = tuple(cast(TextIO, _DiscardingStream(stream)) for stream in before)
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        for stream in guarded:
            stream.flush()
        # Keep a wrapper that other code has put around the streams since then.
        sys.stdout = before[0] if sys.stdout is guarded[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is guarded[1] else sys.stderr
