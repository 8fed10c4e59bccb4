"""MDS shards, Streaming's file format, written without Streaming: importing that takes 4 CPU seconds and brings torch.

A shard is its number of samples n, n + 1 offsets, the columns as JSON, then the samples; integers are little-endian.
The tests compare every byte with what Streaming's MDSWriter writes.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

COLUMNS = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str', 'metadata': 'json'}
"""What a prepared sample holds; width and height are those of the stored image, in pixels."""
HASHES = ('sha1', 'xxh64')
"""Both that a recipe's `validate_hash` may ask for; Streaming checks one of them."""
INDEX = 'index.json'

_NEW_HASH: dict[str, Callable[[], Any]] = {'sha1': hashlib.sha1, 'xxh64': xxhash.xxh64}
_NAMES = sorted(COLUMNS)
_INT_BYTES = 8
_ENCODE: dict[str, Callable[[Any], bytes]] = {
    'bytes': bytes,
    'str': str.encode,
    'int': lambda value: int(value).to_bytes(_INT_BYTES, 'little', signed=True),
    'json': lambda value: json.dumps(value).encode(),
}
_DECODE: dict[str, Callable[[bytes], Any]] = {
    'bytes': bytes,
    'str': bytes.decode,
    'int': lambda data: int.from_bytes(data, 'little', signed=True),
    'json': json.loads,
}


def encode_sample(sample: Mapping[str, Any]) -> bytes:
    """A sample's bytes in a shard: the sizes of the columns whose size varies, then all columns by name."""
    values = [_ENCODE[COLUMNS[name]](sample[name]) for name in _NAMES]
    sizes = [len(value) for name, value in zip(_NAMES, values, strict=True) if COLUMNS[name] != 'int']
    return struct.pack(f'<{len(sizes)}I', *sizes) + b''.join(values)


def decode_sample(encoded: bytes) -> dict[str, Any]:
    """What `encode_sample` encoded."""
    varying = sum(encoding != 'int' for encoding in COLUMNS.values())
    sizes = iter(struct.unpack_from(f'<{varying}I', encoded))
    sample, at = {}, 4 * varying
    for name in _NAMES:
        size = _INT_BYTES if COLUMNS[name] == 'int' else next(sizes)
        sample[name] = _DECODE[COLUMNS[name]](encoded[at : at + size])
        at += size
    return sample


def cut(sizes: np.ndarray, *, size_limit: int) -> Iterator[range]:
    """Which samples share a shard: each takes as many as fit into `size_limit` bytes, but at least one."""
    ends = np.concatenate([[0], np.cumsum(sizes.astype(np.int64) + 4)])
    room = size_limit - _overhead(size_limit)
    start = 0
    while start < len(sizes):
        stop = max(start + 1, int(np.searchsorted(ends, ends[start] + room, side='right')) - 1)
        yield range(start, stop)
        start = stop


def write_shard(
    path: Path, samples: Iterable[bytes], sizes: Sequence[int], *, name: str, size_limit: int
) -> dict[str, Any]:
    """Write encoded samples to a new file, through to the disk, and return what the index says of it.

    Args:
        path: The file.
        samples: In order; they may come one by one, so that a shard need not fit into memory.
        sizes: Of each, in bytes.
        name: Of the file in the index.
        size_limit: What the index says about the largest size of a shard, in bytes.
    """
    hashes = {algorithm: _NEW_HASH[algorithm]() for algorithm in HASHES}
    with path.open('xb') as file:
        for piece in chain([_header(sizes, size_limit)], samples):
            file.write(piece)
            for each in hashes.values():
                each.update(piece)
        written = file.tell()
        file.flush()
        os.fsync(file.fileno())
    assert written == len(_header(sizes, size_limit)) + sum(sizes), f'{path}: its samples are not of the given sizes'
    digests = {algorithm: each.hexdigest() for algorithm, each in hashes.items()}
    return {
        'samples': len(sizes),
        'raw_data': {'basename': name, 'bytes': written, 'hashes': digests},
        'zip_data': None,
        **_config(size_limit),
    }


def shard_name(number: int) -> str:
    return f'shard.{number:05}.mds'


def header_bytes(samples: int, *, size_limit: int) -> int:
    """How far into a shard of so many samples the first one begins."""
    return 4 * samples + _overhead(size_limit)


def index_text(shards: Sequence[Mapping[str, Any]]) -> str:
    """The content of index.json."""
    return json.dumps({'version': 2, 'shards': list(shards)}, sort_keys=True)


def _header(sizes: Sequence[int], size_limit: int) -> bytes:
    offsets = np.cumsum([header_bytes(len(sizes), size_limit=size_limit), *sizes])
    return struct.pack('<I', len(sizes)) + offsets.astype('<u4').tobytes() + _config_bytes(size_limit)


def _overhead(size_limit: int) -> int:
    """Bytes of a shard without samples."""
    return 4 + 4 + len(_config_bytes(size_limit))


def _config_bytes(size_limit: int) -> bytes:
    return json.dumps(_config(size_limit), sort_keys=True).encode()


def _config(size_limit: int) -> dict[str, Any]:
    return {
        'version': 2,
        'format': 'mds',
        'compression': None,
        'hashes': list(HASHES),
        'size_limit': size_limit,
        'column_names': _NAMES,
        'column_encodings': [COLUMNS[name] for name in _NAMES],
        'column_sizes': [_INT_BYTES if COLUMNS[name] == 'int' else None for name in _NAMES],
    }
