"""Remove images from a prepared dataset: only the shards that contain them are rewritten, under new names.

New shards and tables are written beside the old ones. Replacing the record (`dataset_record`) removes the images; then
the indexes are replaced, and the old files deleted. If the process is killed, the dataset remains consistent, and
running the same command again finishes the rest. The record keeps hashes of keys and pixels, so that a later delivery
does not add the images again.
"""

import difflib
import json
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from diffusion.errors import UserError
from diffusion.prepare.catalog import key_hashes
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.dataset_record import Delivery, RecordedDataset, index_hashes, with_indexes
from diffusion.prepare.dataset_reports import caption_lines, finish_change, without_names, write_captions
from diffusion.prepare.image_record import (
    HASHES,
    IMAGE_SCHEMA,
    REMOVED_SCHEMA,
    copy_without_rows,
    read_images,
    read_rows,
    write_removed,
)
from diffusion.prepare.shard_rewriting import index_folders, rewrite_shards
from diffusion.storage.atomic import write_atomically
from diffusion.storage.caption_tables import rewrite_tables
from diffusion.storage.places import is_url, place_at
from diffusion.storage.retry import PreconditionFailed

log = logging.getLogger(__name__)

MAX_COMPARED_KEYS = 20_000
"""Maximum number of keys to compare with a missing key when suggesting the most similar one."""


@dataclass(frozen=True)
class Selection:
    """Images to remove from a dataset, found by key or hash."""

    rows: list[np.ndarray]
    """Row numbers of the images in each delivery's table."""
    keys: frozenset[str]
    shards: dict[str, set[int]]
    """Numbers of the final shards that contain samples of the images, by bucket folder."""
    samples: Counter[str]
    missing: list[str]
    """Keys and hashes that belong to no current or removed image of the dataset."""
    gone: list[str]
    copies: list[str]
    """Keys of other images with the same pixels, which are not removed."""

    held_out: int
    """Number of selected images that are held out: this dataset lists them but has no samples of them."""

    @property
    def images(self) -> int:
        return sum(map(len, self.rows))


@dataclass
class Removal:
    selection: Selection
    rewritten: list[str] = field(default_factory=list)
    """Paths of the old shards, which were replaced by new ones or, if no sample was left, dropped."""
    old_indexes: list[str] = field(default_factory=list)
    """SHA-256 of the indexes that listed the removed samples."""


def select(dataset: RecordedDataset, keys: Collection[str], hashes: Collection[str]) -> Selection:
    """Find images by key or pixel hash (16 hexadecimal digits), and all other images with the key of one of these."""
    pixels = {hash_: int(hash_, 16) for hash_ in hashes}
    paths = dataset.paths(delivery.images for delivery in dataset.record.deliveries)
    # Keep the hashes of all images in memory (16 bytes each), but not their keys.
    columns = [read_images(path, ['key_hash', 'exact_hash']) for path in paths]
    hash_of = dict(zip(keys, key_hashes(keys).tolist(), strict=True))
    named = set(hash_of.values())
    for table, path in zip(columns, paths, strict=True):
        of_pixels = read_rows(path, _rows_with(table, 'exact_hash', pixels.values()))
        named |= set(of_pixels['key_hash'].to_pylist())
    # If several images have the key of a found image, select all of them: shards identify samples only by key.
    rows = [_rows_with(table, 'key_hash', named) for table in columns]
    tables = [read_rows(path, chosen) for path, chosen in zip(paths, rows, strict=True)]
    found = pa.concat_tables([IMAGE_SCHEMA.empty_table(), *tables])
    found_keys, found_pixels = (set(found[name].to_pylist()) for name in ('key', 'exact_hash'))
    shards: dict[str, set[int]] = {}
    samples: Counter[str] = Counter()
    for of_image in zip(found['buckets'].to_pylist(), found['shards'].to_pylist(), strict=True):
        for bucket, shard in zip(*of_image, strict=True):
            shards.setdefault(bucket, set()).add(shard)
            samples[bucket] += 1
    copies = [
        key
        for table, path in zip(columns, paths, strict=True)
        for key in read_rows(path, _rows_with(table, 'exact_hash', found_pixels))['key'].to_pylist()
        if key not in found_keys
    ]
    removed = _removed_table(dataset)
    removed_keys, removed_pixels = (set(removed[name].to_pylist()) for name in ('key_hash', 'exact_hash'))
    gone = [key for key in keys if key not in found_keys and hash_of[key] in removed_keys]
    gone += [text for text, value in pixels.items() if value not in found_pixels and value in removed_pixels]
    missing = [key for key in keys if key not in found_keys]
    missing += [text for text, value in pixels.items() if value not in found_pixels]
    missing = [name for name in missing if name not in gone]
    held_out = int(np.count_nonzero(found['held_out'].to_numpy()))
    return Selection(rows, frozenset(found_keys), shards, samples, missing, gone, copies, held_out)


