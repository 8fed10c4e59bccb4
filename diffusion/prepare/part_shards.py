"""Shards and tables of a converted part of the input. They are temporary: final shards are packed from their samples.

If they are in an object store, a preparation needs local disk space only for the image tables and the shards being
written, can resume after losing its disk, and several machines can convert shares of one input without a shared folder.
A part counts as stored once its tables, which are written last as one object, are in the store.
"""

import json
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.errors import DataError, UserError
from diffusion.storage import mds, object_store
from diffusion.storage.places import StorePlace

LOCATION = 'shards.txt'
"""File in a part's folder with the URL of its shards, if they are in an object store."""
GAP_BYTES = 2**20
"""Maximum gap between two samples read with one request: reading the gap is faster than a second request."""
SPAN_BYTES = 2**22
"""Size in bytes at which a request for several samples ends; the next sample is read with a new request."""
REQUESTS = 8
TABLES = 'tables.zip'
"""Object with all files in a part's folder (which contains no shards)."""


class ShardPlace:
    """Destination for a part's shards: the object store folder `url` or, if `url` is None, the part's local folder."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self._folder = folder
        self._store = None if url is None else StorePlace(url, folder)
        if url is not None:
            (folder / LOCATION).write_text(url, encoding='utf-8')

    def writing(self, name: str) -> AbstractContextManager[Path]:
        """Return a context manager with the path for a new shard; if the block succeeds, the shard is stored."""
        return nullcontext(self._folder / name) if self._store is None else self._store.writing(name)


def read_stored(folder: Path, shard: int, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield encoded samples from one shard of a converted part of the input.

    Args:
        offsets: Offset in bytes of each sample after the shard's header, ascending.
        sizes: Size of each sample in bytes.
    """
    name = mds.shard_name(shard)
    # Use the index's modification time as a cache key: this process may have prepared other data in the same folder.
    url, headers = _stored_shards(folder, (folder / mds.INDEX).stat().st_mtime_ns)
    truncated = DataError(f'{folder / name}: was truncated after it was written; remove {folder} and start again')
    if url is None:
        with (folder / name).open('rb') as file:
            begin = mds.first_offset(file)
            for offset, size in zip(offsets, sizes, strict=True):
                file.seek(begin + offset)
                sample = file.read(size)
                if len(sample) != size:
                    raise truncated
                yield sample
        return

    def read(span: tuple[int, int]) -> list[bytes]:
        """Read the samples numbered from span[0] up to, but excluding, span[1] with one request."""
        first, last = span[0], span[1] - 1
        begin, end = offsets[first], offsets[last] + sizes[last]
        try:
            content = object_store.read(f'{url}/{name}', span=(headers[shard] + begin, headers[shard] + end))
        except UserError as error:
            raise UserError(f'{error}; if this object was deleted, remove {folder} and start again') from error
        if len(content) != end - begin:
            raise truncated
        return [content[offsets[each] - begin :][: sizes[each]] for each in range(*span)]

    with ThreadPoolExecutor(REQUESTS) as threads:
        for samples in threads.map(read, pairwise(_cuts(offsets, sizes))):
            yield from samples


