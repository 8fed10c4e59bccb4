"""Comparison of saved nested settings with the current ones, one line per difference."""

from collections.abc import Iterator, Mapping
from typing import Any


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], *, saved_in: str = 'in the checkpoint') -> list[str]:
    """Return a line per changed setting, such as `streams.a.choose: 96 in the checkpoint, 128 now`, in `now`'s order.

    Args:
        saved: The saved settings, nested mappings of plain values.
        saved_in: Words that follow a saved value in a line.
    """
    return list(_differences('', saved, now, saved_in))


def _differences(where: str, saved: Mapping[str, Any], now: Mapping[str, Any], saved_in: str) -> Iterator[str]:
    """Yield the lines of `differences` for the settings below the key path `where`."""
    for key in [*now, *(key for key in saved if key not in now)]:
        path = f'{where}.{key}' if where else key
        if key not in saved or key not in now:
            yield f'{path}: {_format_value(saved, key)} {saved_in}, {_format_value(now, key)} now'
        elif isinstance(saved[key], Mapping) and isinstance(now[key], Mapping):
            yield from _differences(path, saved[key], now[key], saved_in)
        elif saved[key] != now[key]:
            yield f'{path}: {saved[key]} {saved_in}, {now[key]} now'


def _format_value(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a setting as text; 'present' for a mapping, 'missing' if the key does not exist."""
    if key not in values:
        return 'missing'
    return 'present' if isinstance(values[key], Mapping) else str(values[key])
