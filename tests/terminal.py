"""A terminal for tests: a pseudo-terminal of a given width, and an emulation of what a person sees in it."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

CODES = re.compile(r'\x1b\[([\d;]*)([AKm])|[\r\n]|[^\x00-\x1f\x7f]')
"""The control codes that the emulation knows, and printable characters."""


class Screen:
    """Rows of text after carriage returns, line breaks, cursor movements and erasures.

    Attributes:
        rows: All rows from the first one on, also those that a terminal would have scrolled out.
        wrapped: Indices of the rows that continue a text which reached the right edge.
        last_rows: Every text that the row of the cursor ever had before it was erased or left.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows = ['']
        self.wrapped: list[int] = []
        self.last_rows: list[str] = []
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        """Show what a program has written; fail at a control code that is unknown here."""
        position = 0
        while position < len(text):
            code = CODES.match(text, position)
            assert code is not None, f'unknown control code in {text[position : position + 20]!r}'
            self._obey(code)
            position = code.end()

    def _obey(self, code: re.Match[str]) -> None:
        count, letter = code.groups()
        if letter == 'm':  # a color, as of tracebacks since Python 3.13
            return
        if letter is None and code[0] not in '\r\n':
            self._put(code[0])
            return
        self.last_rows.append(self.rows[self._row].rstrip())
        if code[0] == '\r':
            self._column = 0
        elif code[0] == '\n':
            self._move(self._row + 1)
        elif letter == 'A':
            self._move(max(0, self._row - int(count or 1)))
        else:
            assert count in ('', '0'), 'only erasure to the end of the row is known'
            self.rows[self._row] = self.rows[self._row][: self._column]

    def _put(self, character: str) -> None:
        if self._column == self.columns:
            self._move(self._row + 1)
            self._column = 0
            self.wrapped.append(self._row)
        row = self.rows[self._row].ljust(self._column)
        self.rows[self._row] = row[: self._column] + character + row[self._column + 1 :]
        self._column += 1

    def _move(self, row: int) -> None:
        self._row = row
        self.rows += [''] * (row + 1 - len(self.rows))

    def __str__(self) -> str:
        return '\n'.join(row.rstrip() for row in self.rows)


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[Path, Screen]]:
    """Open a pseudo-terminal; yield its device, and its screen, which is complete when the block has ended."""
    master, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    content = bytearray()

    def read() -> None:
        # Reading fails when no process has the device open any longer.
        with contextlib.suppress(OSError):
            while piece := os.read(master, 65536):
                content.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    screen = Screen(columns)
    try:
        yield Path(os.ttyname(device)), screen
    finally:
        os.close(device)
        reader.join(60)
        os.close(master)
    screen.feed(content.decode())
