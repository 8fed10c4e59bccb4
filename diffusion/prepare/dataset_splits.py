"""Find a dataset's configurations and splits (train, validation, test) in its card or else in its file names.

File names are interpreted as in the package `datasets`, by the first rule that applies to any file: files such as
`data/NAME-00000-of-00002.parquet` or, as TensorFlow Datasets writes them, `flowers-NAME.tfrecord-00000-of-00002` belong
to the split NAME; folders are named after splits (`test/0000.parquet`); files are named after splits
(`images-val-0000.tar`). If no rule applies, all files are in the split `train`.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError
from diffusion.prepare.file_listing import File, is_inside

TRAIN = 'train'
KEYWORDS = {
    TRAIN: ('train', 'training'),
    'validation': ('validation', 'valid', 'dev', 'val'),
    'test': ('test', 'testing', 'eval', 'evaluation'),
}
_SPLIT_OF_WORD = {word: split for split, words in KEYWORDS.items() for word in words}
# As in `datasets`, a word must come after a separator, a digit or the start, and before a separator, a digit or the
# end.
_WORD = re.compile(rf'(?:^|[-._ 0-9])({"|".join(sorted(_SPLIT_OF_WORD, key=len, reverse=True))})(?=$|[-._ 0-9])', re.I)
_SHARDED = re.compile(r'data/([\w.]+)-\d{5}-of-\d{5}[^/]*')
_TFDS = re.compile(r'(?:.*/)?[^/]*-(\w+)\.tfrecord-\d+-of-\d+(?:\.gz)?')
_SHARD_START = re.compile(rf'({"|".join(_SPLIT_OF_WORD)})(?:[-_. ]?\d[^/]*)?\.(?:parquet|tar|tar\.gz|tgz|arrow)', re.I)
Named = TypeVar('Named')


@dataclass(frozen=True)
class DataFiles:
    config: str | None = None
    """Name of the configuration; None if the dataset has no named ones."""
    folder: str = ''
    patterns: Mapping[str, list[str]] = field(default_factory=dict)
    """File patterns by split, relative to `folder`; empty if splits are determined by file names."""

    def splits_of(self, files: Sequence[File]) -> dict[str, list[File]]:
        """Return the files that match the patterns, by split; splits without files are left out."""
        prefix = f'{self.folder}/' if self.folder else ''
        inside = [file for file in files if file.name.startswith(prefix)]
        splits: dict[str, list[File]] = {}
        for split, patterns in self.patterns.items():
            wanted = [pattern.removeprefix('./').rstrip('/') for pattern in patterns]
            found = [file for file in inside if any(is_inside(file.name.removeprefix(prefix), each) for each in wanted)]
            if found:
                splits[split] = found
        return splits


def choose_config(listed: Any, folders: Iterable[str], wanted: str | None, where: str) -> DataFiles:
    """Return folder and patterns of the configuration to read: the one requested, the only one, or the default.

    Args:
        listed: `configs` from the dataset's card, or None.
        folders: Names of configurations if the card lists none; ignored if fewer than two, unless `wanted` is set.
    """
    if not listed and wanted is None and len(set(folders)) < 2:
        return DataFiles()
    listed = listed or [{'config_name': name, 'data_dir': name} for name in sorted(folders)]
    if not isinstance(listed, list) or not all(isinstance(each, dict) and each.get('config_name') for each in listed):
        raise UserError(f'{where}: its card has invalid `configs`; list objects with `config_name` in a local copy')
    configs = {str(each['config_name']): each for each in listed}
    defaults = [name for name, each in configs.items() if each.get('default') is True or name == 'default']
    if wanted is None and len(configs) > 1 and not defaults:
        names = ', '.join(configs)
        raise UserError(
            f'{where}: has the configurations {names}; choose one with --config, such as {next(iter(configs))}'
        )
    name = wanted or next(iter(defaults or configs))
    if name not in configs:
        near = did_you_mean(name, configs) if configs else 'it has none; leave --config out'
        raise UserError(f'{where}: has no configuration {name!r}; {near}')
    folder = str(configs[name].get('data_dir') or '').strip('/').removeprefix('./')
    return DataFiles(name, folder, _patterns(configs[name].get('data_files'), f'{where}: config {name}'))


def _patterns(value: Any, where: str) -> dict[str, list[str]]:
    """Return the patterns in a card's `data_files` by split; files without a split are for training."""
    if isinstance(value, dict):
        value = [{'split': split, 'path': path} for split, path in value.items()]
    elif value is not None and (not isinstance(value, list) or all(isinstance(each, str) for each in value)):
        value = [{'path': value}]
    found: dict[str, list[str]] = {}
    for each in value or ():
        paths = each.get('path') if isinstance(each, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UserError(f'{where}: `data_files` of its card is invalid at {each!r}; correct a local copy')
        found.setdefault(str(each.get('split', TRAIN)), []).extend(paths)
    return found


def split_in(name: str) -> str | None:
    """Return the split that a file or folder name contains, such as `test` for `test-0001.tar`, or None."""
    found = _WORD.search(name)
    return None if found is None else _SPLIT_OF_WORD[found[1].lower()]


def group_by_split(
    files: Iterable[Named], name: Callable[[Named], str], *, by_file: bool = True
) -> tuple[dict[str, list[Named]], list[Named]]:
    """Group files by the splits named in their paths; return the groups, and the files that name no split.

    If no file names a split, all are in the group `train`.

    Args:
        name: Returns a file's path relative to the dataset.
        by_file: If no folder is named after a split, file names are used. False uses them only if all of them name a
            split, since image names may contain such words, as in `test-pattern.png`.
    """
    files = list(files)
    rules = ((_sharded_split, True), (_folder_split, True), (lambda path: split_in(path.rpartition('/')[2]), by_file))
    for split_of, may_lack in rules:
        splits: dict[str, list[Named]] = {}
        none: list[Named] = []
        for file in files:
            split = split_of(name(file))
            (none if split is None else splits.setdefault(split, [])).append(file)
        if splits and (may_lack or not none):
            return splits, none
    return ({TRAIN: files} if files else {}), []


def _sharded_split(path: str) -> str | None:
    found = _SHARDED.fullmatch(path) or _TFDS.fullmatch(path)
    return None if found is None else found[1]


def _folder_split(path: str) -> str | None:
    pieces = path.split('/')[:-1]
    exact = next((_SPLIT_OF_WORD[piece.lower()] for piece in pieces if piece.lower() in _SPLIT_OF_WORD), None)
    return exact or next((split for piece in pieces if (split := split_in(piece)) is not None), None)


def choose_split(splits: Iterable[str], wanted: str | None, where: str) -> str:
    """Return the split to read: the one requested, the only one, or `train`; raise UserError if it does not exist."""
    names = list(splits)
    if wanted is None and (len(names) == 1 or TRAIN in names):
        return names[0] if len(names) == 1 else TRAIN
    listed = ', '.join(names)
    if wanted is None:
        raise UserError(f'{where}: has the splits {listed}; choose one with --split, such as --split {names[0]}')
    if wanted not in names:
        near = did_you_mean(wanted, names)
        also = '' if near.startswith('known') or len(names) == 1 else f' It has {listed}'
        raise UserError(f'{where}: has no split {wanted!r}; {near}{also}')
    return wanted


def refuse_mixed_splits(location: str, names: Sequence[str], kind: str) -> None:
    """Raise UserError if a folder has files from several splits, unless all of them are for training.

    Names that may be ordinary words count only if every file has one: `images/train` and `images/val` are splits, but
    `vehicles/train` beside `vehicles/plane` contains images of trains. Two kinds of names always count: top-level
    folders named after a split, and files such as `test-00000-of-00002.parquet`. With `kind` `folder`, `names` are
    images, and only names of their folders count.
    """
    # Image names may contain any word, so only their folders count.
    splits, none = group_by_split(names, (lambda name: f'{name.rpartition("/")[0]}/') if kind == 'folder' else str)
    if none or len(splits) < 2 or all(split_in(split) in (None, TRAIN) for split in splits):
        splits = _certain_splits(names, kind)
    if len(splits) < 2:
        return
    listed = ', '.join(f'{split} ({found[0]})' for split, found in sorted(splits.items()))
    split = min(splits, key=lambda name: (split_in(name) != TRAIN, name))
    pattern = _pattern(splits[split], names)
    narrower = '' if pattern is None else f' give {_quoted(location, pattern)} as the location, or'
    raise UserError(
        f'{location}: has files of several splits, which training must not mix: {listed}; read one of them with '
        f'`diffusion prepare huggingface {shlex.quote(location)} --split {split}`, or{narrower} give '
        f'{_quoted(location, "**")} to read all files'
    )


def _certain_splits(names: Sequence[str], kind: str) -> dict[str, list[str]]:
    """Return, by split, the files whose names cannot be ordinary words; see `refuse_mixed_splits`."""
    splits: dict[str, list[str]] = {}
    for name in names:
        first, slash, _ = name.partition('/')
        split = _SPLIT_OF_WORD.get(first.lower()) if slash else None
        if split is None and kind != 'folder' and (start := _SHARD_START.fullmatch(name.rpartition('/')[2])):
            split = _SPLIT_OF_WORD[start[1].lower()]
        if split is not None:
            splits.setdefault(split, []).append(name)
    return splits


def _quoted(location: str, inside: str) -> str:
    return shlex.quote(f'{location.rstrip("/")}/{inside}')


def _pattern(wanted: Sequence[str], names: Sequence[str]) -> str | None:
    """Return a folder or pattern (`data/train-*.parquet`) that only `wanted` among `names` match; None if none does."""
    *folders, last = wanted[0].split('/')
    at = next((number for number, piece in enumerate(folders) if split_in(piece) is not None), None)
    if at is not None:
        found = '/'.join(folders[: at + 1])
    else:
        word = _WORD.search(last)
        end = 0 if word is None else word.end(1)
        suffix = last[max(end, last.find('.', end)) :]
        # Include a separator in the prefix, so that `train-*` excludes `train2`.
        end += last[end : end + 1] in ('-', '_', ' ')
        found = '/'.join([*folders, f'{last[:end]}{"*" if last[end:] != suffix else ""}{suffix}'])
    return found if [name for name in names if is_inside(name, found)] == list(wanted) else None