def missing_problem(dataset: RecordedDataset, missing: Sequence[str]) -> str:
    """Return an error message about keys or hashes that do not exist, with the most similar keys of the dataset."""
    lines = []
    for name, similar in _similar_keys(dataset, missing[:20]).items():
        near = difflib.get_close_matches(name, similar, n=1)
        lines.append(f'  {name!r}' + (f': did you mean {near[0]!r}?' if near else ''))
    more = [f'  and {len(missing) - 20} more'] if len(missing) > 20 else []
    return (
        f'{dataset.folder}: no image has these keys or hashes, so nothing was removed:\n'
        + '\n'.join([*lines, *more])
        + '\ncorrect them, or add --missing-ok to remove the others'
    )


def remove(
    dataset: RecordedDataset, keys: Collection[str], hashes: Collection[str] = (), *, keep_old_shards: bool = False
) -> Removal:
    """Remove images by key or pixel hash (16 hexadecimal digits); keys and hashes that do not exist are skipped.

    `keep_old_shards` keeps the old files of rewritten shards, which running jobs may still read, until `purge`.
    """
    finish_change(dataset)
    while True:
        selection = select(dataset, keys, hashes)
        if not selection.images:
            return Removal(selection)
        try:
            removal = _remove_selected(dataset, selection, keep_old_shards=keep_old_shards)
        except PreconditionFailed as error:
            log.warning('%s; searching the new version', error)
            dataset.refresh()
            continue
        finish_change(dataset)
        return removal


def purge(dataset: RecordedDataset) -> list[str]:
    """Delete replaced shards that were kept for running jobs; return their paths."""
    finish_change(dataset)
    while dataset.record.kept:
        kept = dataset.record.kept
        try:
            dataset.commit(replace(dataset.record, kept=[], obsolete=[*dataset.record.obsolete, *kept]))
        except PreconditionFailed:
            dataset.refresh()
            continue
        dataset.delete_obsolete()
        return kept
    return []


def _remove_selected(dataset: RecordedDataset, selection: Selection, *, keep_old_shards: bool) -> Removal:
    """Remove the selected images; raise PreconditionFailed if the dataset has changed since they were selected."""
    record = dataset.record
    before = dataset.entries()
    if sum(selection.samples.values()) >= sum(shard['samples'] for shards in before.values() for shard in shards):
        raise UserError(f'{dataset.folder}: no image would be left; delete the folder instead')
    token = dataset.token('remove', *sorted(selection.keys))
    removal = Removal(selection)
    captions: set[str] = set()
    deliveries, obsolete = [], []
    tables: list[str] = []
    for delivery, rows in zip(record.deliveries, selection.rows, strict=True):
        new = delivery
        if len(rows):
            new = _without_rows(dataset, delivery, rows, selection.keys, token)
            entries, old, old_tables, of_removed = _without_samples(dataset, delivery, selection, token)
            captions |= of_removed
            removal.rewritten += old
            tables += old_tables
            path = dataset.scratch / 'new' / 'content.json'
            write_atomically(path, json.dumps(entries, sort_keys=True))
            dataset.folder.put(new.shards, path)
            obsolete += [delivery.images, delivery.shards, delivery.report]
        deliveries.append(new)
    removed = f'removed-{token}.parquet'
    _put_removed(dataset, selection, removed)
    obsolete += [] if record.removed is None else [record.removed]
    changed = replace(
        record,
        deliveries=deliveries,
        removed=removed,
        removed_count=record.removed_count + selection.images - selection.held_out,
        removed_held_out=record.removed_held_out + selection.held_out,
        kept=[*record.kept, *([*removal.rewritten, *tables] if keep_old_shards else ())],
        obsolete=[*record.obsolete, *obsolete, *(() if keep_old_shards else [*removal.rewritten, *tables])],
    )
    changed = with_indexes(changed, dataset.entries(deliveries))
    # Update captions.txt before the record, so that it never lists captions of images that are already removed.
    write_captions(dataset, [caption for caption in caption_lines(dataset) if caption not in captions])
    removal.old_indexes = [digest for bucket, digest in index_hashes(before) if bucket in selection.samples]
    dataset.commit(changed)
    return removal


def _without_rows(
    dataset: RecordedDataset, delivery: Delivery, rows: np.ndarray, keys: frozenset[str], token: str
) -> Delivery:
    """Write new versions of a delivery's image table and report without some images; return the updated delivery."""
    folder = delivery.images.rpartition('/')[0]
    new = replace(
        delivery,
        images=f'{folder}/images-{token}.parquet',
        shards=f'{folder}/shards-{token}.json',
        report=f'{folder}/report-{token}.json',
    )
    path = dataset.scratch / 'new' / 'images.parquet'
    copy_without_rows(dataset.path(delivery.images), rows, path)
    dataset.folder.put(new.images, path)
    report = PrepareReport.read(dataset.path(delivery.report))
    path = dataset.scratch / 'new' / 'report.json'
    without_names(report, keys).save(path)
    dataset.folder.put(new.report, path)
    return new


