"""Cache of shards shared by the jobs of a machine, or of several machines on a file system that all mount.

Layout of a cache folder, which all jobs that use it follow:

    .used_bytes.json                      total size of the shards, if a job limits it (cache_budget.py)
    bucket-laion-512-1f0c8a6e2b7d/        one dataset: the end of its URL and a hash of the URL
        index.json                        the newest index seen
        9d3c1e44a0b2f715/                 the shards of one version of the dataset, by the hash of its index; if the
            index.json                    dataset is rewritten while jobs read it, old and new shards are never mixed
            shard.00000.mds
            as/photos -> ..               Streaming requires a folder per stream

A shard may be evicted while a process reads it: an open file stays readable, and the next read finds the shard missing
and downloads it again.
"""

import contextlib
import hashlib
import os
import re
import time
from pathlib import Path

from diffusion.storage import atomic

INDEX = 'index.json'
VERSION = re.compile(r'/[0-9a-f]{16}/')
"""Pattern of the version folder in the path of a cached shard."""


def home(cache: Path, remote: str) -> Path:
    """Return the path inside the folder `cache` that holds the cached dataset of the URL `remote`."""
    readable = re.sub(r'[^A-Za-z0-9]+', '-', remote.partition('://')[2] or remote).strip('-')[-40:]
    return cache / f'{readable}-{hashlib.sha256(remote.rstrip("/").encode()).hexdigest()[:12]}'


def version(home: Path, digest: str, stream: str) -> Path:
    """Return the cache folder of one version of a dataset, for a stream to use as its local folder.

    A dataset that is rewritten at the same URL gets another version, identified by the hash of its index.

    Args:
        home: The dataset's folder in the cache.
        digest: SHA-256 of the version's index, in hexadecimal.
    """
    # StreamingDataset refuses two streams with the same local folder, so each stream gets a symbolic link of its own to
    # the version's folder.
    return home / digest[:16] / 'as' / re.sub(r'[^A-Za-z0-9._-]+', '_', stream)


def create_version(home: Path, digest: str, stream: str) -> Path:
    """Create the cache folder of one version of a dataset, the local folder of a stream, and return its path."""
    alias = version(home, digest, stream)
    alias.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        alias.symlink_to('..', target_is_directory=True)
    return alias


def write_if_changed(path: Path, content: bytes) -> None:
    """Replace a small file atomically, unless it already has this content."""
    if path.exists() and path.read_bytes() == content:
        return
    atomic.write_atomically(path, content)


def touch(path: str | Path) -> None:
    """Set the access time of a cached shard to now, so that the cache evicts other shards first."""
    # File systems update it once per day (relatime) or never (noatime). Keep the modification time: it is part of the
    # signature that shows whether a shard has changed since it was checked.
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
