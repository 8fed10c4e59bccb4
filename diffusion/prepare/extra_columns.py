"""Metadata columns: convert them to JSON values, and compute new ones with a user's function before filtering."""

import datetime
import decimal
import functools
import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from diffusion.errors import UserError

FUNCTION = 'columns'
BATCH_IMAGES = 64
BATCH_PIXELS = 2**26
"""Maximum number of pixels of the decoded images in a batch; takes 200 MB."""
RESERVED = ('caption_length', 'perceptual_hash', 'source_height', 'source_width', 'language')
"""Columns computed by this package, which a user's function must not compute."""


def json_value(value: Any) -> Any:
    """Convert to JSON types, at all levels: NaN and infinity to None, decimals and durations (seconds) to numbers.

    Dates become ISO 8601 texts; values of any other type are converted by `str`.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode(
            'utf-8', 'replace'
        ).decode()  # JSON escapes may contain lone surrogates, which are not valid UTF-8
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, decimal.Decimal):
        return json_value(float(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {json_value(str(name)): json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    return str(value)


def read_columns(text: bytes) -> dict[str, Any]:
    """Parse a JSON object into metadata columns; if invalid, return a single column `bad_metadata` with the error."""
    try:
        columns = json_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return {'bad_metadata': f'{type(error).__name__}: {error}'}
    return columns if isinstance(columns, dict) else {'bad_metadata': f'{type(columns).__name__}, not an object'}


def source_hash(path: str) -> str:
    """Return the SHA-256 of the user's file, recorded in the dataset to identify the function that computed columns."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def file_problem(path: str) -> str | None:
    """Return why a user's Python file cannot be read, or None if it can; the file is not executed."""
    if not path.endswith('.py'):
        return f'{path} is not a Python file; give one with a function `{FUNCTION}`'
    try:
        source_hash(path)
    except OSError as error:
        return f'{path}: {error.strerror}; give a Python file with a function `{FUNCTION}`'
    return None


def compute_columns(
    path: str, images: Sequence[Image.Image], captions: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return each image's columns (JSON values), computed by the function in the user's file; its errors propagate."""
    found = _function(str(Path(path).resolve()))(list(images), [list(each) for each in captions])
    if not isinstance(found, Mapping):
        raise UserError(
            f'{path}: {FUNCTION}() returned a {type(found).__name__}; return a dictionary such as '
            "{'score': [0.1, 0.7]}, with a value for each image"
        )
    rows: list[dict[str, Any]] = [{} for _ in images]
    for name, values in found.items():
        if not isinstance(name, str) or name in RESERVED:
            raise UserError(f'{path}: {FUNCTION}() returned the column {name!r}, reserved or not text; rename it')
        values = values.tolist() if hasattr(values, 'tolist') else values  # converts NumPy and PyTorch arrays
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(images):
            count = len(values) if isinstance(values, Sequence) and not isinstance(values, str) else 'no list of'
            raise UserError(
                f'{path}: {FUNCTION}() returned {count} values of {name!r} for {len(images)} images; return one each'
            )
        for row, value in zip(rows, values, strict=True):
            row[name] = json_value(value.item() if hasattr(value, 'item') else value)
    return rows


@functools.cache
def _function(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(f'computed_columns_{Path(path).stem}', path)
    assert spec is not None and spec.loader is not None
    # Add the module to sys.modules, because dataclasses that it defines look it up there.
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, FUNCTION, None)
    if not callable(function):
        raise UserError(f'{path}: has no function `{FUNCTION}`; define {FUNCTION}(images, captions)')
    return function
