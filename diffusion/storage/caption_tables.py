"""Tables of captions beside the shards of a dataset: one Parquet file per shard and column of captions.

    256px/shard.00007.mds
    256px/captions.json                                columns that cover every shard, with the hash of each table
    256px/captions/qwen3vl_long/shard.00007.parquet    row i describes sample i of the shard
    256px/captions/qwen3vl_long/shard.00007.json       receipt: the table's hash and counts, written after the table

A table is valid only for the shard whose size and hashes its receipt records. Images are never rewritten.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from diffusion.errors import DataError, UserError
from diffusion.storage.places import Place
from diffusion.storage.retry import PreconditionFailed
from diffusion.storage.shard_writer import FETCHES

LIST = 'captions.json'
FOLDER = 'captions'
VERSION = 1
ORIGINAL = 'original'
"""Name for the captions in the shards, if the dataset was prepared from a single column."""
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


@dataclass(frozen=True, eq=False)  # hashable as a key of a cache
class Receipt:
    """Size, hash and counts of a table, and the shard and plan that it was made for."""

    plan: str
    """Hash of the column's plan: model, prompt and settings."""
    shard: dict[str, Any]
    """`bytes` and `hashes` of the shard."""
    samples: int
    captions: int
    tokens: int
    bytes: int
    xxh64: str
    rejected: dict[str, int] = field(default_factory=dict)
    """Number of rejected answers by rule."""

    @property
    def hashes(self) -> dict[str, str]:
        return {'xxh64': self.xxh64}


def stem_of(shard_file: str) -> str:
    """Return the file name of a shard without its suffix, such as shard.00007."""
    return shard_file.removesuffix('.mds')


def table_name(bucket: str, column: str, shard_file: str) -> str:
    """Return the path of a shard's table relative to the dataset; `bucket` is empty for the dataset's own folder."""
    return joined(bucket, f'{FOLDER}/{column}/{stem_of(shard_file)}.parquet')


