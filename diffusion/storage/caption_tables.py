"""Tables of captions beside the shards of a dataset: one Parquet file per shard and column of captions.

    256px/shard.00007.mds
    256px/captions.json                     columns that cover every shard, with the names of their tables
    256px/captions/qwen3vl_long/shard.00007.mds.PLAN.SHARD.TABLE.parquet    row i describes sample i of the shard

The capitals stand for hashes of the column's plan, of the shard's size and hashes, and of the table's bytes. A listing
thus shows which shards are finished, and a table is not used for another version of its shard. If two jobs have made a
table for the same shard and plan, the first by name counts. Images are never rewritten.
"""

import hashlib
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from diffusion.errors import DataError, UserError
from diffusion.storage.places import Place
from diffusion.storage.retry import PreconditionFailed

LIST = 'captions.json'
FOLDER = 'captions'
VERSION = 2
ORIGINAL = 'original'
"""Column name for the captions stored in the shards, if the dataset was prepared from a single caption column."""
ROWS = pa.schema(
    {
        'key': pa.string(),
        'pixel_hash': pa.uint64(),  # of the image as stored; 0 if it cannot be decoded
        'caption': pa.string(),  # null if rejected
        'rejected': pa.string(),  # name of the rule that rejected the answer, or null
        'answer': pa.string(),  # the rejected answer, or the server's message; null for captions
        'tokens': pa.int32(),  # of the answer, as counted by the engine
        'prompt_tokens': pa.int32(),
        'model': pa.string(),
        'revision': pa.string(),
        'prompt': pa.string(),
        'prompt_version': pa.int32(),
        'settings': pa.string(),  # JSON
    }
)


