"""Join captions from tables, and columns for filters, to the images of another source by key."""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.caption_files import read_keyed_captions
from diffusion.prepare.dataset_choice import DatasetListing
from diffusion.prepare.extra_columns import json_value
from diffusion.prepare.file_listing import File, as_utf8, is_inside, is_pattern
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
from diffusion.storage.caption_tables import FOLDER, ORIGINAL
from diffusion.storage.locks import hold_path_lock

KEYS = ('key', '__key__', 'image_id', 'id', 'file_name', 'file')
"""Common names of the column with keys, in order of precedence."""
TABLES = ('.parquet', '.csv', '.jsonl')
_OF_COLUMN = re.compile(rf'(?:^|/){FOLDER}/([^/]+)/shard\.[^/]+\.parquet')
"""End of the path of a table by `diffusion caption`; its folder is named after the caption column that it holds."""
CAPTION_PROBLEMS = ('no_caption', 'caption_not_utf8', 'bad_json')
"""Problems of a source's own captions, which do not matter if the captions come from a table."""


@dataclass(frozen=True)
class CaptionTable:
    """Tables with a key and captions in each row; an image gets the captions of all rows with its key.

    An index on disk, about as large as the uncompressed tables, lets many processes share it.
    """

    location: str
    columns: tuple[str, ...]
    """Caption columns; empty means the common names."""
    key: str | None
    token_variable: str | None
    work: Path
    """Folder for the index."""
    metadata: tuple[str, ...] = ()
    """Further columns to join, such as answers to a question; tables may lack them."""

    @cached_property
    def listing(self) -> DatasetListing:
        path = Path(self.location)
        if path.parent.is_dir() and not path.exists() and not is_pattern(path.name) and len(path.parts) > 1:
            raise UserError(f'captions: {path} does not exist; write it with diffusion caption, or name another folder')
        return DatasetListing.open(self.location, Hub(self.token_variable))

    @cached_property
    def files(self) -> dict[File, str | None]:
        """The tables to join; each maps to its caption column if `diffusion caption` has written it, else to None."""
        found = [file for file in self.listing.files if is_inside(file.name, self.listing.path)]
        matches = {file: _OF_COLUMN.search(file.url) for file in found if file.name.lower().endswith(TABLES)}
        tables = {file: None if match is None else match[1] for file, match in matches.items()}
        if self.columns not in ((), ('caption',)):
            wanted = (None, *self.columns, *self.metadata)
            tables = {file: column for file, column in tables.items() if column in wanted}
        if not tables:
            columns = ', '.join(self.columns) or 'captions'
            raise UserError(f'captions: {self.location} has no {", ".join(TABLES)} files; give tables with {columns}')
        return tables

    @property
    def keeps_own(self) -> bool:
        """True if column `original` means the source's own captions, since `diffusion caption` wrote all tables."""
        return ORIGINAL in self.columns and None not in self.files.values()

    @cached_property
    def stamp(self) -> str:
        """Hash that changes with the content of the tables and the chosen columns."""
        content = [[file.name, file.stamp] for file in self.files], self.columns, self.key, *self.metadata
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def rows(self, key: str) -> list[tuple[int, str]]:
        """Return (row number, JSON of captions, their columns, and metadata) for each row of an image.

        Only if no row has the whole key, try the key without its first folder, and so on: the key of an image in a tar
        is `00000/000000012`, but a table may have only `000000012`.
        """
        query, rest = 'SELECT number, content FROM captions WHERE key = ? ORDER BY number', key
        while not (found := _opened(self.index()).execute(query, (rest,)).fetchall()) and '/' in rest:
            rest = rest.partition('/')[2]
        return found

    def unused(self, keys: Iterable[str]) -> dict[str, NamedCount]:
        """Count, for the report, keys in the tables that no image has (`keys`: all images'), and rows without a key."""
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
        for file, column in self.files.items():
            names = self.columns if column is None else ('caption',)
            with self.listing.copy(file.url) as copy:
                rows = read_keyed_captions(copy, [self.key] if self.key else KEYS, names)
                for where, key, captions, columns, values in rows:
                    content = json.dumps(self._content(column, captions, columns, values))
                    row = (None, where) if key is None else (as_utf8(key), content)
                    index.execute('INSERT INTO captions (key, content) VALUES (?, ?)', row)
        index.execute('CREATE INDEX by_key ON captions (key)')
        index.execute('COMMIT')
        index.close()

    def _content(self, column: str | None, captions: list[Any], names: list[str], row: Mapping[str, Any]) -> Any:
        """Return a row's captions, their columns, and metadata by column: (value, rule that rejected it or None)."""
        if column in self.metadata:
            return [], [], {column: [json_value(row.get('caption')), row.get('rejected')]}
        metadata = {name: [json_value(row[name]), None] for name in self.metadata if name in row}
        if column is not None and row.get('rejected') is not None:
            metadata[column] = [None, row['rejected']]
        return captions, names if column is None else [column] * len(captions), metadata


@lru_cache(1)
def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f'{path.resolve().as_uri()}?mode=ro&immutable=1', uri=True, check_same_thread=False)


@dataclass(frozen=True)
class CaptionedSource:
    """Source with captions from tables instead of, or besides, its own; an image without a row is rejected."""

    source: Source
    table: CaptionTable

    def parts(self) -> PartList:
        """Return the source's parts, with stamps that change with the table too."""
        self.table.index()  # report mistakes in the tables before any work is done
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
                own = entry.captions if self.table.keeps_own else []
                entry.captions = [*own, *(text for texts, *_ in found for text in texts)]
                names = [*[ORIGINAL] * len(own), *(name for _, names, _ in found for name in names)]
                entry.caption_columns = names if len(self.table.columns) > 1 else []
                entry.problem = None if found else 'not_in_captions'
                has_caption = any(isinstance(text, str) for text in entry.captions)
                for column, (value, rule) in (item for *_, metadata in found for item in metadata.items()):
                    if column not in self.table.metadata:  # a caption that a rule rejected
                        entry.problem = entry.problem if has_caption else rule
                    elif rule is not None:
                        entry.problem = f'{column}_{rule}'
                    elif entry.metadata.setdefault(column, value) != value:
                        entry.problem = f'{column}_ambiguous'
            yield entry
