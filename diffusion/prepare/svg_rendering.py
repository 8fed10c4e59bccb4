"""Render untrusted SVG drawings in a process of its own, which a drawing can crash or hang."""

import atexit
import contextlib
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import IO

from diffusion.prepare import svg_process
from diffusion.prepare.rejection import Unfit

_START = re.compile(rb'(\xef\xbb\xbf)?\s*<(\?xml|!--|!DOCTYPE svg|svg)')


def looks_like_svg(encoded: bytes) -> bool:
    """Return True if a file begins as an XML or SVG file does."""
    return _START.match(encoded) is not None


def render_svg(svg: bytes, *, side: int, max_pixels: int) -> bytes:
    """Return a drawing as a PNG with transparency.

    Args:
        side: Minimum of the shorter side in pixels.
        max_pixels: Maximum width times height.

    Raises:
        Unfit: The drawing is rejected: undecodable, svg_text, svg_other_file, svg_too_complex or too_many_pixels.
    """
    return _renderer().render(svg, side, max_pixels)


class _Renderer:
    """The process that renders, started with the first drawing and after each crash."""

    # A process per drawing would take a tenth of a second for each.
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, svg: bytes, side: int, max_pixels: int) -> bytes:
        if self._process is None:
            path = Path(svg_process.__file__)
            self._process = subprocess.Popen(
                [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None and sink is not None
        try:
            sink.write(svg_process.REQUEST.pack(side, max_pixels, len(svg)) + svg)
            sink.flush()
            succeeded, size = svg_process.ANSWER.unpack(_read(source, svg_process.ANSWER.size))
            answer = _read(source, size)
        except (BrokenPipeError, EOFError) as error:
            raise self._end() from error
        if not succeeded:
            reason, _, detail = answer.decode().partition('\0')
            raise Unfit(reason, detail)
        return answer

    def close(self) -> int | None:
        """End the process and return its exit status, or None if there is none; the next drawing starts another one."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode

    def _end(self) -> Unfit:
        """Return the reason for which the process has ended."""
        status = self.close()
        if status == -signal.SIGALRM:
            return Unfit('svg_too_complex', f'rendering took more than {svg_process.TIMEOUT_SECONDS} seconds')
        return Unfit('undecodable', f'rendering ended with status {status}')


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


@cache
def _renderer() -> _Renderer:
    renderer = _Renderer()
    atexit.register(renderer.close)
    return renderer
