"""Writer of TFRecord files for tests, which shares no code with the reader."""

import struct
from collections.abc import Mapping, Sequence

Feature = Sequence[bytes] | Sequence[str] | Sequence[int] | Sequence[float]


def remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


REMAINDERS = [*map(remainder, range(256))]


def crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ REMAINDERS[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack('<I', ((crc >> 15) + (crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) % 2**32)


def record(payload: bytes) -> bytes:
    length = struct.pack('<Q', len(payload))
    return length + masked(length) + payload + masked(payload)


def varint(value: int) -> bytes:
    digits = bytearray()
    value %= 2**64
    while value >= 128:
        digits.append(value % 128 + 128)
        value //= 128
    return bytes([*digits, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def feature(values: Feature) -> bytes:
    if values and isinstance(values[0], int):
        content = b''.join(varint(int(each)) for each in values)
        return field(3, field(1, content) if len(values) > 1 else varint(8) + content)  # one number is not packed
    if values and isinstance(values[0], float):
        content = struct.pack(f'<{len(values)}f', *values)
        return field(2, field(1, content) if len(values) > 1 else varint(13) + content)
    return field(1, b''.join(field(1, each.encode() if isinstance(each, str) else bytes(each)) for each in values))  # pyright: ignore[reportArgumentType]


def example(features: Mapping[str, Feature]) -> bytes:
    """Return a `tf.train.Example`; strings and bytes, integers, and floats are each a list of their type."""
    entries = (field(1, field(1, name.encode()) + field(2, feature(values))) for name, values in features.items())
    return field(1, b''.join(entries))
