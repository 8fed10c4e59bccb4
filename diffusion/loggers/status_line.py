"""Status line in the last row of a terminal, below everything else that this process writes.

`install` replaces sys.stdout and sys.stderr: each write erases the status line, and redraws it once the written text
ends with a line break. Messages and the status line therefore never share a row, no matter which library writes them.
If stderr is not a terminal, nothing is replaced and nothing is shown.
"""

import atexit
import contextlib
import logging
import os
import sys
import textwrap
from typing import Any, TextIO, cast

from diffusion.errors import printable

_ERASE = '\r\x1b[K'
"""Control characters that move the cursor to the start of the row and erase the row."""
_INDENT = ' ' * 9
"""Indent of a message's continuation lines: the width of its time stamp."""


class StatusLine:
    """State of the status line on one terminal."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal
        self._text = ''
        self._row_in_use = False

    def columns(self) -> int:
        """Return the maximum number of columns of the text: one less than the terminal's, so that it never wraps."""
        # Query the size each time, since people resize windows. A pseudo-terminal without a size reports 0.
        try:
            reported = os.get_terminal_size(self._terminal.fileno()).columns
        except OSError:
            reported = 0
        return (reported or 80) - 1

    def show(self, text: str) -> None:
        self._text = text
        if self._row_in_use:
            return
        # Ignore errors: a disowned run continues after its terminal is gone.
        with contextlib.suppress(OSError):
            self._terminal.write(_ERASE + self._clipped())
            self._terminal.flush()

    def above(self, text: str) -> str:
        """Return the characters to write so that a text appears above the status line."""
        # The caller writes the result in a single call, so no other thread can write between erasing and the text.
        if not text:
            return text
        erase = '' if self._row_in_use else _ERASE
        # A carriage return leaves the row free: progress bars of other libraries write one after they erase themselves.
        self._row_in_use = not text.endswith(('\n', '\r'))
        return erase + text + ('' if self._row_in_use else self._clipped())

    def _clipped(self) -> str:
        return self._text[: self.columns()]


class _Above:
    """Terminal stream that writes above the status line; otherwise it behaves like the original stream."""

    def __init__(self, stream: TextIO, line: StatusLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._stream.write(self._line.above(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write(''.join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintableFormatter(logging.Formatter):
    """Formatter that escapes control characters, which file names and captions may contain."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class WrappingFormatter(PrintableFormatter):
    """Formatter that wraps messages at the terminal's width and indents all lines except the first."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        width = columns()
        lines = super().formatMessage(record).splitlines()
        return '\n'.join(
            textwrap.fill(line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
            for line in lines
        )


_line: StatusLine | None = None


def install() -> bool:
    """Reserve the terminal's last row, or return False without a terminal. Call before libraries store sys.stderr."""
    global _line
    if _line is None and sys.stderr.isatty() and os.environ.get('TERM', 'dumb') != 'dumb':
        _line = StatusLine(sys.stderr)
        sys.stderr = cast(TextIO, _Above(sys.stderr, _line))
        if sys.stdout.isatty():
            sys.stdout = cast(TextIO, _Above(sys.stdout, _line))
        atexit.register(show, '')
    return _line is not None


def show(text: str) -> None:
    """Replace the status line; an empty text removes it. Do nothing without a terminal."""
    if _line is not None:
        _line.show(text)


def columns() -> int:
    """Return the maximum length of a status line; 80 without a terminal."""
    return 80 if _line is None else _line.columns()
