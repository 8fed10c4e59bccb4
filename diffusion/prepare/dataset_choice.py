"""List the files of a Hugging Face dataset; choose configuration, split and kind of files (layout) to read."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from diffusion.errors import UserError
from diffusion.prepare import parquet, webdataset
from diffusion.prepare.dataset_splits import (
    KEYWORDS,
    TRAIN,
    DataFiles,
    choose_config,
    choose_split,
    group_by_split,
    split_in,
)
from diffusion.prepare.file_listing import File, is_inside, is_pattern, list_files
from diffusion.prepare.folder_source import METADATA_FILES, texts_beside
from diffusion.prepare.hub_repository import Hub, is_on_hub, parse_name
from diffusion.prepare.image_table import CAPTION_COLUMNS, URL_COLUMNS, download_first
from diffusion.prepare.source import PassedOver, is_hidden
from diffusion.prepare.tfrecord import is_tfrecord
from diffusion.storage.places import is_url

CARD = 'README.md'
MAX_HEADER_BYTES = 2**20
"""Maximum number of characters of a dataset card's YAML header; longer ones are rejected, since it is untrusted."""


@dataclass(frozen=True)
class DatasetListing:
    """A dataset's listed files and its card."""

    title: str
    """Name for the report; includes the commit if the dataset is on the Hub."""
    files: list[File]
    """All files that are not hidden."""
    hidden: list[PassedOver]
    path: str
    """Path or pattern that the user gave, relative to the dataset; empty means the whole dataset."""
    hub: Hub
    card: dict[str, Any]

    @classmethod
    def open(cls, location: str, hub: Hub, commit: str | None = None) -> 'DatasetListing':
        """List the files of a dataset in a folder or on the Hub, at `commit` if given, and read its card."""
        title = location = location.removeprefix('file://')
        name = None if os.path.exists(location) else parse_name(location)
        others: list[PassedOver] = []
        if name is not None:
            commit, listed = hub.list_repository(name.repository, commit or name.revision)
            title = f'{name.repository} at commit {commit}'
        else:
            _check_folder(location)
            listed, others = list_files(location, None)
        files = [file for file in listed if not is_hidden(file.name)]
        hidden = [PassedOver(file.name) for file in listed if is_hidden(file.name)]
        dataset = cls(title, files, [*hidden, *others], '' if name is None else name.path, hub, {})
        card = next((file for file in files if file.name == CARD), None)
        return dataset if card is None else replace(dataset, card=read_card(dataset.read(card), f'{title}: {CARD}'))

    @property
    def license(self) -> str | None:
        """License stated in the card, such as `cc-by-4.0`; empty if none is stated, None for a folder without card."""
        value = self.card.get('license')
        names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
        names += [str(self.card[name]) for name in ('license_name', 'license_link') if self.card.get(name)]
        has_card = any(file.name == CARD or is_on_hub(file.url) for file in self.files)
        return ', '.join(names) or ('' if has_card else None)

    def read(self, file: File) -> bytes:
        with self.hub.copies([file]) as paths:
            return paths[file.url].read_bytes()

    @contextmanager
    def copy(self, url: str) -> Iterator[Path]:
        """Yield a local path of one of the dataset's files, given its URL; the copy of a remote file is temporary."""
        with self.hub.copies([file for file in self.files if file.url == url]) as paths:
            yield paths[url]


def read_card(text: bytes, where: str) -> dict[str, Any]:
    """Return a dataset card's YAML header as a dictionary; empty if it has none. Raise UserError if it is invalid."""
    first, *lines = text.decode('utf-8-sig', 'replace').splitlines() or ['']
    end = next((number for number, line in enumerate(lines) if line.rstrip() == '---'), None)
    if first.rstrip() != '---' or end is None:
        return {}
    header = '\n'.join(lines[:end])
    if len(header) > MAX_HEADER_BYTES:
        raise UserError(f'{where}: its YAML header has {len(header)} characters; shorten it in a local copy')
    try:
        # YAML aliases could expand to gigabytes, and no card needs them.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header, yaml.SafeLoader)):
            raise yaml.YAMLError('it has aliases; remove them in a local copy')
        content = yaml.safe_load(header)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f'{where}: its YAML header is not valid ({" ".join(str(error).split())})') from error
    return content if isinstance(content, dict) else {}


