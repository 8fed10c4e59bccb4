"""Parse and format sizes in bytes, such as `500gb` and `64 MiB`."""

import re

from diffusion.errors import UserError

UNITS = {'': 1, 'b': 1} | {
    f'{letter}{suffix}': base**power
    for power, letter in enumerate('kmgtp', start=1)
    for suffix, base in (('b', 1000), ('ib', 1024))
}


def parse_bytes(text: str | int) -> int:
    """Parse a size such as `500gb` into a number of bytes: 1gb is 10**9, 1gib is 2**30, a bare number is bytes.

    Raises:
        UserError: The text is not a positive number with an optional unit.
    """
    found = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([a-z]*)', str(text).strip().lower())
    if found is None or found[2] not in UNITS or float(found[1]) == 0:
        raise UserError(f'{text!r} is not a size; write a number and a unit, such as 500gb or 64mib')
    return int(float(found[1]) * UNITS[found[2]])


def bytes_text(size: float) -> str:
    """Return a size in bytes as readable text with a decimal unit, such as `1.5 GB`."""
    for unit in ('B', 'kB', 'MB', 'GB', 'TB'):
        if size < 1000 or unit == 'TB':
            return f'{size:.0f} {unit}' if unit == 'B' else f'{size:.1f} {unit}'
        size /= 1000
    raise AssertionError
