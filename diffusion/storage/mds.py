"""Write MDS shards (Streaming's file format) without importing Streaming, and check shard files for damage.

A shard consists of the number of samples n, n + 1 offsets, the columns as JSON, and the samples; integers are
little-endian. Tests compare every byte with the output of Streaming's MDSWriter.
"""

# Do not use MDSWriter itself: importing Streaming takes 4 CPU seconds per process and imports torch.

import functools
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash

from diffusion.errors import UserError
from diffusion.storage.atomic import atomic_file, write_atomically

HASHES = ('sha1', 'xxh64')
"""Hash algorithms for each shard; Streaming checks one of them, which can be selected with `validate_hash`."""
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
    """Columns and size limit of a dataset's shards, stored in the header of each shard.

    Attributes:
        columns: Encoding of each column: bytes, str, int, json, ndarray:DTYPE:SHAPE (ndarray:float16:4,8,8), or
            ndarray:DTYPE for arrays whose shape may differ between samples.
        size_limit: Maximum size of a shard in bytes; None means no limit.
    """

    columns: Mapping[str, str]
    size_limit: int | None = None

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> 'ShardFormat':
        """Return the format in a shard's index entry; the inverse of `config`."""
        return cls(dict(zip(entry['column_names'], entry['column_encodings'], strict=True)), entry['size_limit'])

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """Encode a sample for a shard: sizes of variable-size columns, then all values sorted by column name."""
        names = sorted(self.columns)
        values = [_encode(self.columns[name], sample[name]) for name in names]
        sizes = [
            len(value) for name, value in zip(names, values, strict=True) if _fixed_size(self.columns[name]) is None
        ]
        return struct.pack(f'<{len(sizes)}I', *sizes) + b''.join(values)

    def decode(self, encoded: bytes) -> dict[str, Any]:
        """Decode a sample encoded by `encode`; array columns are not supported."""
        varying = sum(_fixed_size(encoding) is None for encoding in self.columns.values())
        sizes = iter(struct.unpack_from(f'<{varying}I', encoded))
        sample, offset = {}, 4 * varying
        for name in sorted(self.columns):
            size = _fixed_size(self.columns[name]) or next(sizes)
            sample[name] = _DECODE[self.columns[name]](encoded[offset : offset + size])
            offset += size
        return sample

    def cut(self, sizes: np.ndarray) -> Iterator[range]:
        """Yield each shard's range of sample indices, given the samples' sizes in bytes.

        A sample above the limit gets a shard of its own.
        """
        assert self.size_limit is not None
        # Each sample takes 4 more bytes for its offset.
        ends = np.concatenate([[0], np.cumsum(sizes.astype(np.int64) + 4)])
        room = self.size_limit - self.header_bytes(0)
        start = 0
        while start < len(sizes):
            stop = max(start + 1, int(np.searchsorted(ends, ends[start] + room, side='right')) - 1)
            yield range(start, stop)
            start = stop

    def write_shard(self, path: Path, samples: Iterable[bytes], sizes: Sequence[int], *, name: str) -> dict[str, Any]:
        """Write encoded samples to a new shard file, flush it to disk, and return its entry for index.json.

        The samples may come from a generator, so that a shard need not fit in memory. Their sizes in bytes are needed
        in advance, since the header contains offsets. `name` is the file name in the entry.
        """
        header = self._header(sizes)
        hashes = {algorithm: _NEW_HASH[algorithm]() for algorithm in HASHES}
        with path.open('xb') as file:
            for piece in chain([header], samples):
                file.write(piece)
                for digest in hashes.values():
                    digest.update(piece)
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        assert written == len(header) + sum(sizes), f'{path}: the samples do not have the given sizes'
        digests = {algorithm: digest.hexdigest() for algorithm, digest in hashes.items()}
        return {
            'samples': len(sizes),
            'raw_data': {'basename': name, 'bytes': written, 'hashes': digests},
            'zip_data': None,
            **self.config(),
        }

    def header_bytes(self, samples: int) -> int:
        return 4 + 4 * (samples + 1) + len(self._config_bytes())

    def _header(self, sizes: Sequence[int]) -> bytes:
        offsets = np.cumsum([self.header_bytes(len(sizes)), *sizes])
        assert offsets[-1] < 2**32, 'offsets in a shard have 32 bits'
        return struct.pack('<I', len(sizes)) + offsets.astype('<u4').tobytes() + self._config_bytes()

    def _config_bytes(self) -> bytes:
        return json.dumps(self.config(), sort_keys=True).encode()

    def config(self) -> dict[str, Any]:
        """Describe the shard format for headers and index entries, with Streaming's keys."""
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


def first_offset(file: BinaryIO) -> int:
    """Return the offset in bytes of the first sample in a shard file, which is the size of the shard's header."""
    return struct.unpack('<2I', file.read(8))[1]


def shard_name(number: int, token: str = '') -> str:
    """Return the file name of the shard with this number, such as shard.00007.mds, or shard.00007.1f0c8a6e.mds."""
    return f'shard.{number:05}.{token}.mds' if token else f'shard.{number:05}.mds'