def _check_folder(location: str) -> None:
    """Raise UserError unless a location is a folder (other than a repository's Hub cache), pattern or store URL."""
    is_elsewhere = ('{' in location or is_pattern(location) or is_url(location)) and not location.startswith(
        ('http://', 'https://')
    )
    if not os.path.exists(location) and not is_elsewhere:
        raise UserError(
            f'{location}: is neither a folder nor the name of a dataset on the Hub; use ORG/NAME, '
            'ORG/NAME@REVISION, hf://datasets/ORG/NAME/PATH or a folder'
        )
    if all(os.path.isdir(os.path.join(location, name)) for name in ('snapshots', 'blobs')):
        snapshots = sorted(os.listdir(os.path.join(location, 'snapshots')))
        raise UserError(
            f'{location}: is the cache of a Hub repository, which has every file twice; give a snapshot in it, such as '
            f'{os.path.join(location, "snapshots", snapshots[0] if snapshots else "COMMIT")}'
        )


LAYOUTS: dict[str, tuple[str, ...]] = {
    'parquet': (parquet.SUFFIX,),
    'webdataset': webdataset.SUFFIXES,
    'tfrecord': (),
    'arrow': (parquet.ARROW_SUFFIX,),
    'folder': (),
}
"""File suffixes by layout, the kind of files in which a dataset has its images. `folder` (image files) has none here,
since the image suffixes are a setting; `tfrecord` has none, since `is_tfrecord` recognizes the names of TFRecords."""
TABLE_SUFFIXES = ('.csv', '.tsv', '.jsonl', '.json')
"""Suffixes of tables that contain no images, though they may contain image URLs."""
STATE = 'state.json'
"""File that `datasets`' save_to_disk() writes beside its Arrow files, with their names and the split."""
INFO = 'dataset_info.json'
SPLITS = 'dataset_dict.json'
"""File that save_to_disk() writes for a dictionary of datasets, which has one folder per split."""
ARCHIVE_SUFFIXES = ('.zip', '.7z', '.rar')
MAX_TABLE_BYTES = 2**26
"""Maximum size in bytes of a table that is read to find out whether it has a column of image URLs."""


@dataclass(frozen=True)
class Choice:
    """The files of a dataset to read, and their layout (a key of `LAYOUTS`); `others` are skipped."""

    layout: str
    split: str
    files: list[File]
    others: list[PassedOver]


