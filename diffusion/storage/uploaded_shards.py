"""Numbered shards on their way into an object store; like `ShardStore`, but each is uploaded and its copy removed."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from diffusion.storage.object_store import Object, download, list_objects, split, upload
from diffusion.storage.shard_store import PLAN, ShardStore

BEGUN = 'unfinished'
"""Sub-folder of what going on needs: the plan and the shards' entries. Streaming reads none of it."""
DOWNLOADS = 16
"""Entries fetched at once, to merge them."""


class UploadedShards(ShardStore):
    """Shards that several processes upload, on nodes that share nothing.

    A shard counts as there when its entry is, which is uploaded after it; the index comes last of all.

    Args:
        remote: The folder in the object store.
        scratch: A local folder, of this process alone.
        columns: MDS encodings by column.
    """

    def __init__(self, remote: str, scratch: Path, columns: Mapping[str, str]) -> None:
        super().__init__(scratch, columns)
        self.remote = remote.rstrip('/')

    def __str__(self) -> str:
        return self.remote

    @property
    def begun(self) -> str:
        return f'{self.remote}/{BEGUN}'

    def finished(self) -> Path | None:
        """A local copy of what is beside the index, if that is there."""
        names = {name for name in self._listed() if '/' not in name}
        if 'index.json' not in names:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name.endswith('.json'):
                download(f'{self.remote}/{name}', self.folder / name)
        return self.folder

    def open(self, plan: Mapping[str, Any], where: str) -> None:
        """Begin, or go on with what the same plan began."""
        self.folder.mkdir(parents=True, exist_ok=True)
        local, name = self.folder / PLAN, f'{BEGUN}/{PLAN}'
        local.unlink(missing_ok=True)
        begun = name in self._listed()
        if begun:
            download(f'{self.remote}/{name}', local)
        super().open(plan, where)
        if not begun:
            self._upload(local, name)

    def missing(self, count: int) -> list[int]:
        """Numbers of the shards, of `count`, that are not there yet."""
        there = self._listed()
        return [number for number in range(count) if f'{BEGUN}/{self._entry(number).name}' not in there]

    def write(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a shard whole, and upload it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        super().write(number, rows)
        entry = self._entry(number)
        shard = self.folder / json.loads(entry.read_text(encoding='utf-8'))['raw_data']['basename']
        self._upload(shard, shard.name)
        self._upload(entry, f'{BEGUN}/{entry.name}')
        shard.unlink()
        entry.unlink()

    def finish(self, count: int, *, beside: Mapping[str, str]) -> None:
        """Upload the files `beside` and then the index."""
        for name, text in [*beside.items(), ('index.json', self._merged(count))]:
            path = self.folder / name
            path.write_text(text, encoding='utf-8')
            self._upload(path, name)

    def _merged(self, count: int) -> str:
        with ThreadPoolExecutor(DOWNLOADS) as threads:
            list(threads.map(self._fetch, range(count)))
        return super()._merged(count)

    def _fetch(self, number: int) -> None:
        entry = self._entry(number)
        download(f'{self.remote}/{BEGUN}/{entry.name}', entry)

    def _listed(self) -> dict[str, Object]:
        """What is there, by its path below the folder."""
        prefix = f'{split(self.remote)[1]}/'
        return {found.key.removeprefix(prefix): found for found in list_objects(f'{self.remote}/')}

    def _upload(self, path: Path, name: str) -> None:
        upload(path, f'{self.remote}/{name}'.rpartition('/')[0])
