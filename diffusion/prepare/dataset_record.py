"""Record of a prepared dataset: settings, deliveries and shards. It allows images to be added and removed.

    dataset.json                        the record; replacing it adds a delivery or removes images, atomically
    deliveries/00000-1f0c8a6e/          one folder per delivery: the input of one preparation or append
        images.parquet                  keys and hashes of its images, and the shards that hold them (image_record)
        shards.json                     index entries of its shards by bucket
        parts.json                      names and version stamps of the parts of its input
        report.json                     its report
    removed-9d3c1e44.parquet            hashes of the keys and pixels of removed images

All files except `dataset.json` are written only once, under new names. The files that training reads (`index.json` and
`buckets.json`) and the report of the whole dataset are derived from the record by `update_indexes`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusion.config.image_shapes import BUCKETS, Shape, buckets_text, parse_shape
from diffusion.errors import UserError
from diffusion.prepare.counts_report import REPORT
from diffusion.prepare.image_record import EarlierImages
from diffusion.prepare.input_plan import InputPlan
from diffusion.storage import mds
from diffusion.storage.atomic import write_atomically
from diffusion.storage.places import place_at
from diffusion.storage.retry import PreconditionFailed

RECORD = 'dataset.json'
VERSION = 2
"""Version of the record's format; datasets with another version are rejected."""
IMAGES = 'images.parquet'
SHARDS = 'shards.json'
PARTS = 'parts.json'
FETCHES = 16
Entries = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Delivery:
    """One input added to a dataset: its source's settings, and the paths in the dataset of files that describe it."""

    source: dict[str, Any]
    fingerprint: str
    images: str
    shards: str
    parts: str
    report: str


@dataclass(frozen=True)
class DatasetRecord:
    """Content of dataset.json."""

    settings: dict[str, Any]
    deliveries: list[Delivery] = field(default_factory=list)
    removed: str | None = None
    """Path of the table of removed images; None if no image was removed."""
    removed_count: int = 0
    """Number of removed images, not counting held-out ones."""
    removed_held_out: int = 0
    """Number of images removed from the held-out dataset beside this training set, if there is one."""
    indexes: dict[str, list[str]] = field(default_factory=dict)
    """SHA-256 of all versions of index.json by bucket, oldest first, to recognize latents made from any of them."""
    kept: list[str] = field(default_factory=list)
    """Paths of old shards, replaced when images were removed, but kept since running jobs may still read them."""
    obsolete: list[str] = field(default_factory=list)
    """Paths of files to delete once the indexes are up to date."""

    def content(self) -> bytes:
        return (json.dumps({'version': VERSION, **asdict(self)}, indent=1) + '\n').encode()

    @classmethod
    def parse(cls, content: bytes, where: object) -> 'DatasetRecord':
        try:
            values = json.loads(content)
            if (version := values.pop('version')) != VERSION:
                raise UserError(
                    f'{where}/{RECORD}: has format {version}, and this version of diffusion reads format {VERSION}. '
                    'To fix: prepare the data again, or use the version of diffusion that prepared it'
                )
            return cls(**values | {'deliveries': [Delivery(**each) for each in values['deliveries']]})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f'{where}/{RECORD}: is damaged ({error}); restore it, or prepare the data again') from error


