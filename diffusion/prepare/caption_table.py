"""Join captions from tables to the images of another source by key, such as the captions of a dataset on the Hub."""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.caption_files import read_keyed_captions
from diffusion.prepare.dataset_choice import DatasetListing
from diffusion.prepare.file_listing import File, as_utf8, is_inside
from diffusion.prepare.hub_repository import Hub
from diffusion.prepare.source import (
    DivisibleSource,
    Entry,
    NamedCount,
    Part,
    PartList,
    PassedOver,
    Source,
    VersionedSource,
    count_named,
)
from diffusion.storage.atomic import atomic_file
from diffusion.storage.locks import hold_path_lock

KEYS = ('key', '__key__', 'image_id', 'id', 'file_name', 'file')
"""Common names of the column with keys, in order of precedence."""
TABLES = ('.parquet', '.csv', '.jsonl')
CAPTION_PROBLEMS = ('no_caption', 'caption_not_utf8', 'bad_json')
"""Problems of a source's own captions, which do not matter if the captions come from a table."""


@dataclass(frozen=True)
class CaptionTable:
    """Tables with a key and captions in each row; rows with the same key add their captions.

    An index on disk, about as large as the uncompressed tables, lets many processes share it.
    """

    location: str
    columns: tuple[str, ...]
    """Caption columns; empty means the common names."""
    key: str | None
    token_variable: str | None
    work: Path
    """Folder for the index."""

    @cached_property
    def listing(self) -> DatasetListing:
        return DatasetListing.open(self.location, Hub(self.token_variable))

    @cached_property
    def files(self) -> list[File]:
        found = [file for file in self.listing.files if is_inside(file.name, self.listing.path)]
        tables = [file for file in found if file.name.lower().endswith(TABLES)]
        if not tables:
            raise UserError(f'captions: {self.location} has no {", ".join(TABLES)} files; give tables with captions')
        return tables

    @cached_property
    def stamp(self) -> str:
        """Hash that changes with the content of the tables and the chosen columns."""
        content = [[file.name, file.stamp] for file in self.files], self.columns, self.key
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def rows(self, key: str) -> list[tuple[int, str]]:
        """Return (row number, JSON of captions and their columns) for each row of an image.

        Only if no row has the whole key, try the key without its first folder, and so on: the key of an image in a tar
        is `00000/000000012`, but a table may have only `000000012`.
        """
        query, rest = 'SELECT number, content FROM captions WHERE key = ? ORDER BY number', key
        while not (found := _opened(self.index()).execute(query, (rest,)).fetchall()) and '/' in rest:
            rest = rest.partition('/')[2]
        return found

    def unused(self, keys: Iterable[str]) -> dict[str, NamedCount]:
        """Count, for the report, the tables' keys that belong to none of the images `keys`, and rows without key."""
        found: dict[str, NamedCount] = {}
        used = {number for key in keys for number, _ in self.rows(key)}
        query, last = 'SELECT number, key, iif(key IS NULL, content, 0) FROM captions ORDER BY key, number', None
        for number, key, place in _opened(self.index()).execute(query):
            if key is None:
                count_named(found, 'captions without key', 1, [place])
            elif number not in used and key != last:
                count_named(found, 'captions without image', 1, [key])
            last = key
        # Close the index: on a network file system, the work folder could not be removed with an open file in it.
        _opened.cache_clear()
        return found

    def index(self) -> Path:
        """Return the path of the index; the first process that needs it writes it."""
        path = self.work / f'captions-{self.stamp}.sqlite'
        if not path.exists():
            with hold_path_lock(path, lambda: None):
                if not path.exists():
                    with atomic_file(path) as unfinished:
                        self._write_index(unfinished)
        return path

    def _write_index(self, path: Path) -> None:
        index = sqlite3.connect(path, isolation_level=None)
        # The file gets its name only when complete, so it needs no journal.
        index.execute('PRAGMA journal_mode = OFF')
        index.execute('CREATE TABLE captions (number INTEGER PRIMARY KEY, key TEXT, content TEXT)')
        index.execute('BEGIN')
        for file in self.files:
            with self.listing.copy(file.url) as copy:
                for where, key, *captions in read_keyed_captions(copy, [self.key] if self.key else KEYS, self.columns):
                    row = (None, where) if key is None else (as_utf8(key), json.dumps(captions))
                    index.execute('INSERT INTO captions (key, content) VALUES (?, ?)', row)
        index.execute('CREATE INDEX by_key ON captions (key)')
        index.execute('COMMIT')
        index.close()


@lru_cache(1)
def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f'{path.resolve().as_uri()}?mode=ro&immutable=1', uri=True, check_same_thread=False)


@dataclass(frozen=True)
class CaptionedSource:
    """Source whose captions are replaced by those of a table; an image without a row is rejected."""

    source: Source
    table: CaptionTable

    def parts(self) -> PartList:
        """Return the source's parts, with stamps that change with the table too."""
        self.table.index()  # a mistake in the table is reported before the work starts
        stamp = self.table.stamp
        parts = PartList(
            replace(part, where={**part.where, 'captions': stamp}, stamp=f'{part.stamp} {stamp}')
            for part in self.source.parts()
        )
        parts.report_in_first(notes=(*parts.heads[0].notes, f'captions by key from {self.table.listing.title}'))
        return parts

    def divide(self, part: Part, count: int) -> Sequence[Part]:
        return self.source.divide(part, count) if isinstance(self.source, DivisibleSource) else [part]

    def pinned_to(self, parts: Iterable[Mapping[str, Any]]) -> 'CaptionedSource':
        pinned = self.source.pinned_to(parts) if isinstance(self.source, VersionedSource) else self.source
        return replace(self, source=pinned)

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        for entry in self.source.read(part):
            if isinstance(entry, Entry) and entry.problem in (None, *CAPTION_PROBLEMS):
                found = [json.loads(content) for _, content in self.table.rows(entry.key)]
                entry.captions = [text for texts, _ in found for text in texts]
                names = [name for _, names in found for name in names]
                entry.caption_columns = names if len(self.table.columns) > 1 else []
                entry.problem = None if found else 'not_in_captions'
            yield entry