def _cuts(offsets: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Group samples into read requests; return the index of each request's first sample, then len(offsets)."""
    cuts = [0]
    for number in range(1, len(offsets)):
        end = offsets[number - 1] + sizes[number - 1]
        if offsets[number] - end > GAP_BYTES or end - offsets[cuts[-1]] >= SPAN_BYTES:
            cuts.append(number)
    return [*cuts, len(offsets)]


def format_of(folder: Path) -> mds.ShardFormat:
    return _entries(folder)[0][0]


@lru_cache(maxsize=64)
def _stored_shards(folder: Path, written: int) -> tuple[str | None, list[int]]:
    """Return (URL, header size of each shard) of a part, or (None, []) if local; `written` only serves as cache key."""
    location = folder / LOCATION
    if not location.exists():
        return None, []
    return location.read_text(encoding='utf-8'), [form.header_bytes(samples) for form, samples in _entries(folder)]


def _entries(folder: Path) -> list[tuple[mds.ShardFormat, int]]:
    """Return (format, number of samples) of each shard of a converted part, from its index."""
    entries = json.loads((folder / mds.INDEX).read_text(encoding='utf-8'))['shards']
    return [(mds.ShardFormat.of_entry(entry), entry['samples']) for entry in entries]


def store_tables(folder: Path, url: str) -> None:
    """Upload a converted part's folder, which has no shards, as one zip file; its shards must already be stored."""
    archive = _beside(folder)
    try:
        with zipfile.ZipFile(archive, 'x') as file:
            for path in sorted(folder.iterdir()):
                file.write(path, path.name)
        object_store.write(f'{url}/{TABLES}', archive)
    finally:
        archive.unlink(missing_ok=True)


def list_stored(url: str) -> dict[str, dict[str, int]]:
    """Return {part folder: {object name: size in bytes}} for all completely stored parts below a URL."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for path, size in StorePlace(url).sizes().items():
        folder, _, name = path.rpartition('/')
        found[folder][name] = size
    return {folder: sizes for folder, sizes in found.items() if TABLES in sizes}


def fetch_tables(url: str, folder: Path, sizes: Mapping[str, int]) -> bool:
    """Download a part's tables to an empty folder; return False if a table, or a shard by its size, is damaged."""
    archive = _beside(folder)
    try:
        object_store.download(f'{url}/{TABLES}', archive)
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
        entries = json.loads((folder / mds.INDEX).read_text(encoding='utf-8'))['shards']
        # Check the shards too: a lifecycle rule of the object store may have deleted them.
        shards = (entry['raw_data'] for entry in entries)
        complete = all(sizes.get(shard['basename']) == shard['bytes'] for shard in shards)
    except (zipfile.BadZipFile, FileNotFoundError, KeyError, json.JSONDecodeError):
        complete = False
    finally:
        archive.unlink(missing_ok=True)
    if not complete:
        for path in folder.iterdir():
            path.unlink()
    return complete


def _beside(folder: Path) -> Path:
    """Return the path of a temporary zip file beside a part's unfinished folder; cleanup after a crash removes both."""
    return folder.with_name(f'{folder.name}.zip')


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
    """One input, as a row in the table of its part; if it was rejected, unknown values stay zero or empty."""

    key: str
    reason: str = ''
    captions: list[str] = field(default_factory=list)
    caption_columns: list[str] = field(default_factory=list)
    width: int = 0
    """Width in pixels of the decoded image before resizing."""
    height: int = 0
    caption_length: int = 0
    exact_hash: int = 0
    perceptual_hash: int = 0
    is_flat: bool = False


@dataclass(frozen=True)
class SampleRow:
    """One stored sample of a part, as a row of the part's table; an image has one sample per bucket that stores it."""

    row: int
    bucket: str
    """Folder of the sample's bucket, such as `512px/640x384`."""
    shard: int
    """Number of the part's shard that contains the sample."""
    offset: int
    """Offset in bytes of the sample in that shard, counted from the end of the header."""
    size: int


def write_tables(folder: Path, inputs: Sequence[InputRow], samples: Sequence[SampleRow]) -> None:
    """Write a converted part's tables to its unfinished folder; the same rows always give the same bytes."""
    _write(folder / INPUTS, inputs, INPUT_SCHEMA)
    _write(folder / SAMPLES, samples, SAMPLE_SCHEMA)


def read_inputs(folder: Path, columns: Sequence[str]) -> pa.Table:
    return pq.read_table(folder / INPUTS, columns=list(columns))


def read_samples(folder: Path) -> pa.Table:
    return pq.read_table(folder / SAMPLES)


def _write(path: Path, rows: Sequence[Any], schema: pa.Schema) -> None:
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    # File names and JSON may contain lone surrogates, which Arrow rejects because they are not valid UTF-8.
    text = [name for name in schema.names if schema.field(name).type == pa.string()]
    columns |= {name: [value.encode('utf-8', 'backslashreplace').decode() for value in columns[name]] for name in text}
    pq.write_table(pa.table(columns, schema=schema), path, compression='zstd')