def plan_hash(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def table_key(plan: str, raw: Mapping[str, Any]) -> str:
    """Return the beginning of the file name of a shard's caption table.

    Args:
        plan: Hash of the column's plan.
        raw: `raw_data` of the shard in index.json.
    """
    return f'{raw["basename"]}.{plan}.{plan_hash({name: raw[name] for name in ("bytes", "hashes")})}'


def tables_in(folder: Place, bucket: str, column: str) -> dict[str, list[str]]:
    """Return the paths of a caption column's tables by `table_key`; `bucket` is empty for the dataset's folder."""
    below, found = joined(bucket, f'{FOLDER}/{column}'), dict[str, list[str]]()
    for name in sorted(name for name in folder.list(below).files if name.endswith('.parquet')):
        found.setdefault(name.rsplit('.', 2)[0], []).append(f'{below}/{name}')
    return found


def write_table(folder: Place, bucket: str, column: str, key: str, table: pa.Table) -> str:
    """Write a caption table with the columns `ROWS`; return its file name, which begins with `key`."""
    buffer = io.BytesIO()
    pq.write_table(table.cast(ROWS), buffer, compression='zstd')
    name = f'{key}.{xxhash.xxh64(buffer.getvalue()).hexdigest()}.parquet'
    folder.write(joined(bucket, f'{FOLDER}/{column}/{name}'), buffer.getvalue())
    return name


def read_table(folder: Place, name: str) -> pa.Table:
    """Return a caption table; raise DataError if its content does not match the hash in its file name."""
    content = folder.read(name) or b''
    if not is_intact(name, content):
        raise DataError(f'{folder.locate(name)}: is damaged; delete it and run diffusion caption again')
    return pq.read_table(io.BytesIO(content))


def is_intact(name: str, content: bytes) -> bool:
    return xxhash.xxh64(content).hexdigest() == name.rsplit('.', 2)[1]


def publish(
    folder: Place, bucket: str, column: str, plan: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> bool:
    """List a caption column in captions.json, so that training can use it; return False if a shard has no table.

    The column's tables that are not listed, such as those of other plans, are deleted.
    """
    found = tables_in(folder, bucket, column)
    keys = {entry['raw_data']['basename']: table_key(plan_hash(plan), entry['raw_data']) for entry in entries}
    if not found.keys() >= {*keys.values()}:
        return False
    tables = {file: found[key].pop(0).rpartition('/')[2] for file, key in keys.items()}
    _update_list(folder, bucket, lambda columns: columns | {column: {'plan': dict(plan), 'tables': tables}})
    folder.delete(chain(*found.values()))
    return True


def read_list(content: bytes | None, where: str) -> dict[str, dict[str, Any]]:
    """Return, by column, `plan` and `tables` (file name of each shard's table) from the content of a captions.json.

    If `content` is None (no file), return no columns. Raise UserError if the file is damaged or has another format.
    """
    try:
        values = {'version': VERSION, 'columns': {}} if content is None else json.loads(content)
        if values['version'] != VERSION:
            raise ValueError(f'format {values["version"]} of another version of diffusion, not {VERSION}')
        return values['columns']
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{where}: cannot be read ({error}); delete it and run diffusion caption again') from error


def listed_tables(
    listed: Mapping[str, Any], column: str, raws: Iterable[Mapping[str, Any]], where: str
) -> dict[str, str]:
    """Return the paths of a caption column's tables, relative to the bucket folder, by file name of the shard.

    Args:
        listed: The column's value in the result of `read_list`.
        raws: `raw_data` of the shards in index.json. New shards, which have no table yet, are left out.

    Raises:
        UserError: The table of a shard was made for another version of that shard.
    """
    found, plan = {}, plan_hash(listed['plan'])
    for raw in raws:
        file = raw['basename']
        if (name := listed['tables'].get(file)) is not None:
            if not name.startswith(table_key(plan, raw)):
                problem = f'the captions {column} are of an older version of {file}; run diffusion caption again'
                raise UserError(f'{where}: {problem}')
            found[file] = f'{FOLDER}/{column}/{name}'
    return found


def complete_tables(
    folder: Place, bucket: str, column: str, entries: Sequence[Mapping[str, Any]]
) -> dict[str, str] | None:
    """Return the paths of a caption column's tables by file name of the shard; None if captions.json lacks it.

    Raises:
        UserError: A shard has no table, or its table was made for another version of the shard.
    """
    name = joined(bucket, LIST)
    listed, where = read_list(folder.read(name), folder.locate(name)).get(column), folder.locate(name)
    if listed is None:
        return None
    found = listed_tables(listed, column, [entry['raw_data'] for entry in entries], where)
    if missing := len(entries) - len(found):
        raise UserError(f'{where}: {missing} shards have no captions {column}; run diffusion caption again')
    return {file: joined(bucket, table) for file, table in found.items()}


def rewrite_tables(
    folder: Place,
    bucket: str,
    old: Iterable[Mapping[str, Any]],
    new: Iterable[Mapping[str, Any]],
    keys: Collection[str],
) -> list[str]:
    """Copy the caption tables of shards that were rewritten without some images; return the old tables' paths.

    Args:
        old: Index entries of the old shards.
        new: The bucket's new index entries; the new shard of shard.00003.mds is shard.00003.TOKEN.mds.
        keys: Keys of the removed images.
    """
    replaced, added = list[str](), dict[str, dict[str, str]]()
    before = {entry['raw_data']['basename']: entry['raw_data'] for entry in old}
    after = {number_of(entry['raw_data']['basename']): entry['raw_data'] for entry in new}
    for column in sorted(folder.list(joined(bucket, FOLDER)).folders) if before else ():
        for key, names in tables_in(folder, bucket, column).items():
            file, plan, _ = key.rsplit('.', 2)
            if file not in before:
                continue
            replaced += names
            raw = after.get(number_of(file))  # None if no sample of the shard is left
            if raw is not None and key == table_key(plan, before[file]):
                rows = read_table(folder, names[0])
                kept = rows.filter(pa.array([key not in keys for key in rows['key'].to_pylist()], pa.bool_()))
                table = write_table(folder, bucket, column, table_key(plan, raw), kept)
                added.setdefault(column, {})[raw['basename']] = table

    def add(columns: dict[str, Any]) -> dict[str, Any]:
        return {name: each | {'tables': each['tables'] | added.get(name, {})} for name, each in columns.items()}

    if added:
        # Add the new tables before the index lists their shards; entries of old tables are harmless.
        _update_list(folder, bucket, add)
    return replaced


def _update_list(folder: Place, bucket: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    name = joined(bucket, LIST)
    while True:
        found = folder.read_version(name)
        columns = change(read_list(None if found is None else found.content, folder.locate(name)))
        content = json.dumps({'version': VERSION, 'columns': columns}, sort_keys=True).encode()
        with suppress(PreconditionFailed):  # another process has listed its column
            if found is None or found.content != content:
                folder.replace(name, content, None if found is None else found.version)
            return


def number_of(file: str) -> str:
    """Return a shard's name without token and suffix, such as shard.00003, which a rewritten shard keeps."""
    return '.'.join(file.split('.')[:2])


def joined(folder: str, name: str) -> str:
    return f'{folder}/{name}' if folder else name
