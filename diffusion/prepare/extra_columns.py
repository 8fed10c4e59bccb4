"""Conversion of metadata columns to JSON values."""

import datetime
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """Convert a value to JSON types: NaN and infinity to None, decimals and durations to numbers, others to text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode(
            'utf-8', 'replace'
        ).decode()  # JSON escapes can hold lone surrogates, which are not valid UTF-8
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
    """Parse a JSON object into metadata columns.

    Invalid text returns a single column `bad_metadata` with the error, so that the image can still be used.
    """
    try:
        columns = json_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return {'bad_metadata': f'{type(error).__name__}: {error}'}
    return columns if isinstance(columns, dict) else {'bad_metadata': f'{type(columns).__name__}, not an object'}
