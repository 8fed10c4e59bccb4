"""Image formats that need extra packages (HEIC, JPEG XL and SVG); read only if listed in the setting `formats`."""

import atexit
import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import IO, Literal, NamedTuple

from diffusion.errors import UserError
from diffusion.prepare import svg_process
from diffusion.prepare.source import IMAGE_SUFFIXES, Unfit

OptionalFormat = Literal['heic', 'jxl', 'svg']
SVG_START = re.compile(rb'(\xef\xbb\xbf)?\s*<(\?xml|!--|!DOCTYPE svg|svg)')


class _Requirement(NamedTuple):
    suffixes: tuple[str, ...]
    module: str
    package: str
    pillow_name: str
    """Pillow's name for the format; empty if Pillow does not read it."""


REQUIREMENTS: dict[str, _Requirement] = {
    'heic': _Requirement(('heic', 'heif', 'hif'), 'pillow_heif', 'pillow-heif', 'HEIF'),
    'jxl': _Requirement(('jxl',), 'pillow_jxl', 'pillow-jxl-plugin', 'JXL'),
    'svg': _Requirement(('svg',), 'resvg_py', 'resvg-py', ''),
}
_RATIOS = (0, 1, Fraction(12, 10), Fraction(4, 3), Fraction(3, 2), Fraction(16, 9), Fraction(5, 4), 2)
"""Width-to-height ratios by their number in a JPEG XL header; with 0, the header contains the width itself."""


def image_suffixes(formats: Collection[str]) -> tuple[str, ...]:
    """Return suffixes of the image formats that are always read and of `formats`, in lower case without a dot."""
    return (*IMAGE_SUFFIXES, *(suffix for name in formats for suffix in REQUIREMENTS[name].suffixes))


def packages_of(formats: Collection[str]) -> list[str]:
    """Return the pip packages that decode these formats; their versions affect the pixels."""
    return [REQUIREMENTS[name].package for name in formats]


def require_packages(formats: Collection[str]) -> None:
    missing = [name for name in formats if importlib.util.find_spec(REQUIREMENTS[name].module) is None]
    if missing:
        raise UserError(
            f'formats: {", ".join(missing)} needs {" and ".join(packages_of(missing))}; '
            "install them with `pip install 'diffusion-recipes[formats]'`"
        )


def format_of_suffix(kind: str) -> str | None:
    """Return the optional format of files with this suffix, such as `heic` for `.heif`; None for other suffixes."""
    suffix = kind.removeprefix('.')
    return next((name for name, needed in REQUIREMENTS.items() if suffix in needed.suffixes), None)


def pillow_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Register these formats with Pillow, and return Pillow's names for them."""
    if 'heic' in formats:
        import pillow_heif  # type: ignore[import-not-found]  # an extra

        pillow_heif.register_heif_opener(thumbnails=False)
    if 'jxl' in formats:
        import pillow_jxl  # type: ignore[import-not-found]  # an extra; registers itself

        assert pillow_jxl
    return tuple(REQUIREMENTS[name].pillow_name for name in formats if REQUIREMENTS[name].pillow_name)


class JxlHeader(NamedTuple):
    width: int
    height: int
    is_animated: bool


def read_jxl_header(encoded: bytes) -> JxlHeader | None:
    """Parse a JPEG XL file's header (ISO/IEC 18181-1, annexes A and D); return None for other files.

    Raise ValueError if the header is incomplete.
    """
    # Parse the header ourselves: pillow-jxl-plugin decodes an image on opening, before its size can be checked, and
    # returns the first frame of an animation without a warning.
    codestream = _jxl_codestream(encoded)
    if codestream is None:
        return None
    bits = _Bits(codestream[2:64])
    is_small = bits.read(1)

    def side() -> int:
        return 8 * (bits.read(5) + 1) if is_small else bits.read((9, 13, 18, 30)[bits.read(2)]) + 1

    def size() -> tuple[int, int]:
        height = side()
        ratio = _RATIOS[bits.read(3)]
        return (int(height * ratio) if ratio else side()), height

    width, height = size()
    is_animated = False
    if not bits.read(1) and bits.read(1):  # some values differ from the defaults, and there are extra fields
        bits.read(3)  # skip the orientation
        if bits.read(1):  # skip the size recommended for display, if any
            is_small = bits.read(1)
            size()
        # If there is a preview, do not parse its header, and assume no animation; libjxl writes no previews.
        is_animated = not bits.read(1) and bool(bits.read(1))
    return JxlHeader(width, height, is_animated)


def _jxl_codestream(encoded: bytes) -> bytes | None:
    """Return a JPEG XL file from its codestream on, or None for other files; ValueError if it has no codestream."""
    if encoded.startswith(b'\xff\x0a'):
        return encoded
    if not encoded.startswith(b'\0\0\0\x0cJXL \r\n\x87\n'):
        return None
    start = 0
    while start + 8 <= len(encoded):
        size, kind, header = int.from_bytes(encoded[start : start + 4], 'big'), encoded[start + 4 : start + 8], 8
        if size == 1:
            size, header = int.from_bytes(encoded[start + 8 : start + 16], 'big'), 16
        if kind in (b'jxlc', b'jxlp'):
            return encoded[start + header + (4 if kind == b'jxlp' else 0) :]  # a jxlp box starts with a 4-byte number
        if size < header:  # size 0: the last box, which extends to the end of the file
            break
        start += size
    raise ValueError('the file has no codestream')


class _Bits:
    """Reads numbers of any bit width, starting with the lowest bit of each byte."""

    def __init__(self, content: bytes) -> None:
        self._value = int.from_bytes(content, 'little')
        self._left = 8 * len(content)

    def read(self, count: int) -> int:
        if count > self._left:
            raise ValueError('the header is incomplete')
        value = self._value & ((1 << count) - 1)
        self._value >>= count
        self._left -= count
        return value


def render_svg(svg: bytes, *, side: int, max_pixels: int) -> bytes:
    """Render a drawing as a PNG with transparency, in another process, since rendering may crash or hang.

    Raise Unfit if it is rejected: undecodable, svg_text, svg_other_file, svg_too_complex or too_many_pixels.
    """
    return _renderer().render(svg, side, max_pixels)


class _Renderer:
    """Process that renders drawings; started for the first drawing and after each crash."""

    # Keep the process: starting one per drawing would take a tenth of a second.
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
        """End the process and return its exit status, or None if none is running; the next drawing starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode

    def _end(self) -> Unfit:
        """End the failed rendering process; return why the drawing that it was rendering is rejected."""
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
