"""Remove samples by key from MDS shards that have no record (`dataset_record`), such as latents.

All shards are read to find the keys. Those that hold one are rewritten under new names, the index is replaced, and the
old shards are deleted.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import UserError
from diffusion.prepare.shard_rewriting import check_shard, keys_of, rewrite_shard
from diffusion.storage import mds
from diffusion.storage.places import Place, Versioned, place_at
from diffusion.storage.retry import PreconditionFailed

log = logging.getLogger(__name__)


@dataclass
class ScannedFolder:
    """Folder of shards, and the shards that hold samples to remove."""

    name: str
    """Path relative to the dataset; empty for the dataset itself."""
    index: Versioned
    """Content of its index.json."""
    holding: dict[str, int] = field(default_factory=dict)
    """Number of samples to remove by the file name of the shard."""

    def path(self, file: str) -> str:
        """Return the path of a file of the folder, relative to the dataset."""
        return f'{self.name}/{file}' if self.name else file

    @property
    def entries(self) -> list[dict[str, Any]]:
        """Index entries of all shards."""
        return json.loads(self.index.content)['shards']


def scan(folder: Place, place: str, keys: Collection[str], scratch: Path) -> list[ScannedFolder]:
    """Find the samples with some keys in all folders of shards at a path or URL.

    Raises:
        UserError: There are no shards, or they cannot be rewritten.
        DataError: A shard is damaged.
    """
    found = []
    for name in index_folders(place):
        each = ScannedFolder(name, Versioned(b'', ''))
        index = folder.read_version(each.path(mds.INDEX))
        assert index is not None, 'it was listed'
        each.index = index
        for entry in tqdm(each.entries, desc=name or place, unit='shard', disable=None):
            file = entry['raw_data']['basename']
            path = folder.fetch(each.path(file))
            check_shard(path, entry, f'{folder}/{each.path(file)}')
            count = sum(key in keys for key in keys_of(path, entry))
            if count:
                each.holding[file] = count
            elif path.is_relative_to(scratch):
                path.unlink()  # a copy that is not needed any more
        found.append(each)
    if not found:
        raise UserError(f'{place}: has no {mds.INDEX}, so it is not a dataset; give the folder of one')
    return found


def found_keys(folder: Place, scanned: Collection[ScannedFolder], keys: Collection[str]) -> set[str]:
    """Return those of the keys that some sample has."""
    found: set[str] = set()
    for each in scanned:
        for entry in each.entries:
            file = entry['raw_data']['basename']
            if file in each.holding:
                found |= set(keys_of(folder.fetch(each.path(file)), entry)) & set(keys)
    return found


def remove_scanned(
    folder: Place, scanned: Collection[ScannedFolder], keys: Collection[str], scratch: Path
) -> list[str]:
    """Rewrite the shards that hold samples to remove and replace the indexes; return the paths of the old shards.

    Raises:
        UserError: Another process has changed an index since it was scanned.
    """
    old: list[str] = []
    for each in scanned:
        if not each.holding:
            continue
        # The names of new shards follow from the index and the keys, so that a killed removal which is started again
        # writes the same files. Nothing refers to them until the index is replaced.
        token = hashlib.sha256(each.index.content + '\0'.join(sorted(keys)).encode()).hexdigest()[:8]
        entries = []
        for entry in each.entries:
            file = entry['raw_data']['basename']
            if file not in each.holding:
                entries.append(entry)
                continue
            target = scratch / 'new' / f'{".".join(file.split(".")[:2])}.{token}.mds'
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            source = folder.fetch(each.path(file))
            done = rewrite_shard(source, entry, keys, target, name=target.name)
            if done.entry is not None:
                folder.put(each.path(target.name), target)
                entries.append(done.entry)
            old.append(each.path(file))
        try:
            folder.replace(each.path(mds.INDEX), mds.index_text(entries).encode(), each.index.version)
        except PreconditionFailed as error:
            raise UserError(f'{error}; start the same command again when it has ended') from error
        _update_bucket_list(folder, each, entries)
    return old


def superseded(folder: Place, place: str) -> list[str]:
    """Return the paths of old shards that a killed removal has left; an index already lists their replacements."""
    left = []
    for name in index_folders(place):
        each = ScannedFolder(name, Versioned(b'', ''))
        index = folder.read_version(each.path(mds.INDEX))
        assert index is not None, 'it was listed'
        names = {entry['raw_data']['basename'] for entry in json.loads(index.content)['shards']}
        rewritten = {'.'.join(file.split('.')[:2]) for file in names if len(file.split('.')) == 4}
        files = {path.rpartition('/')[2] for path in folder.sizes() if path.rpartition('/')[0] == name}
        old = {file for file in files - names if file.endswith('.mds') and '.'.join(file.split('.')[:2]) in rewritten}
        left += [each.path(file) for file in sorted(old)]
    return left


def index_folders(place: str) -> list[str]:
    """Return the relative paths of all folders of shards at a path or URL, sorted."""
    return sorted(path.rpartition('/')[0] for path in place_at(place).sizes() if path.rpartition('/')[2] == mds.INDEX)


def _update_bucket_list(folder: Place, scanned: ScannedFolder, entries: list[dict[str, Any]]) -> None:
    """Correct the counts of a bucket in the buckets.json of the folder above it, if there is one."""
    above, _, shape = scanned.name.rpartition('/')
    name = f'{above}/{BUCKETS}' if above else BUCKETS
    while (found := folder.read_version(name)) is not None:
        content = json.loads(found.content)
        counts = Counter(
            {
                'samples': sum(entry['samples'] for entry in entries),
                'bytes': sum(entry['raw_data']['bytes'] for entry in entries),
            }
        )
        bucket = content.get('buckets', {}).get(shape)
        if bucket is None:
            return
        content['buckets'][shape] = {key: counts.get(key, value) for key, value in bucket.items()}
        try:
            folder.replace(name, (json.dumps(content, indent=2) + '\n').encode(), found.version)
            return
        except PreconditionFailed:
            continue
