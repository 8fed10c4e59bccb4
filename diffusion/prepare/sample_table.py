"""Tables of one part of the input as Parquet files: one row per input, kept or rejected, and one per stored sample.

A part is the unit of input that one job converts, such as a tar; `catalog` combines the tables of all parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INPUTS = 'rows.parquet'
SAMPLES = 'samples.parquet'
INPUT_SCHEMA = pa.schema(
    {
        'key': pa.string(),
        'reason': pa.string(),
        'captions': pa.list_(pa.string()),
        'caption_columns': pa.list_(pa.string()),
        'width': pa.uint32(),
        'height': pa.uint32(),
        'caption_length': pa.uint32(),
        'exact_hash': pa.uint64(),
        'perceptual_hash': pa.uint64(),
        'is_flat': pa.bool_(),
    }
)
SAMPLE_SCHEMA = pa.schema(
    {'row': pa.uint32(), 'bucket': pa.string(), 'shard': pa.uint32(), 'offset': pa.uint32(), 'size': pa.uint32()}
)


@dataclass
class InputRow:
    """Row of one input in a table of its part: its key, rejection reason, captions and measurements.

    If it was rejected, the values that are unknown stay zero or empty.
    """

    key: str
    reason: str = ''
    """Reason for rejection; empty if kept."""
    captions: list[str] = field(default_factory=list)
    """Cleaned captions."""
    caption_columns: list[str] = field(default_factory=list)
    """Column of the source that each caption is from; empty if there is only one column."""
    width: int = 0
    """Width of the decoded image in pixels, before it is resized."""
    height: int = 0
    caption_length: int = 0
    """Length of the longest caption in characters."""
    exact_hash: int = 0
    perceptual_hash: int = 0
    is_flat: bool = False
    """True if the image has too little contrast for a meaningful perceptual hash."""


@dataclass(frozen=True)
class SampleRow:
    """Row of one stored sample in a table of its part: its input, bucket and position; an image has one per bucket."""

    row: int
    """Row of its input in the table of inputs."""
    bucket: str
    """Folder of its bucket, such as `512px/640x384`."""
    shard: int
    """Number of the shard of the part that holds the sample."""
    offset: int
    """Offset of the sample after the header of that shard, in bytes."""
    size: int
    """Size of the sample in bytes."""


def write_tables(folder: Path, inputs: Sequence[InputRow], samples: Sequence[SampleRow]) -> None:
    """Write the tables of one part to the part's unfinished folder; the same rows give the same bytes."""
    _write(folder / INPUTS, inputs, INPUT_SCHEMA)
    _write(folder / SAMPLES, samples, SAMPLE_SCHEMA)


def read_inputs(folder: Path, columns: Sequence[str]) -> pa.Table:
    """Read some columns of the table of inputs in a part's folder."""
    return pq.read_table(folder / INPUTS, columns=list(columns))


def read_samples(folder: Path) -> pa.Table:
    """Read the table of samples in a part's folder, in the order of the inputs."""
    return pq.read_table(folder / SAMPLES)


def _write(path: Path, rows: Sequence[Any], schema: pa.Schema) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    # File names and JSON can contain lone surrogates, which Arrow rejects because they are not valid UTF-8.
    text = [name for name in schema.names if schema.field(name).type == pa.string()]
    columns |= {name: [value.encode('utf-8', 'backslashreplace').decode() for value in columns[name]] for name in text}
    pq.write_table(pa.table(columns, schema=schema), path, compression='zstd')