def comparable_settings(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all deliveries of a dataset must share: `content` without source and key_prefix."""
    shared = {name: value for name, value in sorted(content.items()) if name not in ('source', 'key_prefix')}
    return json.loads(json.dumps(shared))


class RecordedDataset:
    """A prepared dataset and the record read from it."""

    def __init__(self, place: str, scratch: Path) -> None:
        self.folder = place_at(place, scratch)
        self.scratch = scratch
        self.version: str | None = None
        self.record = DatasetRecord({})
        self._read: dict[str, Any] = {}
        self.refresh()

    def refresh(self) -> None:
        found = self.folder.read_version(RECORD)
        if found is None:
            raise UserError(
                f'{self.folder}: has no {RECORD}, so it is not a prepared dataset. '
                'To fix: prepare the first delivery without --append'
            )
        self.version, self.record = found.version, DatasetRecord.parse(found.content, self.folder)

    def token(self, *purpose: str) -> str:
        """Return 8 hex digits for the file names of one change to this version of the dataset.

        The same change always gets the same names and content, so it can be resumed; any other change gets other names.
        """
        return hashlib.sha256('\0'.join([self.record.content().decode(), *purpose]).encode()).hexdigest()[:8]

    def commit(self, record: DatasetRecord) -> None:
        """Replace the record to make a change effective; raise PreconditionFailed if it has changed since `refresh`."""
        self.folder.replace(RECORD, record.content(), self.version)
        self.refresh()

    def json(self, name: str) -> Any:
        """Return the content of one of the record's JSON files; the caller must not modify it."""
        # The record's files never change once written, so read each only once.
        if name not in self._read:
            self._read[name] = json.loads(self.path(name).read_text(encoding='utf-8'))
        return self._read[name]

    def path(self, name: str) -> Path:
        """Return a local path of one of the record's files, after downloading it if necessary."""
        path = self.folder.fetch(name)
        if not path.exists():
            raise UserError(f'{self.folder}/{name}: is missing; restore it, or prepare the data again')
        return path

    def paths(self, names: Iterable[str]) -> list[Path]:
        """Return local paths of several of the record's files, downloaded in parallel."""
        with ThreadPoolExecutor(FETCHES) as threads:
            return list(threads.map(self.path, names))

    def entries(self, deliveries: list[Delivery] | None = None) -> dict[str, list[dict[str, Any]]]:
        """Return the index entries of the shards of some deliveries (None: all) by bucket, in delivery order."""
        found: dict[str, list[dict[str, Any]]] = {}
        deliveries = self.record.deliveries if deliveries is None else deliveries
        self.paths(delivery.shards for delivery in deliveries if delivery.shards not in self._read)
        for delivery in deliveries:
            for bucket, entries in self.json(delivery.shards).items():
                found.setdefault(bucket, []).extend(entries)
        return found

    def shard_names(self) -> set[str]:
        """Return the paths of all the dataset's shards, including replaced shards kept for running jobs."""
        used = (
            f'{bucket}/{shard["raw_data"]["basename"]}' for bucket, shards in self.entries().items() for shard in shards
        )
        return {*used, *self.record.kept}

    def earlier_images(self) -> EarlierImages:
        """Return the hashes of all images, including held-out and removed ones."""
        removed = None if self.record.removed is None else self.path(self.record.removed)
        return EarlierImages.read(self.paths(delivery.images for delivery in self.record.deliveries), removed)

    def known_parts(self, source: Mapping[str, Any]) -> dict[str, set[str]]:
        known: dict[str, set[str]] = {}
        for delivery in self.record.deliveries:
            if delivery.source == source:
                for name, stamp in self.json(delivery.parts).items():
                    known.setdefault(name, set()).add(stamp)
        return known

    def next_shard(self, bucket: str) -> int:
        """Return the number for a bucket's next new shard, higher than that of any current or former shard."""
        names = (name.rpartition('/') for name in self.shard_names())
        return max((int(file.split('.')[1]) + 1 for folder, _, file in names if folder == bucket), default=0)

    def update_indexes(self) -> None:
        """Update each bucket's index.json, and buckets.json of resolutions with aspect ratios, to match the record.

        Each file is replaced atomically. Several processes may do this at once; none of them replaces a newer version
        of a file with an older one.
        """
        for name in [f'{bucket}/{mds.INDEX}' for bucket in self.record.indexes]:
            self._update(name)
        for size in dict.fromkeys(bucket.partition('/')[0] for bucket in self.record.indexes if '/' in bucket):
            self._update(f'{size}/{BUCKETS}')

    def _update(self, name: str) -> None:
        while True:
            # Read the file before the record. The conditional write then fails if another process with a newer record
            # has written the file in the meantime.
            found = self.folder.read_version(name)
            self.refresh()
            content = index_files(self.entries())[name].encode()
            if found is not None and found.content == content:
                return
            try:
                self.folder.replace(name, content, None if found is None else found.version)
                return
            except PreconditionFailed:
                continue

    def delete_obsolete(self) -> None:
        """Delete the files in `record.obsolete`, which a change replaced; call this once the indexes are up to date."""
        while self.record.obsolete:
            self.folder.delete(self.record.obsolete)
            try:
                self.commit(replace(self.record, obsolete=[]))
            except PreconditionFailed:
                self.refresh()


def index_hashes(entries: Entries) -> Iterator[tuple[str, str]]:
    """Yield (bucket, SHA-256 of its index.json) for each bucket."""
    for bucket, shards in entries.items():
        yield bucket, hashlib.sha256(mds.index_text(shards).encode()).hexdigest()


def with_indexes(record: DatasetRecord, entries: Entries) -> DatasetRecord:
    """Return the record with each bucket's current index hash appended to its hashes, unless it is already last."""
    indexes = {bucket: list(hashes) for bucket, hashes in record.indexes.items()}
    for bucket, digest in index_hashes(entries):
        if indexes.setdefault(bucket, [])[-1:] != [digest]:
            indexes[bucket].append(digest)
    return replace(record, indexes=indexes)


def delivery_folder(number: int, token: str) -> str:
    return f'deliveries/{number:05}-{token}'


def write_delivery(dataset: Path, number: int, token: str, plan: InputPlan, entries: Entries) -> Delivery:
    """Write a delivery's shards.json and parts.json into a local dataset folder; return the delivery with all paths."""
    folder = delivery_folder(number, token)
    files = (f'{folder}/{name}' for name in (IMAGES, SHARDS, PARTS, REPORT))
    delivery = Delivery(plan.settings['source'], plan.fingerprint, *files)
    write_atomically(dataset / delivery.shards, json.dumps(entries, sort_keys=True))
    write_atomically(dataset / delivery.parts, json.dumps({part.name: part.stamp for part in plan.parts.heads}))
    return delivery


def index_files(entries: Entries) -> dict[str, str]:
    """Return, by name, index.json for each bucket, and buckets.json for each resolution with aspect ratio buckets."""
    files = {f'{bucket}/{mds.INDEX}': mds.index_text(shards) for bucket, shards in entries.items()}
    by_size: dict[str, dict[Shape, dict[str, int]]] = {}
    for bucket, shards in entries.items():
        size, _, shape = bucket.partition('/')
        if shape:
            counts = {
                'samples': sum(shard['samples'] for shard in shards),
                'bytes': sum(shard['raw_data']['bytes'] for shard in shards),
            }
            by_size.setdefault(size, {})[parse_shape(shape)] = counts
    for size, shapes in by_size.items():
        files[f'{size}/{BUCKETS}'] = buckets_text(int(size.removesuffix('px')), shapes)
    return files