@dataclass(frozen=True)
class Chooser:
    """Chooses the files of one split of one configuration of a dataset."""

    dataset: DatasetListing
    location: str
    """The dataset's name in messages."""
    split: str | None
    config: str | None
    image_suffixes: tuple[str, ...]
    caption_suffix: str = 'txt'
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    def choose(self) -> Choice:
        dataset = self.dataset
        files = [file for file in dataset.files if is_inside(file.name, dataset.path)]
        if not files:
            what = 'no file matches' if dataset.path else 'is empty'
            raise UserError(f'{self.location}: {what}; see the files of {dataset.title}')
        found = (self._saved(files) if 'arrow' in self.layouts else None) or self._by_names(files)
        names = {file.name for file in files}
        found.others.extend(PassedOver(file.name, 'other path') for file in dataset.files if file.name not in names)
        return found

    def _saved(self, files: list[File]) -> Choice | None:
        """Return the files to read if the dataset was written by `save_to_disk`, otherwise None."""
        dataset, by_name = self.dataset, {file.name: file for file in files}
        roots: dict[str, dict[str, str]] = {}
        for folder in self._saved_folders(files):
            # For a dictionary of datasets, save_to_disk() writes one folder per split.
            parent, _, name = folder.rstrip('/').rpartition('/')
            root = f'{parent}/' if parent else ''
            is_split = folder and any(file.name == root + SPLITS for file in dataset.files)
            roots.setdefault(root if is_split else folder, {})[folder] = name if is_split else ''
        if not roots or ('' not in roots and self._layout(files) != 'arrow'):
            return None
        if len(roots) > 1:
            listed = ', '.join(sorted(root.rstrip('/') or '.' for root in roots))
            raise UserError(f'{self.location}: has several saved datasets: {listed}; give the folder of one of them')
        splits: dict[str, list[File]] = {}
        for folder, split_name in next(iter(roots.values())).items():
            state = folder + STATE
            listed, split = saved_files(dataset.read(by_name[state]), f'{dataset.title}: {state}')
            missing = [each for each in listed if folder + each not in by_name]
            if missing:
                raise UserError(f'{dataset.title}: lacks {folder}{missing[0]}, which {state} lists; copy it again')
            splits[split_name or split or TRAIN] = [by_name[folder + each] for each in listed]
        split = choose_split(splits, self.split, self.location)
        if not splits[split]:
            raise UserError(f'{self.location}: the split {split} has no rows')
        return Choice('arrow', split, splits[split], _others(files, splits[split], splits))

    def _saved_folders(self, files: list[File]) -> list[str]:
        """Return the sorted folders written by `save_to_disk`, with a trailing slash; '' is the top folder."""
        # Require Arrow files or dataset_info.json beside state.json: other programs also write files with that name.
        saved = {file.name.rpartition('/')[0] for file in self.data_files('arrow', files)}
        saved |= {file.name.removesuffix(INFO).rstrip('/') for file in files if f'/{file.name}'.endswith(f'/{INFO}')}
        states = (file.name.removesuffix(STATE) for file in files if f'/{file.name}'.endswith(f'/{STATE}'))
        return sorted(folder for folder in states if folder.rstrip('/') in saved)

    def _by_names(self, files: list[File]) -> Choice:
        """Return the files to read according to patterns in the dataset's card or, if it has none, to file names."""
        chosen, splits = self._config(files)
        prefix = f'{chosen.folder}/' if chosen.folder else ''
        candidates = [file for file in files if file.name.startswith(prefix)]
        if chosen.patterns:
            if not splits:
                raise UserError(f'{self.location}: no file matches the patterns of its card for {chosen.config}')
            layout = self._layout([file for group in splits.values() for file in group])
            splits = {split: self.data_files(layout, group) for split, group in splits.items()}
        else:
            layout = self._layout(candidates)
            data = self.data_files(layout, candidates)
            splits, none = group_by_split(data, lambda file: file.name.removeprefix(prefix), by_file=layout != 'folder')
            self._refuse_unnamed(splits, none)
        splits = {split: group for split, group in splits.items() if group}
        split = choose_split(splits, self.split, self.location)
        self._refuse_overlap(splits, split)
        others = _others(files, splits[split], splits, of_layout=self.data_files(layout, files))
        return Choice(layout, split, splits[split], others)

    def _refuse_unnamed(self, splits: Mapping[str, list[File]], none: Sequence[File]) -> None:
        """Raise UserError if the user chose no split, no split is for training, and there are files without a split.

        These files, `none`, may be the training images.
        """
        if none and self.split is None and all(split_in(split) != TRAIN for split in splits):
            raise UserError(
                f'{self.location}: has the split {", ".join(splits)}, and {len(none)} files without a split, such as '
                f'{none[0].name}; choose the split with --split, or give a folder or pattern of the other files'
            )

    def _config(self, files: Sequence[File]) -> tuple[DataFiles, dict[str, list[File]]]:
        """Return the configuration to read, and the files that match the card's patterns for it, if any, by split."""
        # If the card lists no configurations, take them from folders CONFIG/SPLIT, as in the Hub's own Parquet copies.
        paths = (file.name.split('/') for file in files if file.name.lower().endswith(parquet.SUFFIX))
        folders = {
            path[0]
            for path in paths
            if len(path) == 3 and path[1].removeprefix('partial-') in KEYWORDS and split_in(path[0]) is None
        }
        configs, named = self.dataset.card.get('configs'), self.dataset.path and self.config is None
        if not (named and isinstance(configs, list) and len(configs) > 1):
            chosen = choose_config(configs, folders, self.config, self.location)
            splits = chosen.splits_of(files)
            if splits or not named:
                return chosen, splits
        return choose_config(None, folders, self.config, self.location), {}  # the user chose the files

    def _refuse_overlap(self, splits: Mapping[str, list[File]], chosen: str) -> None:
        """Raise UserError if a file of the chosen split is also in a test or validation split other than this one."""
        names = {file.name for file in splits[chosen]}
        for split, group in splits.items():
            shared = next((file.name for file in group if file.name in names), None)
            if shared is not None and split_in(split) not in (None, TRAIN, split_in(chosen)):
                raise UserError(
                    f'{self.location}: {shared} is in the splits {chosen} and {split} according to the dataset '
                    'card, so training would see test images; select the files by a pattern, such as data/train-*'
                )

    def _layout(self, files: Sequence[File]) -> str:
        """Return the layout (a key of `LAYOUTS`) whose files have the most bytes.

        Image files without captions are used only if no other layout has files. Raise UserError if none has.
        """
        found = {layout: data for layout in self.layouts if (data := self.data_files(layout, files))}
        if len(found) > 1 and 'folder' in found:
            beside = texts_beside(found['folder'], files, self.caption_suffix)
            if not beside and not any(map(is_metadata, files)):
                del found['folder']
        if found:
            return max(found, key=lambda layout: sum(file.size for file in found[layout]))
        if self.layouts == ('tfrecord',):
            raise UserError(
                f'{self.location}: has no TFRecord files (.tfrecord, .tfrecord-00000-of-00008), only {files[0].name}; '
                'for ArrayRecords, run `tfds build --file_format=tfrecord`'
            )
        for file in files:
            if file.name.lower().endswith(TABLE_SUFFIXES):
                self._refuse_table(file)
        archive = next((file.name for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)), None)
        if archive is not None:
            raise UserError(
                f'{self.location}: has its images in {archive}; download it with `hf download`, unpack it, and give '
                'the folder to `diffusion prepare huggingface` or `diffusion prepare folder`'
            )
        raise UserError(f'{self.location}: has no Parquet files, tars, TFRecords, Arrow files or images')

    def _refuse_table(self, file: File) -> None:
        """Raise UserError if the first line of a table names a column of image URLs; large tables are not read."""
        if file.size > MAX_TABLE_BYTES:
            return
        line = self.dataset.read(file).decode('utf-8-sig', 'replace').partition('\n')[0]
        try:
            columns = list(json.loads(line)) if line.startswith('{') else next(csv.reader([line]), [])
        except (ValueError, csv.Error):
            return
        address = next((name for name in columns if name.lower() in URL_COLUMNS), None)
        if address is not None:
            caption = next((name for name in columns if name.lower() in CAPTION_COLUMNS), None)
            raise UserError(download_first(file.url, address, caption, suffix=Path(file.name).suffix))

    def data_files(self, layout: str, files: Sequence[File]) -> list[File]:
        """Return the files whose names belong to a layout; caption files, such as metadata.parquet, do not."""
        if layout == 'folder':
            suffixes = tuple(f'.{suffix}' for suffix in self.image_suffixes)
            return [file for file in files if file.name.lower().endswith(suffixes)]
        if layout == 'tfrecord':
            return [file for file in files if is_tfrecord(file.name)]
        suffixes = LAYOUTS[layout]
        return [file for file in files if file.name.lower().endswith(suffixes) and not is_metadata(file)]


