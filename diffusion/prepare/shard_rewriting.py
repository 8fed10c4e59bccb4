"""Rewrite MDS shards without some of their samples; all other samples are copied as bytes, not decoded.

If shards have no record (`dataset_record`), as for latents, all are read to find the samples to remove. Shards that
contain such samples are rewritten under new names, the index is replaced, and the old shards are deleted.
"""

import hashlib
import json
import logging
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import DataError, UserError
from diffusion.storage import mds
from diffusion.storage.caption_tables import joined, number_of, rewrite_tables
from diffusion.storage.mds import ShardFormat, find_damage
from diffusion.storage.places import Place, Versioned, place_at
from diffusion.storage.retry import PreconditionFailed

KEY = 'key'


@dataclass(frozen=True)
class _Expected:
    """Size and hashes of a shard according to its index entry."""

    bytes: int
    hashes: dict[str, str]


def check_shard(path: Path, entry: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a shard cannot be rewritten, or DataError if its size or hash is not that in the index."""
    problem = None
    if entry['zip_data'] is not None:
        problem = 'is compressed, which this command cannot read; prepare the data again'
    elif KEY not in entry['column_names']:
        problem = f'its samples have no column {KEY!r}; prepare the data again'
    elif ShardFormat.of_entry(entry).config()['column_sizes'] != entry['column_sizes']:
        problem = f'has columns of types that this command cannot read ({", ".join(entry["column_encodings"])})'
    if problem is not None:
        raise UserError(f'{where}: {problem}')
    damage = find_damage(path, _Expected(entry['raw_data']['bytes'], entry['raw_data']['hashes']))
    if damage is not None:
        raise DataError(f'{where}: {damage}; restore the shard, then start the same command again')


def keys_of(path: Path, entry: Mapping[str, Any]) -> list[str]:
    return [_value(sample, entry, KEY).decode() for sample in encoded_samples(path)]


def rewrite_shards(
    folder: Place,
    name: str,
    entries: Iterable[dict[str, Any]],
    holding: Collection[str],
    keys: Collection[str],
    *,
    scratch: Path,
    token: str,
) -> tuple[list[dict[str, Any]], list[str], set[str]]:
    """Copy the shards whose file names are in `holding` under new names, without the samples with one of the keys.

    Return the new index entries of the whole folder, the paths of the old shards, and the removed samples' captions.
    """
    new: list[dict[str, Any]] = []
    old: list[str] = []
    captions: set[str] = set()
    for entry in entries:
        file = entry['raw_data']['basename']
        if file not in holding:
            new.append(entry)
            continue
        path = folder.fetch(joined(name, file))
        check_shard(path, entry, f'{folder}/{joined(name, file)}')
        target = scratch / 'new' / f'{number_of(file)}.{token}.mds'
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        rewritten, of_removed = rewrite_shard(path, entry, keys, target)
        if rewritten is not None:
            folder.put(joined(name, target.name), target)
            new.append(rewritten)
        if path.is_relative_to(scratch):  # the shard was downloaded
            path.unlink()
        old.append(joined(name, file))
        captions |= of_removed
    return new, old, captions


def rewrite_shard(
    path: Path, entry: Mapping[str, Any], keys: Collection[str], target: Path
) -> tuple[dict[str, Any] | None, set[str]]:
    """Copy a shard to a new file without the samples that have one of the keys; write no file if no sample is left.

    Return the new shard's index entry (None if no sample is left), and the captions of the removed samples.
    """
    kept: list[bytes] = []
    captions: set[str] = set()
    shards = ShardFormat.of_entry(entry)
    for sample in encoded_samples(path):
        if _value(sample, entry, KEY).decode() not in keys:
            kept.append(sample)
        elif shards.columns.get('captions') == 'json':
            captions.update(map(str, json.loads(_value(sample, entry, 'captions'))))
    if not kept:
        return None, captions
    return shards.write_shard(target, kept, [len(sample) for sample in kept], name=target.name), captions


def encoded_samples(path: Path) -> Iterator[bytes]:
    """Yield the samples of a shard file in order, as `ShardFormat.encode` encoded them."""
    with path.open('rb') as file:
        (count,) = struct.unpack('<I', file.read(4))
        offsets = struct.unpack(f'<{count + 1}I', file.read(4 * (count + 1)))
        file.seek(offsets[0])
        for start, stop in pairwise(offsets):
            yield file.read(stop - start)


def _value(sample: bytes, entry: Mapping[str, Any], column: str) -> bytes:
    """Return the encoded value of one column in an encoded sample."""
    varying = sum(size is None for size in entry['column_sizes'])
    sizes = iter(struct.unpack_from(f'<{varying}I', sample))
    offset = 4 * varying
    for name, fixed in zip(entry['column_names'], entry['column_sizes'], strict=True):
        size = next(sizes) if fixed is None else fixed
        if name == column:
            return sample[offset : offset + size]
        offset += size
    raise AssertionError(column)


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScannedFolder:
    """Folder of shards, with the samples to remove from each shard."""

    name: str
    """Path relative to the dataset; empty for the dataset itself."""
    index: Versioned
    """Content and version of its index.json."""
    holding: dict[str, list[str]] = field(default_factory=dict)
    """Shards that contain samples to remove, by file name, with the keys of these samples."""

    def path(self, file: str) -> str:
        return joined(self.name, file)

    @property
    def entries(self) -> list[dict[str, Any]]:
        return json.loads(self.index.content)['shards']


def scan(folder: Place, place: str, keys: Collection[str], scratch: Path) -> list[ScannedFolder]:
    """Search all folders of shards at a path or URL for samples that have one of the keys."""
    found = indexed_folders(folder, place)
    if not found:
        raise UserError(f'{place}: has no {mds.INDEX}, so it is not a dataset; give the folder of one')
    for each in found:
        for entry in tqdm(each.entries, desc=each.name or place, unit='shard', disable=None):
            file = entry['raw_data']['basename']
            path = folder.fetch(each.path(file))
            check_shard(path, entry, f'{folder}/{each.path(file)}')
            if holding := [key for key in keys_of(path, entry) if key in keys]:
                each.holding[file] = holding
            elif path.is_relative_to(scratch):
                path.unlink()  # removes the downloaded copy of a shard without such samples
    return found


def remove_scanned(
    folder: Place, scanned: Collection[ScannedFolder], keys: Collection[str], scratch: Path
) -> list[str]:
    """Rewrite shards that contain samples to remove, replace indexes, and return the old shards' paths, to delete."""
    old: list[str] = []
    for each in scanned:
        if not each.holding:
            continue
        # The names of new shards depend only on the index and the keys, so that a removal restarted after being killed
        # writes the same files. Nothing refers to them until the index is replaced.
        token = hashlib.sha256(each.index.content + '\0'.join(sorted(keys)).encode()).hexdigest()[:8]
        entries, rewritten, _ = rewrite_shards(
            folder, each.name, each.entries, each.holding, keys, scratch=scratch, token=token
        )
        old += rewritten
        before = [entry for entry in each.entries if entry['raw_data']['basename'] in each.holding]
        tables = rewrite_tables(folder, each.name, before, entries, keys)
        try:
            folder.replace(each.path(mds.INDEX), mds.index_text(entries).encode(), each.index.version)
        except PreconditionFailed as error:
            raise UserError(f'{error}; when the other process has ended, start the same command again') from error
        folder.delete(tables)
        update_bucket_list(folder, each, entries)
    return old


def superseded(folder: Place, place: str) -> list[str]:
    """Return the paths of old shards left by a killed removal; indexes already list their replacements."""
    left = []
    for each in indexed_folders(folder, place):
        names = {entry['raw_data']['basename'] for entry in each.entries}
        rewritten = {number_of(file) for file in names if len(file.split('.')) == 4}
        files = {path.rpartition('/')[2] for path in folder.sizes() if path.rpartition('/')[0] == each.name}
        old = {file for file in files - names if file.endswith('.mds') and number_of(file) in rewritten}
        left += [each.path(file) for file in sorted(old)]
    return left


def index_folders(place: str) -> list[str]:
    """Return the relative paths of all folders of shards at a path or URL, sorted."""
    return sorted(path.rpartition('/')[0] for path in place_at(place).sizes() if path.rpartition('/')[2] == mds.INDEX)


def update_bucket_list(folder: Place, scanned: ScannedFolder, entries: list[dict[str, Any]]) -> None:
    """Update a bucket's counts in the parent folder's buckets.json, if it exists."""
    above, _, shape = scanned.name.rpartition('/')
    name = f'{above}/{BUCKETS}' if above else BUCKETS
    while (found := folder.read_version(name)) is not None:
        content = json.loads(found.content)
        counts = {
            'samples': sum(entry['samples'] for entry in entries),
            'bytes': sum(entry['raw_data']['bytes'] for entry in entries),
        }
        bucket = content.get('buckets', {}).get(shape)
        if bucket is None:
            return
        content['buckets'][shape] = {key: counts.get(key, value) for key, value in bucket.items()}
        try:
            folder.replace(name, (json.dumps(content, indent=2) + '\n').encode(), found.version)
            return
        except PreconditionFailed:
            continue


def indexed_folders(folder: Place, place: str) -> list[ScannedFolder]:
    """Return all folders of shards at a path or URL, sorted, with their indexes; no samples are to be removed."""
    found = []
    for name in index_folders(place):
        index = folder.read_version(joined(name, mds.INDEX))
        assert index is not None, 'it was listed'
        found.append(ScannedFolder(name, index))
    return found