def index_text(shards: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of index.json for a dataset with these entries, one per shard."""
    return json.dumps({'version': 2, 'shards': list(shards)}, sort_keys=True)


def first_samples(folder: Path, count: int) -> list[dict[str, Any]]:
    """Return up to `count` samples from the beginning of a dataset's first shard that has any.

    The list is empty if the index or the shard is missing, or if the shard is compressed or has columns that
    `ShardFormat.decode` does not support. Raise ValueError if index or shard is damaged, or if no shard has samples.
    """
    try:
        entry = next(each for each in json.loads((folder / INDEX).read_bytes())['shards'] if each['samples'])
        shards = ShardFormat.of_entry(entry)
        if entry['zip_data'] is not None or not set(shards.columns.values()) <= _DECODE.keys():
            return []
        with (folder / entry['raw_data']['basename']).open('rb') as file:
            count = min(count, *struct.unpack('<I', file.read(4)))
            offsets = struct.unpack(f'<{count + 1}I', file.read(4 * (count + 1)))
            file.seek(offsets[0])
            return [shards.decode(file.read(stop - start)) for start, stop in pairwise(offsets)]
    except OSError:
        return []
    except (KeyError, TypeError, struct.error, StopIteration) as error:
        raise ValueError(f'{folder}: {type(error).__name__}: {error}') from error


def write_dataset(folder: Path, samples: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Write samples to a folder as an MDS dataset with one shard; all samples are held in memory."""
    shards = ShardFormat(columns)
    encoded = [shards.encode(sample) for sample in samples]
    path = folder / shard_name(0)
    with atomic_file(path) as unfinished:
        entry = shards.write_shard(unfinished, encoded, [len(each) for each in encoded], name=path.name)
    write_atomically(folder / INDEX, index_text([entry]))


@functools.cache
def _array_type(encoding: str) -> tuple[np.dtype, tuple[int, ...] | None]:
    """Return data type and shape (None if variable) of an encoding such as `ndarray:float16:4,8,8`."""
    _, dtype, *sides = encoding.split(':')
    return np.dtype(dtype), tuple(int(side) for side in sides[0].split(',')) if sides else None


@functools.cache
def _fixed_size(encoding: str) -> int | None:
    """Return the size in bytes of a value with this encoding, or None if the size varies."""
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
    # Streaming's layout: one byte with the number of dimensions (upper 6 bits) and log2 of the integer size (lower 2
    # bits), then the shape in the smallest unsigned integers (1, 2, 4 or 8 bytes) that can represent it.
    integer = np.min_scalar_type(max(value.shape))
    head = bytes([value.ndim << 2 | integer.itemsize.bit_length() - 1])
    return head + np.array(value.shape, integer).tobytes() + value.tobytes()


FASTEST_FIRST = ('xxh3_64', 'xxh3_128', 'xxh64', 'xxh128', 'xxh32', 'sha1', 'sha256', 'blake2b', 'sha512', 'md5')
"""Hash algorithms by speed, in GB/s on one core: xxh3 10.8, xxh64 7.7, sha1 1.7, sha256 1.1, blake2b and md5 0.5."""
CHUNK = 2**20


class FileInfo(Protocol):
    """Protocol for a file's size and hashes from an index.json; satisfied by Streaming's class of the same name."""

    @property
    def bytes(self) -> int: ...

    @property
    def hashes(self) -> dict[str, str]: ...


def algorithm_for(hashes: Collection[str], demanded: str | None = None) -> str | None:
    """Return the hash algorithm for a check: `demanded`, else the fastest in `hashes`, or None if none is known.

    Raise UserError if the `demanded` one is not in `hashes`.
    """
    if demanded is not None:
        if demanded not in hashes:
            raise UserError(
                f'validate_hash: the shards have no {demanded} hash, only {", ".join(sorted(hashes)) or "sizes"}; '
                'remove it to use the fastest available hash'
            )
        return demanded
    return next((name for name in FASTEST_FIRST if name in hashes), None)


def find_damage(path: Path, expected: FileInfo, demanded: str | None = None) -> str | None:
    """Return what is wrong with a file's size or hash, such as `8190 bytes, expected 8192`; None if both are right."""
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f'{size} bytes, expected {expected.bytes}'
        algorithm = algorithm_for(expected.hashes, demanded)
        if algorithm is None:
            return None
        found = hash_of(path, algorithm)
    except FileNotFoundError:
        return 'the file does not exist'
    wanted = expected.hashes[algorithm]
    return None if found == wanted else f'{algorithm} {found}, expected {wanted}'


def hash_of(path: Path, algorithm: str) -> str:
    digest = getattr(xxhash, algorithm)() if algorithm in xxhash.algorithms_available else hashlib.new(algorithm)
    # Read unbuffered into one buffer, to avoid an allocation and a second copy per chunk.
    chunk = memoryview(bytearray(CHUNK))
    with path.open('rb', buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def file_signature(path: str | Path) -> int:
    """Return a nonzero integer that changes when a file is modified or replaced."""
    status = os.stat(path)
    # Hashes of integers do not depend on PYTHONHASHSEED, so they are the same in every process.
    return hash((status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)) & 2**64 - 1 | 1
