"""Metadata columns that come with images, in JSON's types."""

import datetime
import decimal
import json
import math
from collections.abc import Mapping
from typing import Any


def json_value(value: Any) -> Any:
    """Convert a value to JSON's types: NaN and infinities become None, decimals numbers, times and others text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return value.encode('utf-8', 'replace').decode()  # JSON can spell lone surrogates, UTF-8 cannot
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
    """Return the columns of a JSON object beside an image.

    A text that is no such object gives only the column `bad_metadata` with the error; the image stays usable.
    """
    try:
        columns = json_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return {'bad_metadata': f'{type(error).__name__}: {error}'}
    return columns if isinstance(columns, dict) else {'bad_metadata': f'{type(columns).__name__}, not an object'}
