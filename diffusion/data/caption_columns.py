"""Captions from the tables that `diffusion caption` writes beside the shards of a stream."""

import hashlib
import io
import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.data.verified_stream import RESTORE, VerifiedStream
from diffusion.errors import DataError, UserError
from diffusion.storage.caption_tables import LIST, Receipt, read_list, stem_of, table_name
from diffusion.storage.mds import find_damage
from diffusion.storage.retry import status_of

log = logging.getLogger(__name__)

TABLES_IN_MEMORY = 64
"""Tables that a process keeps open; a table of 5,000 captions of 100 words takes 3 MB."""


class CaptionColumns:
    """The columns of captions of one stream that training uses.

    Args:
        listed: Plan and receipts of the tables by column; see `caption_tables.read_list`.
    """

    def __init__(self, stream: VerifiedStream, listed: Mapping[str, Mapping[str, Any]]) -> None:
        self.stream = stream
        self.listed = listed
        self._tables: dict[tuple[str, str], pa.Array] = {}

    @classmethod
    def open(cls, stream: VerifiedStream, columns: Collection[str], shards: Mapping[str, Any]) -> 'CaptionColumns':
        """Read the columns of a stream that its captions.json lists; without this file, there are none.

        Args:
            columns: Names of the columns to use; the file is read only if there are any.
            shards: Size and hashes of the stream's shards by file name; see `shard_identity`.

        Raises:
            UserError: A table was made from another version of a shard.
        """
        listed = {} if not columns else read_list(_list_of(stream), f'streams.{stream.name}: {LIST}')
        chosen = {name: column for name, column in listed.items() if name in columns}
        for name, column in chosen.items():
            found = {file: Receipt(**each) for file in shards if (each := column['tables'].get(stem_of(file)))}
            stale = [file for file, receipt in found.items() if receipt.shard != shards[file]]
            if stale:
                raise UserError(
                    f'streams.{stream.name}: the captions {name} are of an older version of {stale[0]}; run diffusion '
                    'caption on the dataset again'
                )
            if missing := len(shards) - len(found):
                log.warning(
                    'streams.%s: %d of %d shards have no captions %s; run diffusion caption on the dataset again',
                    *(stream.name, missing, len(shards), name),
                )
            column['tables'] = {stem_of(file): receipt for file, receipt in found.items()}
        return cls(stream, chosen)

    def captions(self, file: str, row: int) -> list[tuple[str, str]]:
        """Return (column, caption) for each caption of the sample in this row of a shard; rejected ones are left out.

        Raises:
            DataError: A table cannot be downloaded, or is damaged.
        """
        found = []
        for column in self.listed:
            table = self._table(column, stem_of(file))
            if table is not None and (text := table[row].as_py()) is not None:
                found.append((column, text))
        return found

    def fingerprint(self) -> dict[str, str]:
        """Return model, prompt and a hash of the captions by column, to compare on resume."""
        found = {}
        for name, column in self.listed.items():
            plan, tables = column['plan'], column['tables']
            digest = hashlib.sha256(json.dumps({stem: tables[stem].xxh64 for stem in sorted(tables)}).encode())
            prompt = plan['prompt']
            model = f'{plan["model"]}@{plan["revision"]}' if plan['revision'] else plan['model']
            found[name] = f'{model}, {prompt["name"]} version {prompt["version"]}, {digest.hexdigest()[:16]}'
        return found

    def _table(self, column: str, stem: str) -> pa.Array | None:
        """Return the captions of a shard's samples, null for rejected ones; None if the shard has no table."""
        receipt = self.listed[column]['tables'].get(stem)
        if receipt is None:
            return None
        table = self._tables.pop((column, stem), None)
        if table is None:
            table = self._read(table_name('', column, stem), receipt)
        # Insert at the end; the first one is then the one that was not used for the longest time.
        self._tables[column, stem] = table
        if len(self._tables) > TABLES_IN_MEMORY:
            del self._tables[next(iter(self._tables))]
        return table

    def _read(self, name: str, receipt: Receipt) -> pa.Array:
        path = self.stream.folder / name
        if find_damage(path, receipt) is not None:
            self.stream.fetch_sidecar(name)
            if damage := find_damage(path, receipt):
                raise DataError(f'streams.{self.stream.name}: {path}: {damage}. To fix: {RESTORE}')
        captions = pq.read_table(io.BytesIO(path.read_bytes()), columns=['caption'], use_threads=False)['caption']
        return captions.combine_chunks()


def _list_of(stream: VerifiedStream) -> bytes | None:
    """Return the content of a stream's captions.json, downloaded if the stream is remote; None if it has none."""
    try:
        path = stream.fetch_sidecar(LIST)
    except UserError as error:
        # Without permission to list a bucket, S3 answers 403 for an object that does not exist.
        if status_of(error) in (403, 404):
            return None
        raise
    return path.read_bytes() if path.is_file() else None
