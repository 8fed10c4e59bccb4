"""Segments of a JPEG file (ITU-T T.81, annex B), and the removal of stray bytes between them."""

import re
from collections.abc import Iterator

START, END, SCAN = b'\xff\xd8', b'\xff\xd9', b'\xff\xda'
SEGMENT_MARKER = re.compile(rb'\xff[\xc0-\xcf\xda-\xdf\xe0-\xef\xfe]')
"""Marker of a segment with a length."""
AFTER_SCAN = re.compile(rb'\xff[\x01-\xcf\xd8-\xfe]')
"""Marker that ends the data of a scan; in them, 0 follows 255, and restart markers are part of the data."""


def header_segments(jpeg: bytes) -> Iterator[bytes]:
    """Yield the contents of the segments of a JPEG before its first scan; stop at the first irregular byte."""
    at = 2
    while SEGMENT_MARKER.match(jpeg, at) and not jpeg.startswith(SCAN, at):
        end = _segment_end(jpeg, at)
        yield jpeg[at + 4 : end]
        at = end


def without_stray_bytes(jpeg: bytes) -> bytes:
    """Return a JPEG without bytes between its segments that belong to none; the same object if there are none.

    Data of a scan is kept as it is, as is all from a place on where no further segment is found.
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
