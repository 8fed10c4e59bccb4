"""Write a dataset again with captions of `diffusion caption` in its shards, instead of in tables beside them.

Each shard is copied with its images in the same order. The indexes, which make a folder a dataset, are written last.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from diffusion.config.image_shapes import BUCKETS
from diffusion.errors import UserError
from diffusion.prepare.process_sample import CAPTION_COLUMNS
from diffusion.prepare.shard_rewriting import check_shard, encoded_samples, indexed_folders, update_bucket_list
from diffusion.prepare.work_dir import Share
from diffusion.storage.caption_tables import ORIGINAL, complete_tables, plan_hash, read_table
from diffusion.storage.mds import INDEX, ShardFormat, index_text
from diffusion.storage.places import LocalPlace, Place, place_at
from diffusion.storage.shard_writer import PLAN, pin_plan

STATE = 'unfinished'
"""Temporary folder with a file per finished shard: the shard's new index entry, and the keys left out."""
THREADS = 4
"""Shards to copy at a time: each takes about three times its size in memory, and most of the time is I/O."""


@dataclass(frozen=True)
class _Shard:
    bucket: str
    name: str
    """Path of the shard in the dataset."""
    entry: Mapping[str, Any]
    tables: Mapping[str, str]
    """Paths of the tables by caption column."""

    @property
    def state(self) -> str:
        return f'{STATE}/{self.name}.json'


def pack(place: str, out: str, columns: Sequence[str], *, share: Share | None = None) -> tuple[int, list[str]]:
    """Write a copy of a dataset with the captions of `columns` in its shards, or resume writing it.

    Return the number of samples, and the keys of the samples that were left out since they have none of the captions.
    With a `share` (of several machines), copy its shards and return (0, []); a call without one finishes the dataset.

    Args:
        columns: Columns of `diffusion caption`; `original` adds all captions of the shards under their own names.

    Raises:
        UserError: A column has no table for a shard, or `out` has files other than an earlier start's.
    """
    keep, named = ORIGINAL in columns, sorted({*columns} - {ORIGINAL})  # as in captions.json, for equal random draws
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(THREADS) as threads, ExitStack() as stack:
        stack.callback(threads.shutdown, cancel_futures=True)  # or all shards would be copied after an error
        source, target = (place_at(at.rstrip('/'), Path(scratch, name)) for at, name in ((place, 'old'), (out, 'new')))
        folders, there = indexed_folders(source, place), target.sizes()
        if not folders:
            raise UserError(f'{place}: has no {INDEX}; give a dataset that diffusion prepare has written')
        if f'{target}/'.startswith(f'{source}/') or (there and PLAN not in there):
            raise UserError(f'--out: {out} is in the dataset or not empty; give another folder')
        shards = []
        for each in folders:
            tables = {name: complete_tables(source, each.name, name, each.entries) for name in named}
            if not named or None in tables.values():
                missing = ', '.join(name for name in named if tables[name] is None) or 'besides original'
                raise UserError(f'--captions: {each.path(INDEX)}: no complete column {missing}; run diffusion caption')
            for entry in each.entries:
                file = entry['raw_data']['basename']
                of_shard = {name: found[file] for name, found in tables.items() if found}
                shards.append(_Shard(each.name, each.path(file), entry, of_shard))
        inputs = {each.name: [each.entry['raw_data'], *each.tables.values()] for each in shards}
        plan = {'captions': sorted(columns), 'inputs': plan_hash(inputs)}
        pin_plan(target, plan, where='--out', alone=share is None)
        entries, left_out = {each.name: each.entries for each in indexed_folders(target, out)}, list[str]()
        if len(entries) < len(folders):
            own = [each for number, each in enumerate(shards) if share is None or share.includes(number)]
            pending = [each for each in own if each.state not in there]
            copies = threads.map(lambda shard: _copy(source, target, shard, keep_stored=keep), pending)
            list(tqdm(copies, total=len(pending), desc='shards', unit='', disable=None))
            if share is not None:
                return 0, []
            states = list(threads.map(lambda shard: json.loads(target.read(shard.state) or b''), shards))
            left_out = list(chain(*(keys for _, keys in states)))
            for name in [name for name in source.sizes() if name.rpartition('/')[2] == BUCKETS]:
                target.write(name, source.read(name) or b'')
            for each in folders:
                of_bucket = zip(shards, states, strict=True)
                entries[each.name] = [new for shard, (new, _) in of_bucket if new and shard.bucket == each.name]
                update_bucket_list(target, each, entries[each.name])
                target.write(each.path(INDEX), index_text(entries[each.name]))
        target.remove_folder(STATE)
        target.clean()
    return sum(entry['samples'] for entry in chain(*entries.values())), left_out


def _copy(source: Place, target: Place, shard: _Shard, *, keep_stored: bool) -> None:
    """Write a shard of the samples that have captions, unless none has, and a state file for resuming."""
    path = source.fetch(shard.name)
    check_shard(path, shard.entry, source.locate(shard.name))
    old, samples, left_out = ShardFormat.of_entry(shard.entry), [], []
    columns = {name: kind for name, kind in old.columns.items() if name != 'caption'}
    new = replace(old, columns={**columns, 'captions': 'json', CAPTION_COLUMNS: 'json'})
    tables = [read_table(source, table)['caption'].to_pylist() for table in shard.tables.values()]
    for texts, encoded in zip(zip(*tables, strict=True), encoded_samples(path), strict=True):
        sample = old.decode(encoded)
        pairs = [pair for pair in zip(shard.tables, texts, strict=True) if pair[1] is not None]
        if keep_stored:
            stored = sample.get('captions') or [sample['caption']]
            pairs = [*zip(sample.get(CAPTION_COLUMNS) or [ORIGINAL] * len(stored), stored, strict=True), *pairs]
        if pairs:
            sample[CAPTION_COLUMNS], sample['captions'] = zip(*pairs, strict=True)
            samples.append(new.encode(sample))
        else:
            left_out.append(sample['key'])
    entry = None
    if samples:
        with target.writing(shard.name) as unfinished:
            name = shard.entry['raw_data']['basename']
            entry = new.write_shard(unfinished, samples, list(map(len, samples)), name=name)
    target.write(shard.state, json.dumps([entry, left_out]))
    if not isinstance(source, LocalPlace):
        path.unlink()
