"""Sequential reader of TFRecord files that checks every byte, and parser of the `tf.train.Example` messages in them.

A record is its length (uint64), the masked CRC-32C of these 8 bytes, the payload, and the masked CRC-32C of the
payload; all numbers are little-endian (tensorflow/core/lib/io/record_writer.h). The parser reads the few message types
of tensorflow/core/example, so that neither TensorFlow nor protobuf is needed.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from google_crc32c import value as crc32c

from diffusion.prepare.tar_reading import GZIP, MAX_CONTENT

_HEADER, _CHECKSUM = struct.Struct('<QI'), struct.Struct('<I')
_FIXED_BYTES = {1: 8, 5: 4}
"""Sizes of protobuf fields of fixed size by wire type."""


class DamagedRecords(Exception):
    """Raised where a file cannot be read on: cut_off, damaged, unreadable (from the first record) or too_large."""


class NotAnExample(ValueError):
    """A payload is not a `tf.train.Example`."""


def masked_crc32c(content: bytes) -> int:
    """Return the CRC-32C of some bytes, rotated by 15 bits and shifted by a constant, as TFRecord files store it."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path) -> Iterator[bytes | None]:
    """Yield the payload of each record of a file, which may be gzip-compressed; None if its checksum is wrong.

    Raises:
        DamagedRecords: After the records before the damage, if the file ends within a record or a length is wrong.
    """
    with path.open('rb') as file:
        start = file.read(_HEADER.size)
        file.seek(0)
        # The length of a record of 559,903 bytes looks like the start of a gzip file, but its checksum is right.
        is_gzip = start.startswith(GZIP) and not _is_header(start)
        stream = gzip.GzipFile(fileobj=file) if is_gzip else file
        try:
            is_first = True
            while header := stream.read(_HEADER.size):
                if len(header) == _HEADER.size and not _is_header(header):
                    raise DamagedRecords('unreadable' if is_first else 'damaged')
                yield _read_payload(stream, header)
                is_first = False
        except EOFError as error:  # a truncated gzip stream
            raise DamagedRecords('cut_off') from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DamagedRecords('damaged') from error


def _is_header(header: bytes) -> bool:
    """Return True for a length with its checksum."""
    return len(header) == _HEADER.size and masked_crc32c(header[:8]) == _HEADER.unpack(header)[1]


def _read_payload(stream: IO[bytes] | gzip.GzipFile, header: bytes) -> bytes | None:
    length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
    if length > MAX_CONTENT:
        raise DamagedRecords('too_large')
    content = stream.read(length + _CHECKSUM.size)
    if len(header) < _HEADER.size or len(content) < length + _CHECKSUM.size:
        raise DamagedRecords('cut_off')
    payload = content[:length]
    return payload if masked_crc32c(payload) == _CHECKSUM.unpack(content[length:])[0] else None


def parse_example(payload: bytes) -> dict[str, list[Any]]:
    """Return the features of a `tf.train.Example` by name; values are bytes, floats or integers.

    Raises:
        NotAnExample: The bytes are not such a message.
    """
    try:
        # An Example has Features in field 1, and these have a map in field 1.
        features = [value for number, value in _fields(memoryview(payload)) if number == 1]
        return dict(_feature(entry) for each in features for number, entry in _fields(each) if number == 1)
    except (IndexError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise NotAnExample(str(error)) from error


def _feature(entry: memoryview) -> tuple[str, list[Any]]:
    """Return name and values of an entry of a map: field 1 is the key, 2 a Feature."""
    name, values = '', []
    for number, content in _fields(entry):
        if number == 1:
            name = str(content, 'utf-8')
        elif number == 2:
            # A Feature has one field: 1 for a list of bytes, 2 of floats, 3 of integers.
            for kind, listed in _fields(content):
                values = [each for field, value in _fields(listed) if field == 1 for each in _values(kind, value)]
    return name, values


def _values(kind: int, value: Any) -> list[Any]:
    """Return the values in one field of a list; numbers are mostly packed, several in one field."""
    if kind == 1:
        return [bytes(value)]
    if kind == 2:
        return list(struct.unpack(f'<{len(value) // 4}f', value))
    found, at = [value] if isinstance(value, int) else [], 0
    while not isinstance(value, int) and at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return [each - 2**64 if each >= 2**63 else each for each in found]


def _fields(message: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) for each field of a message; a value is an integer, or bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        size = _FIXED_BYTES.get(tag & 7)
        if tag & 7 == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise NotAnExample(f'field {tag >> 3} of wire type {tag & 7} ends after the message')
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer in base 128, least significant digit first, and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise NotAnExample('an integer has more than ten bytes')
