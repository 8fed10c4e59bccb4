"""MDS shards, Streaming's file format, written without Streaming: importing that takes 4 CPU seconds and brings torch.

A shard is its number of samples n, n + 1 offsets, the columns as JSON, then the samples; integers are little-endian.
The tests compare every byte with what Streaming's MDSWriter writes.
"""

import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from diffusion.storage.atomic import becoming, write_whole

HASHES = ('sha1', 'xxh64')
"""Both algorithms that a recipe's `validate_hash` may ask for; Streaming checks one of them."""
INDEX = 'index.json'

_NEW_HASH: dict[str, Callable[[], Any]] = {'sha1': hashlib.sha1, 'xxh64': xxhash.xxh64}
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


@dataclass(frozen=True)
class ShardFormat:
    """The settings that the header of every shard of a dataset repeats.

    Attributes:
        columns: Encodings by column: bytes, str, int, json, ndarray:DTYPE:SIDES (float16:4,8,8) or ndarray:DTYPE, whose
            shape may differ by sample.
        size_limit: Largest size of a shard in bytes; None for no limit.
    """

    columns: Mapping[str, str]
    size_limit: int | None = None

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Return a sample's bytes in a shard: the sizes of the columns whose size varies, then all columns by name."""
        names = sorted(self.columns)
        values = [_encode(self.columns[name], sample[name]) for name in names]
        sizes = [
            len(value) for name, value in zip(names, values, strict=True) if _fixed_size(self.columns[name]) is None
        ]
        return struct.pack(f'<{len(sizes)}I', *sizes) + b''.join(values)

    def decode(self, encoded: bytes) -> dict[str, Any]:
        """Return the sample that `encode` encoded; not for arrays."""
        varying = sum(_fixed_size(encoding) is None for encoding in self.columns.values())
        sizes = iter(struct.unpack_from(f'<{varying}I', encoded))
        sample, at = {}, 4 * varying
        for name in sorted(self.columns):
            size = _fixed_size(self.columns[name]) or next(sizes)
            sample[name] = _DECODE[self.columns[name]](encoded[at : at + size])
            at += size
        return sample

    def cut(self, sizes: np.ndarray) -> Iterator[range]:
        """Yield the samples of each shard: as many as fit by their sizes in bytes, but at least one."""
        assert self.size_limit is not None
        ends = np.concatenate([[0], np.cumsum(sizes.astype(np.int64) + 4)])
        room = self.size_limit - self.header_bytes(0)
        start = 0
        while start < len(sizes):
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + room, side='right')) - 1)
            yield range(start, stop)
            start = stop

    def write_shard(self, path: Path, samples: Iterable[bytes], sizes: Sequence[int], *, name: str) -> dict[str, Any]:
        """Write encoded samples to a new file, through to the disk, and return its entry of the index.

        Args:
            path: The file.
            samples: In order; they may come one by one, so that a shard need not fit into memory.
            sizes: The samples' sizes in bytes.
            name: The file's name in the index.
        """
        header = self._header(sizes)
        hashes = {algorithm: _NEW_HASH[algorithm]() for algorithm in HASHES}
        with path.open('xb') as file:
            for piece in chain([header], samples):
                file.write(piece)
                for each in hashes.values():
                    each.update(piece)
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        assert written == len(header) + sum(sizes), f'{path}: its samples are not of the given sizes'
        digests = {algorithm: each.hexdigest() for algorithm, each in hashes.items()}
        return {
            'samples': len(sizes),
            'raw_data': {'basename': name, 'bytes': written, 'hashes': digests},
            'zip_data': None,
            **self._config(),
        }

    def header_bytes(self, samples: int) -> int:
        """Return the offset of the first sample in a shard of so many."""
        return 4 + 4 * (samples + 1) + len(self._config_bytes())

    def _header(self, sizes: Sequence[int]) -> bytes:
        offsets = np.cumsum([self.header_bytes(len(sizes)), *sizes])
        return struct.pack('<I', len(sizes)) + offsets.astype('<u4').tobytes() + self._config_bytes()

    def _config_bytes(self) -> bytes:
        return json.dumps(self._config(), sort_keys=True).encode()

    def _config(self) -> dict[str, Any]:
        names = sorted(self.columns)
        return {
            'version': 2,
            'format': 'mds',
            'compression': None,
            'hashes': list(HASHES),
            'size_limit': self.size_limit,
            'column_names': names,
            'column_encodings': [self.columns[name] for name in names],
            'column_sizes': [_fixed_size(self.columns[name]) for name in names],
        }


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f'shard.{number:05}.mds'


def index_text(shards: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of index.json."""
    return json.dumps({'version': 2, 'shards': list(shards)}, sort_keys=True)


def write_dataset(folder: Path, samples: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Write samples into a folder as one shard with its index; the samples are held in memory."""
    shards = ShardFormat(columns)
    encoded = [shards.encode(sample) for sample in samples]
    path = folder / shard_name(0)
    with becoming(path) as unfinished:
        entry = shards.write_shard(unfinished, encoded, [len(each) for each in encoded], name=path.name)
    write_whole(folder / INDEX, index_text([entry]))


@functools.cache
def _array_type(encoding: str) -> tuple[np.dtype, tuple[int, ...] | None]:
    """Return the data type and, where it is fixed, the shape of `ndarray:float16:4,8,8`."""
    _, dtype, *sides = encoding.split(':')
    return np.dtype(dtype), tuple(int(side) for side in sides[0].split(',')) if sides else None


@functools.cache
def _fixed_size(encoding: str) -> int | None:
    """Return the bytes of every value of a column, or None where they vary."""
    if not encoding.startswith('ndarray'):
        return _INT_BYTES if encoding == 'int' else None
    dtype, shape = _array_type(encoding)
    return None if shape is None else math.prod(shape) * dtype.itemsize


def _encode(encoding: str, value: Any) -> bytes:
    if not encoding.startswith('ndarray'):
        return _ENCODE[encoding](value)
    dtype, shape = _array_type(encoding)
    assert value.dtype == dtype and value.size and shape in (None, value.shape), f'{value.dtype} {value.shape}'
    if shape is not None:
        return value.tobytes()
    # Sides in the smallest of 1, 2, 4 and 8 bytes; the byte before them holds their count and that choice.
    side = np.min_scalar_type(max(value.shape))
    head = bytes([value.ndim << 2 | side.itemsize.bit_length() - 1])
    return head + np.array(value.shape, side).tobytes() + value.tobytes()
