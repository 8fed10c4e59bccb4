"""Values of the rows of an Arrow table as Python objects, for any bytes and times."""

from typing import Any

import pyarrow as pa


def row_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch: times as text, and bytes of text that are not UTF-8 as surrogates."""
    try:
        return _times_to_text(batch).to_pylist()
    except UnicodeDecodeError:
        columns = {name: [_value(each) for each in batch.column(name)] for name in batch.schema.names}
        return [{name: columns[name][row] for name in columns} for row in range(batch.num_rows)]


def _times_to_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    # Arrow has nanoseconds and Python's datetime does not, so `to_pylist` cannot convert every value.
    arrays = [
        array.cast(pa.string()) if pa.types.is_temporal(array.type) and not pa.types.is_duration(array.type) else array
        for array in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _value(scalar: Any) -> Any:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StringScalar | pa.LargeStringScalar):
        return scalar.as_buffer().to_pybytes().decode('utf-8', 'surrogateescape')
    if isinstance(scalar, pa.MapScalar):
        return [(_value(pair[0]), _value(pair[1])) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_value(each) for each in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {name: _value(scalar[name]) for name in scalar}
    if isinstance(scalar, pa.DictionaryScalar):
        return _value(scalar.dictionary[scalar.index.as_py()])
    if pa.types.is_temporal(scalar.type) and not pa.types.is_duration(scalar.type):
        return scalar.cast(pa.string()).as_py()
    return scalar.as_py()
