"""Segments of a JPEG file (ITU-T T.81, annex B), and the removal of stray bytes between them."""

import re
from collections.abc import Iterator

import numpy as np
import simplejpeg

START, END, SCAN = b'\xff\xd8', b'\xff\xd9', b'\xff\xda'
SEGMENT_MARKER = re.compile(rb'\xff[\xc0-\xcf\xda-\xdf\xe0-\xef\xfe]')
"""Marker of a segment with a length."""
AFTER_SCAN = re.compile(rb'\xff[\x01-\xcf\xd8-\xfe]')
"""Marker that ends the data of a scan. In the data, 0 follows 255, and restart markers are part of the data."""

BUFFERED_BYTES = 9
"""Number of bytes after the data of a scan that libjpeg may have read ahead."""


def header_segments(jpeg: bytes) -> Iterator[bytes]:
    """Yield the contents of the segments of a JPEG before its first scan; stop at the first irregular byte."""
    at = 2
    while SEGMENT_MARKER.match(jpeg, at) and not jpeg.startswith(SCAN, at):
        end = _segment_end(jpeg, at)
        yield jpeg[at + 4 : end]
        at = end


def without_stray_bytes(jpeg: bytes) -> bytes:
    """Return a JPEG without the bytes between its segments; the same object if there are none.

    The data of scans is kept as it is, and so is everything after the last segment that is found.
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

    Damaged data may end early as well, so that the rest of it looks like stray bytes. Complete data fills the unused
    bits of its last byte with ones; damaged data does so only by chance.

    Args:
        count: Number of bytes that libjpeg has skipped; a few more may be in its buffer.
        marker: The marker that follows the stray bytes.
        colorspace: Color space to decode to, by simplejpeg's name.
    """
    for end in scan_ends(jpeg):
        start = end - count
        if not jpeg.startswith(marker, end) or (pixels := _decoded(jpeg[:start] + jpeg[end:], colorspace)) is None:
            continue

        def is_enough(data: bytes, end: int = end, pixels: np.ndarray = pixels) -> bool:
            found = _decoded(data + jpeg[end:], colorspace)
            return found is not None and np.array_equal(found, pixels)

        # Find the last byte that changes a pixel, then the number of its unused low bits: flip ever fewer of them until
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
    """Return the pixels of a JPEG; None if libjpeg warns."""
    try:
        return simplejpeg.decode_jpeg(jpeg, colorspace)
    except ValueError:
        return None


def scan_ends(jpeg: bytes) -> Iterator[int]:
    """Yield the position after the data of each scan of a JPEG without stray bytes between its segments."""
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
