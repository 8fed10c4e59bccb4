"""Rewrite an MDS shard without some of its samples; the others are copied byte for byte and not decoded."""

import json
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from diffusion.errors import DataError, UserError
from diffusion.storage.integrity import find_damage
from diffusion.storage.mds import ShardFormat

KEY = 'key'
"""Column with the key of each sample."""


@dataclass
class _Expected:
    """Size and hashes of a shard in its index entry."""

    bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class RewrittenShard:
    """Result of removing samples from a shard."""

    entry: dict[str, Any] | None
    """Index entry of the new shard; None if no sample is left."""
    removed: int
    """Number of samples that were removed."""
    captions: frozenset[str]
    """Captions of the removed samples."""


def check_shard(path: Path, entry: Mapping[str, Any], where: str) -> None:
    """Check that a shard is intact and can be rewritten.

    Raises:
        DataError: The file has another size or hash than in the index.
        UserError: The shard is compressed, or has columns without keys or of unknown types.
    """
    problem = None
    if entry['zip_data'] is not None:
        problem = 'is compressed and cannot be rewritten; prepare the data again without the images'
    elif KEY not in entry['column_names']:
        problem = f'its samples have no column {KEY!r}, so they cannot be found; prepare the data again'
    elif _format(entry).config()['column_sizes'] != entry['column_sizes']:
        problem = f'has columns of types that cannot be rewritten ({", ".join(entry["column_encodings"])})'
    if problem is not None:
        raise UserError(f'{where}: {problem}')
    damage = find_damage(path, _Expected(entry['raw_data']['bytes'], entry['raw_data']['hashes']))
    if damage is not None:
        raise DataError(f'{where}: {damage}; restore the shard, then start the same command again')


def keys_of(path: Path, entry: Mapping[str, Any]) -> list[str]:
    """Return the keys of the samples of a shard, in order."""
    return [_value(sample, entry, KEY).decode() for sample in _samples(path)]


def rewrite_shard(
    path: Path, entry: Mapping[str, Any], keys: Collection[str], target: Path, *, name: str
) -> RewrittenShard:
    """Write a copy of a shard without the samples with some keys.

    Args:
        keys: Keys of the samples to leave out.
        target: Path of the new file, which must not exist; it is not written if no sample is left.
        name: Name of the new shard in the index.
    """
    shards = _format(entry)
    kept: list[bytes] = []
    captions: set[str] = set()
    removed = 0
    for sample in _samples(path):
        if _value(sample, entry, KEY).decode() not in keys:
            kept.append(sample)
            continue
        removed += 1
        if dict(zip(entry['column_names'], entry['column_encodings'], strict=True)).get('captions') == 'json':
            captions.update(map(str, json.loads(_value(sample, entry, 'captions'))))
    new = shards.write_shard(target, kept, [len(sample) for sample in kept], name=name) if kept else None
    return RewrittenShard(new, removed, frozenset(captions))


def _format(entry: Mapping[str, Any]) -> ShardFormat:
    return ShardFormat(dict(zip(entry['column_names'], entry['column_encodings'], strict=True)), entry['size_limit'])


def _samples(path: Path) -> Iterator[bytes]:
    """Yield the encoded samples of a shard."""
    with path.open('rb') as file:
        (count,) = struct.unpack('<I', file.read(4))
        offsets = struct.unpack(f'<{count + 1}I', file.read(4 * (count + 1)))
        file.seek(offsets[0])
        for start, stop in pairwise(offsets):
            yield file.read(stop - start)


def _value(sample: bytes, entry: Mapping[str, Any], column: str) -> bytes:
    """Return the encoded value of one column of an encoded sample."""
    varying = sum(size is None for size in entry['column_sizes'])
    sizes = iter(struct.unpack_from(f'<{varying}I', sample))
    offset = 4 * varying
    for name, fixed in zip(entry['column_names'], entry['column_sizes'], strict=True):
        size = next(sizes) if fixed is None else fixed
        if name == column:
            return sample[offset : offset + size]
        offset += size
    raise AssertionError(column)
