"""A folder of numbered MDS shards that several processes fill, each shard at once and whole, in any order.

A shard counts as there when its entry of the index stands beside it as `shard.00007.json`, which is written last. After
an interruption, on any number of processes, those without an entry are written again; what is in a shard may depend on
its number alone, so that the folder is the same however often that happened.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streaming import MDSWriter

from diffusion.errors import UserError
from diffusion.storage.atomic import UNFINISHED, becoming, write_whole
from diffusion.storage.differences import differences

PLAN = 'plan.json'
HASHES = ['sha1', 'xxh64']
"""Both that a recipe's `validate_hash` may ask for."""


class ShardStore:
    """Shards on their way into a folder, which appears when all are there.

    Args:
        final: The folder, on a file system that all processes share; until then it is called `.<name>.unfinished`.
        columns: MDS encodings by column.
    """

    def __init__(self, final: Path, columns: Mapping[str, str]) -> None:
        self.final = final
        self.folder = final.with_name(f'.{final.name}.unfinished')
        self.columns = dict(columns)

    def __str__(self) -> str:
        return str(self.final)

    @property
    def begun(self) -> str:
        """Where that is which going on needs."""
        return str(self.folder)

    def finished(self) -> Path | None:
        """The folder, or what of it says what is in it, if it is there."""
        return self.final if self.final.exists() else None

    def open(self, plan: Mapping[str, Any], where: str) -> None:
        """Begin, or go on with what the same plan began; for one process.

        Raises:
            UserError: The folder holds shards of another plan.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path, plan = self.folder / PLAN, json.loads(json.dumps(plan))
        if not path.exists():
            write_whole(path, json.dumps(plan, indent=2) + '\n')
            return
        try:
            found = differences(json.loads(path.read_text(encoding='utf-8')), plan, saved_in='begun with')
        except ValueError as error:
            raise UserError(f'{where}: {path} is damaged ({error}); remove {self.begun}') from error
        if found:
            told = '\n  '.join(found)
            raise UserError(f'{where}: {self.begun} was begun with other settings:\n  {told}\nremove it, or go back')

    def missing(self, count: int) -> list[int]:
        """Numbers of the shards, of `count`, that are not there yet."""
        if self._index.exists():
            return []
        return [number for number in range(count) if not self._entry(number).exists()]

    def write(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a shard whole."""
        with self._scratch(number) as scratch:
            writer = MDSWriter(out=str(scratch), columns=self.columns, hashes=HASHES, size_limit=None)
            for row in rows:
                writer.write(dict(row))
            writer.finish()
            (entry,) = json.loads((scratch / 'index.json').read_text(encoding='utf-8'))['shards']
            final = self.folder / f'shard.{number:05}.mds'
            with becoming(final) as unfinished:
                os.replace(scratch / entry['raw_data']['basename'], unfinished)
            entry['raw_data']['basename'] = final.name
            write_whole(self._entry(number), json.dumps(entry, sort_keys=True))

    def finish(self, count: int, *, beside: Mapping[str, str]) -> None:
        """Let the folder appear, with its index and files `beside`; for one process, when all shards are there."""
        for name, text in beside.items():
            write_whole(self.folder / name, text)
        if not self._index.exists():
            write_whole(self._index, self._merged(count))
        left = [path for kind in ('.shard.*', 'shard.*.json', f'*{UNFINISHED}*') for path in self.folder.glob(kind)]
        for path in [*left, self.folder / PLAN]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.replace(self.folder, self.final)

    def _merged(self, count: int) -> str:
        """The index of all shards."""
        entries = [json.loads(self._entry(number).read_text(encoding='utf-8')) for number in range(count)]
        return json.dumps({'version': 2, 'shards': entries}, sort_keys=True)

    @property
    def _index(self) -> Path:
        return self.folder / 'index.json'

    def _entry(self, number: int) -> Path:
        return self.folder / f'shard.{number:05}.json'

    @contextmanager
    def _scratch(self, number: int) -> Iterator[Path]:
        scratch = self.folder / f'.shard.{number:05}.unfinished'
        shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
