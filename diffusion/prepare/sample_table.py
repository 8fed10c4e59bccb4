"""Table of one part of the input as a Parquet file: one row per input, kept or rejected.

A part is the unit of input that one job converts, such as a tar; `catalog` combines the tables of all parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.storage.atomic import becoming

ROWS = 'rows.parquet'
SCHEMA = pa.schema(
    {
        'key': pa.string(),
        'reason': pa.string(),
        'bucket': pa.string(),
        'shard': pa.uint32(),
        'offset': pa.uint32(),
        'size': pa.uint32(),
        'width': pa.uint32(),
        'height': pa.uint32(),
        'caption_length': pa.uint32(),
        'exact_hash': pa.uint64(),
        'perceptual_hash': pa.uint64(),
        'is_flat': pa.bool_(),
    }
)


@dataclass
class SampleRow:
    """Row of one input in the table of its part: its key, rejection reason, bucket, position and measurements.

    Values that are unknown because it was rejected stay zero or empty.
    """

    key: str
    reason: str = ''
    """Reason for rejection; empty if kept."""
    bucket: str = ''
    """Folder of its bucket, such as `512px/640x384`."""
    shard: int = 0
    """Number of the shard of the part that holds its sample."""
    offset: int = 0
    """Offset of its sample after the header of that shard, in bytes."""
    size: int = 0
    """Size of its sample in bytes."""
    width: int = 0
    """Width of the decoded image in pixels, before it is resized."""
    height: int = 0
    caption_length: int = 0
    """Length of the longest caption in characters."""
    exact_hash: int = 0
    perceptual_hash: int = 0
    is_flat: bool = False
    """True if the image has too little contrast for a meaningful perceptual hash."""


def write_sample_rows(folder: Path, rows: Sequence[SampleRow]) -> None:
    """Write the table of one part to the part's folder; the same rows give the same bytes."""
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    # File names and JSON can contain lone surrogates, which Arrow rejects because they are not valid UTF-8.
    text = [name for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()]
    columns |= {name: [value.encode('utf-8', 'backslashreplace').decode() for value in columns[name]] for name in text}
    with becoming(folder / ROWS) as unfinished:
        pq.write_table(pa.table(columns, schema=SCHEMA), unfinished, compression='zstd')


def read_sample_rows(folder: Path, columns: Sequence[str]) -> pa.Table:
    """Read some columns of the table in a part's folder."""
    return pq.read_table(folder / ROWS, columns=list(columns))
