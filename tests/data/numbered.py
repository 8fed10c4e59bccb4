"""Datasets in which every sample has a unique number, derived from its bytes, to detect wrong content."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from streaming import MDSWriter, Stream

from diffusion.config.image_shapes import square
from diffusion.data.bad_samples import BadSample
from diffusion.data.loader import BucketedLoader
from diffusion.data.shard_cache import home
from diffusion.data.streams import Bucket, BucketedDataset
from diffusion.models import batch_keys

SAMPLES = 60


def payload(index: int, salt: str = '') -> bytes:
    """Return about 700 bytes that are unique to a sample."""
    return b''.join(hashlib.sha256(f'{salt}{index} {part}'.encode()).digest() for part in range(20 + index % 5))


def number(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:6], 'big')


def write_samples(folder: Path, *, salt: str = '', count: int = SAMPLES, bad: frozenset[int] = frozenset(), **settings):
    """Write shards of about ten samples each; the samples in `bad` cannot be decoded."""
    settings = {'hashes': ['sha1', 'xxh64'], 'size_limit': 8192} | settings
    with MDSWriter(out=str(folder), columns={'payload': 'bytes', 'key': 'str'}, **settings) as writer:
        for index in range(count):
            content = b'bad' + payload(index, salt) if index in bad else payload(index, salt)
            writer.write({'payload': content, 'key': f'k{index}'})
    return folder


class Numbers(BucketedDataset):
    def __init__(self, buckets: list[Bucket], **settings: Any) -> None:
        super().__init__(buckets, columns=[('payload',)], seed=3, **settings)

    def item(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        content = sample['payload']
        if content.startswith(b'bad'):
            raise BadSample(f'{self.where(index)}: bad')
        return {'number': number(content)}


def loader_over(
    remote: str | Path | None, local: Path, *, workers: int = 0, loader: dict[str, Any] | None = None, **settings
) -> BucketedLoader:
    """Return a loader with batches of six; `loader` are its own keywords, the rest those of stream and dataset."""
    names = ('download_retry', 'download_timeout', 'validate_hash', 'keep_zip')
    keywords_of_stream = {name: settings.pop(name) for name in names if name in settings}
    stream = Stream(remote=None if remote is None else str(remote), local=str(local), **keywords_of_stream)
    settings = {'elastic': True, 'shuffle': True, 'num_canonical_nodes': 1} | settings
    dataset = Numbers([Bucket('a', stream, square(32))], batch_size=6, **settings)
    prefetch = 2 if workers else None
    keywords: dict[str, Any] = {'timeout': 60} | (loader or {})
    return BucketedLoader(dataset, batch_size=6, num_workers=workers, prefetch_factor=prefetch, **keywords)


def cached_loader(url: str, cache: Path, **settings) -> BucketedLoader:
    return loader_over(url, home(cache, url), cache_folder=str(cache), **settings)


def served(loader: Iterable[Any]) -> dict[int, int]:
    """Return the number of every sample in an epoch by id; a sample served twice must have the same number."""
    found: dict[int, int] = {}
    for batch in loader:
        for index, value in numbers_of(batch).items():
            assert found.setdefault(index, value) == value
    return found


def numbers_of(batch: dict[str, Any]) -> dict[int, int]:
    return dict(zip(batch[batch_keys.SAMPLE_ID].tolist(), batch['number'].tolist(), strict=True))


def expected(salt: str = '', count: int = SAMPLES) -> dict[int, int]:
    return {index: number(payload(index, salt)) for index in range(count)}


def shards_of(reads: Counter[str]) -> dict[str, int]:
    """Return the number of reads by file name, from the number of reads by object key."""
    return {key.rpartition('/')[2]: count for key, count in reads.items()}
