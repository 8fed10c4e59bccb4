"""Check of a shard's file against the index of its dataset: its size, and its hash if the index has one."""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import xxhash

from diffusion.errors import UserError

FASTEST_FIRST = ('xxh3_64', 'xxh3_128', 'xxh64', 'xxh128', 'xxh32', 'sha1', 'sha256', 'blake2b', 'sha512', 'md5')
"""GB/s on one core, measured from the page cache: xxh3 10.8, xxh64 7.7, sha1 1.7, sha256 1.1, blake2b and md5 0.5."""
CHUNK = 2**20


class FileInfo(Protocol):
    """Protocol for a file's size and hashes in an index.json; Streaming's class of the same name satisfies it."""

    bytes: int
    hashes: dict[str, str]


def algorithm_for(hashes: Collection[str], demanded: str | None = None) -> str | None:
    """Return the hash algorithm to check a file with: `demanded`, or the fastest in `hashes`; None if none is known.

    Raises:
        UserError: `demanded` is not among the available hashes.
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
    """Return a description of the damage to a file, such as `8190 bytes, expected 8192`; None if it is intact."""
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
    """Return the hexadecimal hash of a file's content."""
    digest = _hasher(algorithm)
    # Read unbuffered into one buffer, which avoids an allocation and a second copy per chunk.
    chunk = memoryview(bytearray(CHUNK))
    with path.open('rb', buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
    return digest.hexdigest()


def file_signature(path: str | Path) -> int:
    """Return an integer that changes when a file is modified or replaced, and is never 0.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    status = os.stat(path)
    # A hash of integers does not depend on PYTHONHASHSEED, so it is the same in every process.
    return hash((status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)) & 2**64 - 1 | 1


def _hasher(algorithm: str) -> Any:
    """Return a new hash object for an algorithm of xxhash or hashlib."""
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, algorithm)()
    return hashlib.new(algorithm)
