"""Removal of values of environment variables, which may be secrets, from messages."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from diffusion.config.interpolation import KeyPath

MIN_CHARACTERS = 6
"""Shorter values are replaced only where a message is about them; elsewhere they would match parts of words."""


def hide_values(
    text: str, from_environment: Mapping[KeyPath, str], values: Any, *, quoted_at: Collection[KeyPath] = ()
) -> str:
    """Replace values of environment variables in a message by the interpolations that they come from.

    Args:
        from_environment: Text of each value that depends on an environment variable, by its path in `values`.
        values: Plain values, with those of the environment variables.
        quoted_at: Paths of values that the message is about, which it may quote even if they are short.
    """
    hidden: dict[str, str] = {}
    # Add the values that the message is about last: if two variables have the same value, theirs overwrites the other.
    for path, expression in sorted(from_environment.items(), key=lambda item: item[0] in quoted_at):
        for part in _scalars(_value_at(values, path)):
            if str(part) == expression or part is None or isinstance(part, bool):
                continue
            if len(str(part)) >= MIN_CHARACTERS or path in quoted_at:
                hidden |= {repr(part): repr(str(expression)), repr(part)[1:-1]: expression, str(part): expression}
    # Replace the longest value first: one value may be part of another.
    for value in sorted(filter(None, hidden), key=len, reverse=True):
        pattern = re.escape(value) if len(value) >= MIN_CHARACTERS else rf'(?<![\w.]){re.escape(value)}(?![\w.])'
        text = re.sub(pattern, lambda _, value=value: hidden[value], text)
    return text


def _value_at(values: Any, path: KeyPath) -> Any:
    """Return the value at a path, or None if there is none."""
    for key in path:
        items: Any = dict(enumerate(values)) if isinstance(values, list) else values
        if not isinstance(items, dict) or key not in items:
            return None
        values = items[key]
    return values


def _scalars(value: Any) -> list[Any]:
    """Return the scalars in nested mappings and lists."""
    if isinstance(value, dict):
        return [found for item in value.values() for found in _scalars(item)]
    if isinstance(value, list):
        return [found for item in value for found in _scalars(item)]
    return [value]
