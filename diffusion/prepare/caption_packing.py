"""Write a dataset again with captions of `diffusion caption` in its shards, instead of in tables beside them.

Each shard is copied with its images in the same order. The indexes, which make a folder a dataset, are written last.
"""

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import DataError, UserError
from diffusion.prepare.process_sample import CAPTION_COLUMNS
from diffusion.prepare.shard_rewriting import check_shard, encoded_samples, indexed_folders, update_bucket_list
from diffusion.storage import caption_tables
from diffusion.storage.caption_tables import ORIGINAL, Receipt, listed_receipts, read_table, table_name
from diffusion.storage.mds import INDEX, ShardFormat, index_text
from diffusion.storage.places import LocalPlace, Place, place_at
from diffusion.storage.shard_writer import PLAN, ShardWriter, pin_plan

STATE = 'unfinished'
"""Folder for the index entries of finished shards until all are finished."""
THREADS = 4
"""Shards to copy at a time: each takes about three times its size in memory, and most of the time is I/O."""


@dataclass(frozen=True)
class _Shard:
    bucket: str
    number: int
    name: str
    """Path of the shard in the dataset."""
    entry: Mapping[str, Any]
    tables: Mapping[str, tuple[str, Receipt]]
    """Path and receipt of the table by column of captions."""

    def captions(self, source: Place) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return for each sample its key, and (column, caption) for each caption from tables that is not rejected."""
        tables = [read_table(source, *table) for table in self.tables.values()]
        rows = zip(*(table['caption'].to_pylist() for table in tables), strict=True)
        pairs = [[pair for pair in zip(self.tables, row, strict=True) if pair[1] is not None] for row in rows]
        return list(zip(tables[0]['key'].to_pylist(), pairs, strict=True))


def pack(place: str, out: str, columns: Sequence[str]) -> tuple[int, list[str]]:
    """Write a dataset with captions of some columns in its shards, or resume.

    Return the number of samples, and the keys of the samples that were left out since they have none of the captions.

    Args:
        columns: Columns of `diffusion caption`; `original` adds all captions of the shards under their own names.

    Raises:
        UserError: A column has no table for a shard, or `out` is not empty and not of an earlier start.
    """
    keep, named = ORIGINAL in columns, sorted({*columns} - {ORIGINAL})  # sorted as in captions.json: equal draws
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(THREADS) as threads, ExitStack() as stack:
        stack.callback(threads.shutdown, cancel_futures=True)  # or all shards would be copied after an error
        source, target = place_at(place.rstrip('/'), Path(scratch, 'old')), place_at(out.rstrip('/'))
        folders, there = indexed_folders(source, place), target.sizes()
        if not folders:
            raise UserError(f'{place}: has no {INDEX}; give a dataset that diffusion prepare has written')
        if f'{target}/'.startswith(f'{source}/') or (there and PLAN not in there):
            raise UserError(f'--out: {out} is in the dataset or not empty; give another folder')
        shards, writers = [], {}
        for each in folders:
            receipts = {name: listed_receipts(source, each.name, name, each.entries) for name in named}
            listed = {name: found for name, found in receipts.items() if found is not None}
            if not named or len(listed) < len(named):
                missing = ', '.join(sorted({*named} - {*listed})) or 'besides original'
                raise UserError(f'--captions: {each.path(INDEX)}: no complete column {missing}; run diffusion caption')
            for number, entry in enumerate(each.entries):
                file = entry['raw_data']['basename']
                stem = caption_tables.stem_of(file)
                tables = {name: (table_name(each.name, name, stem), found[stem]) for name, found in listed.items()}
                shards.append(_Shard(each.name, number, each.path(file), entry, tables))
            data, state = place_at(target.locate(each.name), Path(scratch, 'new', each.name)), f'{STATE}/{each.name}'
            writers[each.name] = ShardWriter(data, place_at(target.locate(state)), ShardFormat({}))
        inputs = {each.name: [each.entry['raw_data'], [of.xxh64 for _, of in each.tables.values()]] for each in shards}
        pin_plan(target, {'captions': sorted(columns), 'inputs': caption_tables.plan_hash(inputs)}, where='--out')
        left_out = [] if keep else list(chain(*threads.map(partial(_without_captions, source), shards)))
        count = sum(each.entry['samples'] for each in shards) - len(left_out)
        if not all(each.path(INDEX) in there for each in folders):
            done = {name: writer.done() for name, writer in writers.items()}
            pending = [each for each in shards if each.number not in done[each.bucket]]
            copies = threads.map(lambda shard: _copy(source, shard, writers[shard.bucket], keep_stored=keep), pending)
            list(tqdm(copies, total=len(pending), desc='shards', unit='', disable=None))
            entries = {name: writer.read_entries(sorted(writer.done())) for name, writer in writers.items()}
            if sum(entry['samples'] for entry in chain(*entries.values())) != count:
                raise DataError(f'{out}: shards have disappeared; run the same command again')
            for name in [name for name in source.sizes() if name.rpartition('/')[2] == BUCKETS]:
                target.write(name, source.read(name) or b'')
            for each in folders:
                update_bucket_list(target, each, entries[each.name])
                target.write(each.path(INDEX), index_text(entries[each.name]))
        target.remove_folder(STATE)
        target.clean()
    return count, left_out


def _without_captions(source: Place, shard: _Shard) -> list[str]:
    return [key for key, pairs in shard.captions(source) if not pairs]


def _copy(source: Place, shard: _Shard, writer: ShardWriter, *, keep_stored: bool) -> None:
    """Write a new shard without the samples that have no captions; write nothing if no sample is left."""
    path = source.fetch(shard.name)
    check_shard(path, shard.entry, source.locate(shard.name))
    old, samples = ShardFormat.of_entry(shard.entry), []
    columns = {name: kind for name, kind in old.columns.items() if name != 'caption'}
    new = replace(old, columns={**columns, 'captions': 'json', CAPTION_COLUMNS: 'json'})
    for (_, pairs), encoded in zip(shard.captions(source), encoded_samples(path), strict=True):
        sample = old.decode(encoded)
        if keep_stored:
            stored = sample.get('captions') or [sample['caption']]
            pairs = [*zip(sample.get(CAPTION_COLUMNS) or [ORIGINAL] * len(stored), stored, strict=True), *pairs]
        if pairs:
            sample[CAPTION_COLUMNS], sample['captions'] = zip(*pairs, strict=True)
            samples.append(new.encode(sample))
    if samples:
        replace(writer, format=new).write(shard.number, samples, list(map(len, samples)))
    if not isinstance(source, LocalPlace):
        path.unlink()
