"""Choice of what to read of a Hugging Face dataset: the configuration, the layout of its files, and the split."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError
from diffusion.prepare import arrow_dataset, parquet, webdataset
from diffusion.prepare.arrow_dataset import saved_files
from diffusion.prepare.dataset_card import DataFiles, choose_config
from diffusion.prepare.dataset_listing import DatasetListing
from diffusion.prepare.dataset_splits import KEYWORDS, TRAIN, choose_split, group_by_split, split_in
from diffusion.prepare.file_listing import is_inside
from diffusion.prepare.folder_source import METADATA_FILES, texts_beside
from diffusion.prepare.image_table import CAPTION_COLUMNS, URL_COLUMNS, download_first
from diffusion.prepare.sorted_files import File
from diffusion.prepare.source import PassedOver

LAYOUTS: dict[str, tuple[str, ...]] = {
    'parquet': (parquet.SUFFIX,),
    'webdataset': webdataset.SUFFIXES,
    'arrow': (arrow_dataset.SUFFIX,),
    'folder': (),
}
"""Layouts, with the suffixes of their files; those of images depend on the settings."""
TABLE_SUFFIXES = ('.csv', '.tsv', '.jsonl', '.json')
"""Suffixes of tables that hold no images, at most their addresses."""
ARCHIVE_SUFFIXES = ('.zip', '.7z', '.rar')
MAX_TABLE_BYTES = 2**26
"""Size of a table up to which its columns are looked up for a message."""


@dataclass(frozen=True)
class Choice:
    """What is read of a dataset."""

    layout: str
    """A key of LAYOUTS."""
    split: str
    files: list[File]
    """Data files of the split."""
    others: list[PassedOver]
    """Files that are not read, each with the reason."""


@dataclass(frozen=True)
class Chooser:
    """Chooses the files of one split of one configuration of a dataset."""

    dataset: DatasetListing
    location: str
    """The dataset in messages."""
    split: str | None
    config: str | None
    image_suffixes: tuple[str, ...]
    caption_suffix: str = 'txt'

    def choose(self) -> Choice:
        """Return the files to read.

        Raises:
            UserError: There is no such split or configuration, several to choose from, or no images.
        """
        dataset = self.dataset
        files = [file for file in dataset.files if is_inside(file.name, dataset.path)]
        if not files:
            what = 'no file matches' if dataset.path else 'is empty'
            raise UserError(f'{self.location}: {what}; see the files of {dataset.title}')
        found = self._saved(files) or self._by_names(files)
        names = {file.name for file in files}
        found.others.extend(PassedOver(file.name, 'other path') for file in dataset.files if file.name not in names)
        return found

    def _saved(self, files: list[File]) -> Choice | None:
        """Return the files to read if `save_to_disk` wrote the dataset, otherwise None."""
        dataset, by_name = self.dataset, {file.name: file for file in files}
        roots: dict[str, dict[str, str]] = {}
        for folder in self._saved_folders(files):
            # A folder with a dictionary of datasets has one folder per split.
            parent, _, name = folder.rstrip('/').rpartition('/')
            root = f'{parent}/' if parent else ''
            is_split = folder and any(file.name == root + arrow_dataset.SPLITS for file in dataset.files)
            roots.setdefault(root if is_split else folder, {})[folder] = name if is_split else ''
        if not roots or ('' not in roots and self._layout(files) != 'arrow'):
            return None
        if len(roots) > 1:
            listed = ', '.join(sorted(root.rstrip('/') or '.' for root in roots))
            raise UserError(f'{self.location}: has several saved datasets: {listed}; give the folder of one of them')
        splits: dict[str, list[File]] = {}
        for folder, split_name in next(iter(roots.values())).items():
            state = folder + arrow_dataset.STATE
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
        """Return the folders that `save_to_disk` wrote, each with a slash at its end, sorted."""
        names = {file.name for file in files}
        with_arrow = {file.name.rpartition('/')[0] for file in self.data_files('arrow', files)}
        found = []
        for name in sorted(names):
            folder, slash, last = name.rpartition('/')
            is_saved = folder in with_arrow or f'{folder}{slash}{arrow_dataset.INFO}' in names
            if last == arrow_dataset.STATE and is_saved:  # other programs write a state.json too
                found.append(folder + slash)
        return found

    def _by_names(self, files: list[File]) -> Choice:
        """Return the files to read by the card of the dataset and by the names of its files."""
        chosen = self._config()
        splits = chosen.splits_of(files)
        if not splits and self.dataset.path and self.config is None:
            chosen, splits = DataFiles(), {}  # the user named files that the card does not
        if chosen.config is None:
            chosen = self._folder_config(files)
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
        others = _others(files, splits[split], splits, of_config=self.data_files(layout, files))
        return Choice(layout, split, splits[split], others)

    def _refuse_unnamed(self, splits: Mapping[str, list[File]], none: Sequence[File]) -> None:
        """Refuse to take a split such as `test`, the only one that files are named after, for the training data."""
        if none and self.split is None and all(split_in(split) != TRAIN for split in splits):
            raise UserError(
                f'{self.location}: has the split {", ".join(splits)}, and {len(none)} files of no split, such as '
                f'{none[0].name}; choose the split with --split, or the other files by a folder or a pattern'
            )

    def _config(self) -> DataFiles:
        """Return the configuration to read by the card of the dataset."""
        listed = self.dataset.card.get('configs')
        if self.dataset.path and self.config is None and isinstance(listed, list) and len(listed) > 1:
            return DataFiles()  # the user named the files
        return choose_config(self.dataset.card, self.config, self.location)

    def _refuse_overlap(self, splits: Mapping[str, list[File]], chosen: str) -> None:
        """Refuse a split that shares a file with one for testing, as the patterns of a card may say."""
        names = {file.name for file in splits[chosen]}
        for split, group in splits.items():
            shared = next((file.name for file in group if file.name in names), None)
            if shared is not None and split_in(split) not in (None, TRAIN, split_in(chosen)):
                raise UserError(
                    f'{self.location}: {shared} is in the splits {chosen} and {split} by the dataset card, so training '
                    'would see images of a test; name the files to read by a pattern, such as data/train-*'
                )

    def _folder_config(self, files: Sequence[File]) -> DataFiles:
        """Return the configuration to read of a dataset whose card has none: folders CONFIG/SPLIT, as in the Hub's own
        Parquet copies.
        """
        names = {
            file.name.split('/')[0]
            for file in files
            if file.name.count('/') == 2
            and file.name.lower().endswith(parquet.SUFFIX)
            and file.name.split('/')[1].removeprefix('partial-') in KEYWORDS
            and split_in(file.name.split('/')[0]) is None
        }
        if self.config is None and len(names) > 1:
            listed = ', '.join(sorted(names))
            raise UserError(f'{self.location}: has the configurations {listed}; choose one with --config')
        if self.config is not None and self.config not in names:
            near = did_you_mean(self.config, names) if names else 'it has none; leave --config out'
            raise UserError(f'{self.location}: has no configuration {self.config!r}; {near}')
        return DataFiles(self.config, self.config or '')

    def _layout(self, files: Sequence[File]) -> str:
        """Return the layout of some files: the one with the most bytes, since a dataset of Parquet files may have a few
        images for its card. Images without captions do not count beside tables, which may name them by path.

        Raises:
            UserError: There are no images.
        """
        sizes = {layout: sum(file.size for file in self.data_files(layout, files)) for layout in LAYOUTS}
        present = [layout for layout in LAYOUTS if self.data_files(layout, files)]
        if len(present) > 1 and not self._has_captions(files):
            present.remove('folder')
        if present:
            return max(present, key=lambda layout: sizes[layout])
        for file in files:
            if file.name.lower().endswith(TABLE_SUFFIXES):
                self._refuse_table(file)
        archive = next((file.name for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)), None)
        if archive is not None:
            raise UserError(
                f'{self.location}: has its images in {archive}; download it with `hf download`, unpack it, and give '
                'the folder to `diffusion prepare huggingface` or `diffusion prepare folder`'
            )
        raise UserError(f'{self.location}: has no Parquet files, tars, Arrow files or images')

    def _has_captions(self, files: Sequence[File]) -> bool:
        """Return True if there are no images, or captions for them: in a metadata file, or beside one."""
        images = self.data_files('folder', files)
        beside = texts_beside(images, files, self.caption_suffix)
        return not images or bool(beside) or any(map(_is_metadata, files))

    def _refuse_table(self, file: File) -> None:
        """Refuse a table of addresses; return if it has none."""
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
        """Return those of some files that hold the data of a layout; for images, the images alone."""
        if layout == 'folder':
            suffixes = tuple(f'.{suffix}' for suffix in self.image_suffixes)
            return [file for file in files if file.name.lower().endswith(suffixes)]
        suffixes = LAYOUTS[layout]
        return [file for file in files if file.name.lower().endswith(suffixes) and not _is_metadata(file)]


def _is_metadata(file: File) -> bool:
    return file.name.rpartition('/')[2].lower() in METADATA_FILES


def _others(
    files: Sequence[File],
    chosen: Sequence[File],
    splits: Mapping[str, list[File]],
    *,
    of_config: Sequence[File] = (),
) -> list[PassedOver]:
    """Return the files that are not read, each with the split or the reason for which it is not."""
    used = {file.name for file in chosen}
    reasons = {file.name: 'other configuration or no split' for file in of_config}
    reasons |= {file.name: f'split {split}' for split, group in splits.items() for file in group}
    return [PassedOver(file.name, reasons.get(file.name)) for file in files if file.name not in used]