def shard_identity(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a receipt records about a shard, from the shard's entry in index.json."""
    return {name: entry['raw_data'][name] for name in ('bytes', 'hashes')}


def plan_hash(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def write_table(folder: Place, name: str, table: pa.Table, *, plan: str, shard: Mapping[str, Any]) -> Receipt:
    """Write a table and its receipt; if there is one for the same plan and shard, keep that one."""
    table = table.cast(ROWS).replace_schema_metadata({'made_for': json.dumps([plan, shard], sort_keys=True)})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression='zstd')
    content = buffer.getvalue()
    while not folder.create(name, content):
        # Another job had the same shard, or was killed before it wrote the receipt, which must match the file.
        found = folder.read(name)
        if found is not None and (there := pq.read_table(io.BytesIO(found))).schema.metadata == table.schema.metadata:
            table, content = there, found
            break
        folder.delete([name])
    receipt = Receipt(
        plan=plan,
        shard=dict(shard),
        samples=len(table),
        captions=len(table) - table['caption'].null_count,
        tokens=sum(table['tokens'].drop_null().to_pylist()),
        bytes=len(content),
        xxh64=xxhash.xxh64(content).hexdigest(),
        rejected=dict(sorted(Counter(table['rejected'].drop_null().to_pylist()).items())),
    )
    folder.write(_receipt_name(name), json.dumps(asdict(receipt)))
    return receipt


def read_receipts(folder: Place, bucket: str, column: str) -> dict[str, Receipt]:
    """Return the receipts of a column's tables by the file names of their shards; unreadable ones are left out."""
    below, found = joined(bucket, f'{FOLDER}/{column}'), {}
    names = sorted(name for name in folder.list(below).files if name.endswith('.json'))
    with ThreadPoolExecutor(FETCHES) as threads:
        for name, content in zip(names, threads.map(lambda name: folder.read(f'{below}/{name}'), names), strict=True):
            with suppress(ValueError, TypeError):
                found[name.removesuffix('.json') + '.mds'] = Receipt(**json.loads(content or b''))
    return found


def is_finished(receipts: Mapping[str, Receipt], plan: str, entry: Mapping[str, Any]) -> bool:
    """Return True if a shard has a receipt for this plan and its present version."""
    receipt = receipts.get(entry['raw_data']['basename'])
    return receipt is not None and receipt.plan == plan and receipt.shard == shard_identity(entry)


def publish(
    folder: Place, bucket: str, column: str, plan: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> bool:
    """List a column in the bucket's captions.json, for training; return False if a shard's table is missing.

    Tables of shards that are no longer in the index are deleted.
    """
    receipts = read_receipts(folder, bucket, column)
    files = {entry['raw_data']['basename'] for entry in entries}
    if not all(is_finished(receipts, plan_hash(plan), entry) for entry in entries):
        return False
    listed = {'plan': dict(plan), 'tables': {stem_of(file): asdict(receipts[file]) for file in files}}
    _update_list(folder, bucket, lambda columns: columns | {column: listed})
    names = [table_name(bucket, column, file) for file in receipts.keys() - files]
    folder.delete([*map(_receipt_name, names), *names])
    return True


def read_list(content: bytes | None, where: str) -> dict[str, dict[str, Any]]:
    """Return `plan` and `tables` (receipts by stem of the shard, as JSON) of each column in a captions.json.

    None (there is no such file) gives no columns. Raise UserError if the file is damaged or has another format.
    """
    try:
        values = {'version': VERSION, 'columns': {}} if content is None else json.loads(content)
        if values['version'] != VERSION:
            raise ValueError(f'format {values["version"]} of another version of diffusion, not {VERSION}')
        return values['columns']
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{where}: cannot be read ({error}); delete it and run diffusion caption again') from error


def listed_receipts(
    folder: Place, bucket: str, column: str, entries: Iterable[Mapping[str, Any]]
) -> dict[str, Receipt] | None:
    """Return the receipts of a column's tables by the file names of shards; None if the column is not listed.

    Raises:
        UserError: A shard has no table, or only that of an older version of the shard.
    """
    where, receipts = folder.locate(joined(bucket, LIST)), {}
    listed = read_list(folder.read(joined(bucket, LIST)), where).get(column)
    if listed is None:
        return None
    for entry in entries:
        file = entry['raw_data']['basename']
        found = listed['tables'].get(stem_of(file))
        if found is None or found['shard'] != shard_identity(entry):
            raise UserError(f'{where}: has no captions {column} of the present {file}; run diffusion caption again')
        receipts[file] = Receipt(**found)
    return receipts


def rewrite_tables(
    folder: Place, bucket: str, old: Collection[str], new: Iterable[Mapping[str, Any]], keys: Collection[str]
) -> list[str]:
    """Copy the tables of shards that were rewritten without some images; return the paths of the old tables' files.

    Args:
        old: File names of the old shards.
        new: The bucket's new index entries; the new shard of shard.00003.mds is shard.00003.TOKEN.mds.
        keys: Keys of the removed images.
    """
    replaced, added = list[str](), dict[str, dict[str, Any]]()
    renewed = {number_of(entry['raw_data']['basename']): entry for entry in new}
    for column in sorted(folder.list(joined(bucket, FOLDER)).folders) if old else ():
        receipts = read_receipts(folder, bucket, column)
        for file in sorted({*old} & receipts.keys()):
            name = table_name(bucket, column, file)
            replaced += [name, _receipt_name(name)]
            entry = renewed.get(number_of(file))
            if entry is None:  # no sample of the shard is left
                continue
            table = read_table(folder, name, receipts[file])
            kept = table.filter(pa.array([key not in keys for key in table['key'].to_pylist()], pa.bool_()))
            plan, new_file = receipts[file].plan, entry['raw_data']['basename']
            name = table_name(bucket, column, new_file)
            receipt = write_table(folder, name, kept, plan=plan, shard=shard_identity(entry))
            added.setdefault(column, {})[stem_of(new_file)] = asdict(receipt)

    def add(columns: dict[str, Any]) -> dict[str, Any]:
        return {name: each | {'tables': each['tables'] | added.get(name, {})} for name, each in columns.items()}

    if added:
        # Add the new tables before the index lists their shards; entries of old tables are harmless.
        _update_list(folder, bucket, add)
    return replaced


def read_table(folder: Place, name: str, receipt: Receipt) -> pa.Table:
    """Return a table after comparing its hash with the receipt; raise DataError if they differ."""
    content = folder.read(name) or b''
    if xxhash.xxh64(content).hexdigest() != receipt.xxh64:
        raise DataError(f'{folder.locate(name)}: differs from its receipt; delete both and run diffusion caption again')
    return pq.read_table(io.BytesIO(content))


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


def _receipt_name(table: str) -> str:
    return f'{table.removesuffix(".parquet")}.json'


def number_of(file: str) -> str:
    """Return a shard's name without token and suffix, such as shard.00003, which a rewritten shard keeps."""
    return '.'.join(file.split('.')[:2])


def joined(folder: str, name: str) -> str:
    return f'{folder}/{name}' if folder else name
