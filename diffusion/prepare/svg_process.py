"""Program that renders SVG drawings; `optional_formats` runs it as a separate process, since drawings may crash it.

It reads requests from standard input and writes answers to standard output until the input ends. It is run by path and
imports no other module of this package, so that it starts within a tenth of a second.
"""

import resource
import signal
import struct
import sys
from xml.etree import ElementTree

REQUEST = struct.Struct('<IQQ')
"""Fields of a request: minimum shorter side in pixels, maximum width times height, size of the drawing in bytes."""
ANSWER = struct.Struct('<?Q')
"""Fields of an answer: True if a PNG follows, False if a rejection reason follows; then the number of bytes."""
TIMEOUT_SECONDS = 20
MEMORY_BYTES = 4 * 2**30
FIRST_SIDE = 64
"""Longer side in pixels of a first, small rendering that determines the aspect ratio."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(REQUEST.size):
        side, max_pixels, size = REQUEST.unpack(header)
        svg = source.read(size)
        signal.alarm(TIMEOUT_SECONDS)  # SIGALRM ends this process, even while native code runs
        try:
            succeeded, content = True, render(svg, side, max_pixels)
        except Rejected as reason:
            succeeded, content = False, str(reason).encode()
        except Exception as error:
            succeeded, content = False, f'undecodable\0{type(error).__name__}: {error}'.encode()
        signal.alarm(0)
        sink.write(ANSWER.pack(succeeded, len(content)) + content)
        sink.flush()


class Rejected(Exception):
    """Raised to reject a drawing; the message is the reason, a zero character, and an explanation."""


def render(svg: bytes, side: int, max_pixels: int) -> bytes:
    """Render a drawing as a PNG with transparency whose shorter side has at least `side` pixels.

    Raise Rejected if it contains text, refers to another file or is too large; other exceptions if it is not valid SVG.
    """
    check(svg)
    text = svg.decode('utf-8-sig')
    # First render into a small frame: without a frame, resvg allocates whatever size the drawing claims.
    width, height = struct.unpack_from('>II', rendered(text, FIRST_SIDE), 16)  # the size in the PNG's header
    # Subtract one, because the small rendering's size is rounded and an image must not be smaller than its bucket.
    frame = -(-side * max(width, height) // max(1, min(width, height) - 1))
    if frame * (-(-frame * min(width, height) // max(width, height))) > max_pixels:
        raise Rejected(
            f'too_many_pixels\0a {width}:{height} drawing with shorter side {side} exceeds {max_pixels} pixels'
        )
    return rendered(text, frame)


def check(svg: bytes) -> None:
    """Raise Rejected if a drawing needs files or fonts from this machine."""
    for element in ElementTree.fromstring(svg).iter():
        name = str(element.tag).rpartition('}')[2]
        # resvg reads linked images, even by absolute path.
        links = [value for key, value in element.items() if key.rpartition('}')[2] == 'href']
        if name in ('image', 'feImage') and not all(link.strip().startswith(('data:', '#')) for link in links):
            raise Rejected(f'svg_other_file\0the drawing shows the file {links[0]}')
        if name == 'text' and ''.join(element.itertext()).strip():
            raise Rejected('svg_text\0text depends on the fonts of a machine; convert it to paths')


def rendered(svg: str, side: int) -> bytes:
    import resvg_py  # import here: resvg_py is optional, but `optional_formats` always imports this module

    png = resvg_py.svg_to_bytes(svg_string=svg, width=side, height=side, skip_system_fonts=True)
    return bytes(png)


if __name__ == '__main__':
    main()
