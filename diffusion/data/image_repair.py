"""Parse JPEG and PNG files, and remove parts that decoders reject: stray bytes, and large or damaged text chunks."""

import re
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import simplejpeg

START, END, SCAN = b'\xff\xd8', b'\xff\xd9', b'\xff\xda'
SEGMENT_MARKER = re.compile(rb'\xff[\xc0-\xcf\xda-\xdf\xe0-\xef\xfe]')
"""Matches the marker of a JPEG segment that has a length field."""
AFTER_SCAN = re.compile(rb'\xff[\x01-\xcf\xd8-\xfe]')
"""Matches the marker that ends a scan's data. Escaped 0xFF bytes (0xFF00) and restart markers belong to the data."""

BUFFERED_BYTES = 9
"""Number of bytes that libjpeg may read ahead beyond a scan's data."""
MAX_TEXT_BYTES = 1_000_000
"""Maximum size in bytes of a PNG text chunk that is read for the orientation."""
MAX_PROFILE_BYTES = 16 * 2**20
"""Maximum size of a color profile in bytes; larger profiles are ignored."""
ORIENTATION_TEXTS = (b'Raw profile type exif', b'Raw profile type APP1', b'XML:com.adobe.xmp')
"""Keywords of PNG text chunks that may contain the orientation: EXIF as written by ImageMagick, and XMP."""
HEADER_BYTES = 8


def header_segments(jpeg: bytes) -> Iterator[bytes]:
    """Yield the contents of the segments of a JPEG before its first scan; stop at the first irregular byte."""
    at = 2
    while SEGMENT_MARKER.match(jpeg, at) and not jpeg.startswith(SCAN, at):
        end = _segment_end(jpeg, at)
        yield jpeg[at + 4 : end]
        at = end


def without_stray_bytes(jpeg: bytes) -> bytes:
    """Return a JPEG without the stray bytes between its segments, or the same object if there are none.

    Scans are not changed: stray bytes inside them remain. From the first incomplete segment on, nothing is changed.
    """
    kept, at = [START], len(START)
    while not jpeg.startswith(END, at):
        marker = SEGMENT_MARKER.search(jpeg, at)
        if not jpeg.startswith(START) or marker is None or _segment_end(jpeg, marker.start()) > len(jpeg):
            break
        end = _segment_end(jpeg, marker.start())
        if jpeg.startswith(SCAN, marker.start()):
            following = AFTER_SCAN.search(jpeg, end)
            end = len(jpeg) if following is None else following.start()
        kept.append(jpeg[marker.start() : end])
        at = end
    repaired = b''.join([*kept, jpeg[at:]])
    return repaired if len(repaired) < len(jpeg) else jpeg


def ends_with_stray_bytes(jpeg: bytes, count: int, marker: bytes, colorspace: str) -> bool:
    """Return True if the only fault of a JPEG is stray bytes after the complete data of one scan.

    The rest of a damaged scan may also look like stray bytes. In a complete scan, the unused bits of the last byte are
    ones; in a damaged scan, this is so only by chance. libjpeg skipped `count` bytes before `marker`, and may have read
    a few stray bytes before these into its buffer.
    """
    for end in scan_ends(jpeg):
        start = end - count
        if not jpeg.startswith(marker, end) or (pixels := _decoded(jpeg[:start] + jpeg[end:], colorspace)) is None:
            continue

        def is_enough(data: bytes, end: int = end, pixels: np.ndarray = pixels) -> bool:
            found = _decoded(data + jpeg[end:], colorspace)
            return found is not None and np.array_equal(found, pixels)

        # Find the last byte that affects a pixel, then count its unused low bits: flip fewer and fewer of them until
        # the pixels stay the same. All of these bits are ones if the data is complete.
        used = next((at for at in range(start - BUFFERED_BYTES, start) if is_enough(jpeg[:at])), start)
        last = jpeg[used - 1]
        for mask in (127, 63, 31, 15, 7, 3, 1):
            changed = bytes([last ^ mask]) + (b'\0' if last ^ mask == 0xFF else b'')
            if is_enough(jpeg[: used - 1] + changed):
                return last & mask == mask
        return True
    return False


def _decoded(jpeg: bytes, colorspace: str) -> np.ndarray | None:
    """Return the pixels of a JPEG, or None if libjpeg warns."""
    try:
        return simplejpeg.decode_jpeg(jpeg, colorspace)
    except ValueError:
        return None


def scan_ends(jpeg: bytes) -> Iterator[int]:
    """Yield the end position of each scan's data, for a JPEG without stray bytes between its segments."""
    at = len(START)
    while SEGMENT_MARKER.match(jpeg, at):
        is_scan, at = jpeg.startswith(SCAN, at), _segment_end(jpeg, at)
        if is_scan:
            following = AFTER_SCAN.search(jpeg, at)
            if following is None:
                return
            at = following.start()
            yield at


def _segment_end(jpeg: bytes, start: int) -> int:
    return start + 2 + max(2, int.from_bytes(jpeg[start + 2 : start + 4], 'big'))


def without_texts(png: bytes) -> tuple[bytes, bytes | None]:
    """Return a PNG without text chunks and color profile, and the profile (None if it is missing or damaged).

    Text chunks that may contain the orientation are kept if they have at most `MAX_TEXT_BYTES`. Profiles above
    `MAX_PROFILE_BYTES` are ignored. If another part of the file is damaged, everything from there on is left unchanged.
    """
    kept, profile = [png[:HEADER_BYTES]], None
    for kind, content, chunk in _chunks(png):
        if kind == b'iCCP':
            # The chunk is a name, two zero bytes, and the compressed profile.
            profile = _decompressed(content.partition(b'\0')[2][1:], MAX_PROFILE_BYTES) if _is_intact(chunk) else None
        elif kind not in (b'tEXt', b'zTXt', b'iTXt') or (_is_intact(chunk) and _states_orientation(kind, content)):
            kept.append(chunk)
    return b''.join(kept), profile


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield (kind, content, whole chunk) for each chunk; the kind is b'' for the rest after the last complete chunk."""
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


def _states_orientation(kind: bytes, content: bytes) -> bool:
    """Return True if a text chunk may contain the orientation and, even decompressed, has at most MAX_TEXT_BYTES."""
    keyword, _, rest = content.partition(b'\0')
    if keyword not in ORIENTATION_TEXTS or len(content) > MAX_TEXT_BYTES:
        return False
    if kind == b'zTXt':
        return _decompressed(rest[1:], MAX_TEXT_BYTES) is not None
    if kind == b'iTXt' and rest[:1] == b'\1':
        text = rest[2:].split(b'\0', 2)  # the parts are language, translated keyword and text
        return len(text) == 3 and _decompressed(text[2], MAX_TEXT_BYTES) is not None
    return True


def _decompressed(compressed: bytes, most: int) -> bytes | None:
    """Decompress zlib data; return None if it is damaged or decompresses to more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(compressed, most + 1)
    except zlib.error:
        return None
    return found if stream.eof and len(found) <= most else None