def _without_samples(
    dataset: RecordedDataset, delivery: Delivery, selection: Selection, token: str
) -> tuple[dict[str, list[dict[str, Any]]], list[str], list[str], set[str]]:
    """Rewrite shards and their caption tables without the selected images.

    Return the new index entries by bucket, the paths of the old shards and of the old tables' files, and the captions
    of the removed images in the shards.
    """
    new: dict[str, list[dict[str, Any]]] = {}
    old: list[str] = []
    tables: list[str] = []
    captions: set[str] = set()
    for bucket, entries in dataset.json(delivery.shards).items():
        files = (entry['raw_data']['basename'] for entry in entries)
        holding = {file for file in files if int(file.split('.')[1]) in selection.shards.get(bucket, ())}
        new[bucket], of_bucket, of_removed = rewrite_shards(
            dataset.folder, bucket, entries, holding, selection.keys, scratch=dataset.scratch, token=token
        )
        old += of_bucket
        before = [entry for entry in entries if entry['raw_data']['basename'] in holding]
        tables += rewrite_tables(dataset.folder, bucket, before, new[bucket], selection.keys)
        captions |= of_removed
    return new, old, tables, captions


def _put_removed(dataset: RecordedDataset, selection: Selection, name: str) -> None:
    """Write the table of all images ever removed, including the selected ones; it contains hashes but no keys."""
    tables = [_removed_table(dataset)]
    for delivery, rows in zip(dataset.record.deliveries, selection.rows, strict=True):
        tables.append(read_rows(dataset.path(delivery.images), rows).select(list(HASHES)))
    path = dataset.scratch / 'new' / 'removed.parquet'
    write_removed(path, pa.concat_tables(tables))
    dataset.folder.put(name, path)


def _removed_table(dataset: RecordedDataset) -> pa.Table:
    name = dataset.record.removed
    return REMOVED_SCHEMA.empty_table() if name is None else pq.read_table(dataset.path(name))


def _similar_keys(dataset: RecordedDataset, names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in names}
    for delivery in dataset.record.deliveries:
        keys: Any = read_images(dataset.path(delivery.images), ['key'])['key']
        for name, similar in found.items():
            chosen = keys
            if len(keys) > MAX_COMPARED_KEYS:  # comparing 100 million keys would take hours
                arrow: Any = pc
                chosen = keys.filter(arrow.or_(arrow.starts_with(keys, name[:6]), arrow.ends_with(keys, name[-6:])))
            similar += chosen.slice(0, max(0, MAX_COMPARED_KEYS - len(similar))).to_pylist()
    return found


def _rows_with(table: pa.Table, column: str, values: Collection[int]) -> np.ndarray:
    return np.flatnonzero(np.isin(table[column].to_numpy(), np.array(list(values), np.uint64)))


MANIFEST = 'manifest.json'
"""Name of a file in a folder of latents; it contains the hash of the index of the images (see `data.latents`)."""
STREAMS = ('streams', 'eval_streams', 'precompute.streams')


def latents_of(indexes: Mapping[str, Sequence[str]], places: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (folder, bucket) for each folder of latents made from a bucket; `indexes` are `DatasetRecord.indexes`."""
    for place in places:
        names = index_folders(place)
        sources = {name: source for name in names if (source := _source(place, name)) is not None}
        if not sources:
            raise UserError(f'--latents: {place} has no {MANIFEST} beside shards; give the output of task: precompute')
        for name, source in sources.items():
            for bucket, hashes in indexes.items():
                if source in hashes:
                    yield f'{place.rstrip("/")}/{name}'.rstrip('/'), bucket


def runs_with(places: Sequence[str], runs_dir: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (run name, streams) for each run with streams that read a dataset at `places` or in its subfolders."""
    if not runs_dir.is_dir():
        raise UserError(f'--runs-dir: {runs_dir} is not a folder; give the runs_dir of the recipes')
    for path in sorted(runs_dir.glob('*/recipe.yaml')):
        try:
            recipe = yaml.safe_load(path.read_text(encoding='utf-8'))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f'{path}: is not a recipe ({error}); repair or remove it') from error
        found = [
            f'{section}.{name}'
            for section in STREAMS
            for name, stream in _streams(recipe, section).items()
            if any(_reads(stream, place) for place in places)
        ]
        if found:
            yield path.parent.name, found


def _source(place: str, name: str) -> str | None:
    """Return the hash of the image index that a folder's latents were made from; None if it has no latents."""
    content = place_at(place).read(f'{name}/{MANIFEST}'.lstrip('/'))
    return None if content is None else json.loads(content).get('source')


def _streams(recipe: Any, section: str) -> Mapping[str, Any]:
    for key in section.split('.'):
        recipe = recipe.get(key) if isinstance(recipe, Mapping) else None
    return recipe if isinstance(recipe, Mapping) else {}


def _reads(stream: Any, place: str) -> bool:
    if not isinstance(stream, Mapping):
        return False
    for text in (stream.get('remote'), stream.get('local')):
        if not isinstance(text, str):
            continue
        if is_url(place) or is_url(text):
            if f'{text.rstrip("/")}/'.startswith(f'{place.rstrip("/")}/'):
                return True
        elif Path(text).resolve().is_relative_to(Path(place).resolve()):
            return True
    return False
