"""Recipes of runs for reports: text without secrets, changes on resume, and differences between runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from diffusion.config.secret_patterns import secret_problems
from diffusion.config.yaml_syntax import parse_yaml

HIDDEN = '<hidden>'
"""Text in place of a value that may be a secret."""
MAX_CHARACTERS = 200_000
"""Length of a recipe's text that a page shows."""
NOT_COMPARED = {'name', 'runs_dir'}
"""Keys that differ between any two runs."""


def recipe_values(text: str) -> dict[str, Any]:
    """Return the values of a recipe's YAML; empty if it cannot be understood."""
    try:
        content = parse_yaml(text)
    except (ValueError, yaml.YAMLError, RecursionError):  # another program wrote the file
        return {}
    return content if isinstance(content, dict) else {}


def without_secrets(text: str, values: Mapping[str, Any]) -> str:
    """Return a recipe's text with values that may be secrets replaced."""
    flat = flattened(values)
    for problem in secret_problems(dict(values)):
        secret = flat.get(problem.where)
        if isinstance(secret, str) and secret:
            text = text.replace(secret, HIDDEN)
    return text[:MAX_CHARACTERS]


def flattened(values: Mapping[str, Any], where: str = '') -> dict[str, Any]:
    """Return the values of nested mappings by their dotted paths; lists count as values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        path = f'{where}.{key}' if where else str(key)
        if isinstance(value, Mapping) and value:
            found |= flattened(value, path)
        else:
            found[path] = value
    return found


def recipe_differences(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the keys with different values in the recipes: `key`, and in `values` the text of each, None if absent.

    Args:
        texts: YAML of the recipes, without secrets.
    """
    recipes = [flattened(recipe_values(text)) for text in texts]
    keys = [key for key in dict.fromkeys(key for each in recipes for key in each) if key not in NOT_COMPARED]
    rows = [(key, [_text(each[key]) if key in each else None for each in recipes]) for key in keys]
    return [{'key': key, 'values': values} for key, values in rows if len({*values}) > 1]


def _text(value: Any) -> str:
    """Return a value as it would be written in a recipe."""
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    return str(value)
