"""Captions from the tables that `diffusion caption` writes beside the shards of a stream."""

import io
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.data.verified_stream import RESTORE, VerifiedStream
from diffusion.errors import DataError, UserError
from diffusion.storage.caption_tables import LIST, is_intact, listed_tables, plan_hash, read_list
from diffusion.storage.retry import status_of

log = logging.getLogger(__name__)

TABLES_IN_MEMORY = 64
"""Maximum number of tables that a process caches; a table of 5,000 captions of 100 words takes 3 MB."""


@dataclass(frozen=True)
class CaptionColumns:
    """The caption columns of a stream that training uses."""

    stream: VerifiedStream
    listed: Mapping[str, Mapping[str, Any]]
    """For each column, its `plan`, and `tables`, which maps a shard's file name to the path of its table."""

    @classmethod
    def open(
        cls, stream: VerifiedStream, columns: Collection[str], raws: Collection[Mapping[str, Any]]
    ) -> 'CaptionColumns':
        """Read from a stream's captions.json where the tables of `columns` are; a stream without the file has none.

        Args:
            columns: Names of the columns to use; the file is read only if there are any.
            raws: `raw_data` of the stream's shards in index.json.

        Raises:
            UserError: A table was made from another version of a shard.
        """
        listed = {} if not columns else read_list(_list_of(stream), f'streams.{stream.name}: {LIST}')
        chosen = {name: column for name, column in listed.items() if name in columns}
        for name, column in chosen.items():
            tables = listed_tables(column, name, raws, f'streams.{stream.name}')
            if missing := len(raws) - len(tables):
                log.warning(
                    'streams.%s: %d of %d shards have no captions %s; run diffusion caption on the dataset again',
                    *(stream.name, missing, len(raws), name),
                )
            column['tables'] = tables
        return cls(stream, chosen)

    def captions(self, file: str, row: int) -> list[tuple[str, str]]:
        """Return (column, caption) for each caption of the sample in this row of a shard; rejected ones are left out.

        Raises:
            DataError: A table cannot be downloaded, or is damaged.
        """
        found = []
        for column, listed in self.listed.items():
            if (name := listed['tables'].get(file)) is not None:
                text = _captions_in(self.stream, name)[row].as_py()
                found += [] if text is None else [(column, text)]
        return found

    def fingerprint(self) -> dict[str, str]:
        """Return each column's model, prompt and hash of its tables as text, by column, to compare them on resume."""
        found = {}
        for name, column in self.listed.items():
            plan, prompt = column['plan'], column['plan']['prompt']
            digest = plan_hash(column['tables'])
            model = f'{plan["model"]}@{plan["revision"]}' if plan['revision'] else plan['model']
            found[name] = f'{model}, {prompt["name"]} version {prompt["version"]}, {digest}'
        return found


@lru_cache(TABLES_IN_MEMORY)
def _captions_in(stream: VerifiedStream, name: str) -> pa.Array:
    """Return a table's captions, one for each sample of a shard; rejected ones are null."""
    path = stream.folder / name
    if not path.exists() or not is_intact(name, path.read_bytes()):
        path = stream.fetch_sidecar(name)
    content = path.read_bytes() if path.exists() else b''
    if not is_intact(name, content):
        raise DataError(f'streams.{stream.name}: {path}: is missing or damaged. To fix: {RESTORE}')
    captions = pq.read_table(io.BytesIO(content), columns=['caption'], use_threads=False)['caption']
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