def is_metadata(file: File) -> bool:
    """Return True if a file is the caption file of an imagefolder dataset."""
    return file.name.rpartition('/')[2].lower() in METADATA_FILES


def _others(
    files: Sequence[File], chosen: Sequence[File], splits: Mapping[str, list[File]], *, of_layout: Sequence[File] = ()
) -> list[PassedOver]:
    """Return the files that are not in `chosen`, each with the reason for skipping it, such as its split.

    `of_layout`: All data files in the chosen layout, including other configurations'. A file of these that is not in
    `splits` belongs to another configuration or has no split in its name.
    """
    used = {file.name for file in chosen}
    reasons = {file.name: 'other configuration or no split' for file in of_layout}
    reasons |= {file.name: f'split {split}' for split, group in splits.items() for file in group}
    return [PassedOver(file.name, reasons.get(file.name)) for file in files if file.name not in used]


def saved_files(state: bytes, where: str) -> tuple[list[str], str | None]:
    """Return the names of a saved dataset's Arrow files, and its split or None; `state` is its state.json's content."""
    try:
        content: dict[str, Any] = json.loads(state)
        names = [str(each['filename']) for each in content['_data_files']]
        split = content.get('_split')
        indices = content.get('_indices_data_files') or content.get('_indices_files')
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f'{where}: is not the state of a dataset ({error!r}); save it again with save_to_disk'
        ) from error
    if indices:
        raise UserError(f'{where}: selects rows by indices; call flatten_indices() before save_to_disk')
    if any('/' in name for name in names):
        raise UserError(f'{where}: names files outside its folder ({", ".join(names[:3])}); save it again')
    return names, None if split is None else str(split).partition('[')[0]
