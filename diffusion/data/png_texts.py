"""Remove the texts of a PNG, which Pillow reads with the image and refuses if they are large or damaged."""

import struct
import zlib
from collections.abc import Iterator

MAX_TEXT_BYTES = 1_000_000
"""Maximum size of a text that states the orientation, in bytes."""
MAX_PROFILE_BYTES = 16 * 2**20
"""Maximum size of a color profile, in bytes; a larger one is ignored."""
ORIENTATION_TEXTS = (b'Raw profile type exif', b'Raw profile type APP1', b'XML:com.adobe.xmp')
"""Keywords of the texts that can state an orientation: EXIF as ImageMagick writes it, and XMP."""
HEADER_BYTES = 8


def without_texts(png: bytes) -> tuple[bytes, bytes | None]:
    """Return a PNG without its texts and its color profile, and the profile, or None if it is missing or damaged.

    Texts of less than `MAX_TEXT_BYTES` that can state the orientation are kept. At most `MAX_PROFILE_BYTES` are
    decompressed. If another part of the file is damaged, the file is returned unchanged from there on.
    """
    kept, profile = [png[:HEADER_BYTES]], None
    for kind, content, chunk in _chunks(png):
        if kind == b'iCCP':
            profile = _profile(content) if _is_intact(chunk) else None
        elif kind not in (b'tEXt', b'zTXt', b'iTXt') or (_is_intact(chunk) and _states_orientation(kind, content)):
            kept.append(chunk)
    return b''.join(kept), profile


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield kind, content and all bytes of each chunk; the rest after the last complete one has the kind b''."""
    at = HEADER_BYTES
    while at + 12 <= len(png):
        (size,) = struct.unpack_from('>I', png, at)
        if at + 12 + size > len(png):
            break
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + size], png[at : at + 12 + size]
        at += 12 + size
    yield b'', b'', png[at:]


def _is_intact(chunk: bytes) -> bool:
    return zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], 'big')


def _profile(content: bytes) -> bytes | None:
    """Return the profile in an iCCP chunk: a name, a zero, the compression method 0, and the compressed profile."""
    return _decompressed(content.partition(b'\0')[2][1:], MAX_PROFILE_BYTES)


def _states_orientation(kind: bytes, content: bytes) -> bool:
    """Return True if a text can state the orientation and is small."""
    keyword, _, rest = content.partition(b'\0')
    if keyword not in ORIENTATION_TEXTS or len(content) > MAX_TEXT_BYTES:
        return False
    if kind == b'zTXt':
        return _decompressed(rest[1:], MAX_TEXT_BYTES) is not None
    if kind == b'iTXt' and rest[:1] == b'\1':
        text = rest[2:].split(b'\0', 2)  # language, translated keyword, text
        return len(text) == 3 and _decompressed(text[2], MAX_TEXT_BYTES) is not None
    return True


def _decompressed(compressed: bytes, most: int) -> bytes | None:
    """Return zlib data decompressed; None if it is damaged or has more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(compressed, most + 1)
    except zlib.error:
        return None
    return found if stream.eof and len(found) <= most else None
