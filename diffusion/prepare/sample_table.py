"""The table of a part: one row per image, kept or left out, as a Parquet file."""

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
    """The row of an image; values unknown for one that is left out stay zero or empty."""

    key: str
    reason: str = ''
    """The reason why it is left out; empty for one that is kept."""
    bucket: str = ''
    """The folder of its bucket, such as `512px/640x384`."""
    shard: int = 0
    """The shard of the part that its sample is in."""
    offset: int = 0
    """The offset of its sample after that shard's header, in bytes."""
    size: int = 0
    """The size of its sample in bytes."""
    width: int = 0
    """Pixels of the image as it was found."""
    height: int = 0
    caption_length: int = 0
    """Characters of the longest caption."""
    exact_hash: int = 0
    perceptual_hash: int = 0
    is_flat: bool = False
    """True if it shows too little for its perceptual hash to mean anything."""


def write_sample_rows(folder: Path, rows: Sequence[SampleRow]) -> None:
    """Write the rows of a part; the same rows give the same bytes."""
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    # Unpaired surrogates come in with file names and JSON; Arrow takes UTF-8 alone.
    text = [name for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()]
    columns |= {name: [value.encode('utf-8', 'backslashreplace').decode() for value in columns[name]] for name in text}
    with becoming(folder / ROWS) as unfinished:
        pq.write_table(pa.table(columns, schema=SCHEMA), unfinished, compression='zstd')


def read_sample_rows(folder: Path, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a part's table."""
    return pq.read_table(folder / ROWS, columns=list(columns))
