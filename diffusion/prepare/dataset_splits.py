"""Splits of a dataset (train, validation, test) by the names of its folders and files, as in Hugging Face's `datasets`.

Names decide in this order: `data/NAME-00000-of-00002.parquet` is of the split NAME; else a folder named after a split,
such as `test/0000.parquet`; else a file, such as `images-val-0000.tar`; else everything is the split `train`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError

TRAIN = 'train'
KEYWORDS = {
    TRAIN: ('train', 'training'),
    'validation': ('validation', 'valid', 'dev', 'val'),
    'test': ('test', 'testing', 'eval', 'evaluation'),
}
"""Words in names by split, in lower case."""
_SPLIT_OF_WORD = {word: split for split, words in KEYWORDS.items() for word in words}
# The separators of `datasets`: a word is preceded by one or by nothing, and followed by one or by a digit.
_WORD = re.compile(rf'(?:^|[-._ 0-9])({"|".join(sorted(_SPLIT_OF_WORD, key=len, reverse=True))})(?=$|[-._ 0-9])', re.I)
_SHARDED = re.compile(r'data/([\w.]+)-\d{5}-of-\d{5}[^/]*')
_SHARD_START = re.compile(rf'({"|".join(_SPLIT_OF_WORD)})(?:[-_. ]?\d[^/]*)?\.(?:parquet|tar|tar\.gz|tgz|arrow)', re.I)
Named = TypeVar('Named')


def split_in(name: str) -> str | None:
    """Return the split that one piece of a path names, such as `test` for `test-0001.tar`; None if it names none."""
    found = _WORD.search(name)
    return None if found is None else _SPLIT_OF_WORD[found[1].lower()]


def group_by_split(
    files: Iterable[Named], name: Callable[[Named], str], *, by_file: bool = True
) -> tuple[dict[str, list[Named]], list[Named]]:
    """Group files by the splits that their paths name.

    Args:
        files: Data files of one configuration of a dataset.
        name: Returns the path of a file relative to the dataset.
        by_file: If no folder is named after a split, look at the names of the files too. If false, they must all name
            one: the names of images are words, such as `test-pattern.png`.

    Returns:
        Files by split, and those that belong to none because only others have a split in their path.
    """
    files = list(files)
    for split_of, may_lack in ((_sharded_split, True), (_folder_split, True), (_file_split, by_file)):
        splits: dict[str, list[Named]] = {}
        none: list[Named] = []
        for file in files:
            split = split_of(name(file))
            (none if split is None else splits.setdefault(split, [])).append(file)
        if splits and (may_lack or not none):
            return splits, none
    return ({TRAIN: files} if files else {}), []


def _sharded_split(path: str) -> str | None:
    found = _SHARDED.fullmatch(path)
    return None if found is None else found[1]


def _folder_split(path: str) -> str | None:
    pieces = path.split('/')[:-1]
    exact = next((_SPLIT_OF_WORD[piece.lower()] for piece in pieces if piece.lower() in _SPLIT_OF_WORD), None)
    return exact or next((split for piece in pieces if (split := split_in(piece)) is not None), None)


def _file_split(path: str) -> str | None:
    return split_in(path.rpartition('/')[2])


def choose_split(splits: Iterable[str], wanted: str | None, where: str) -> str:
    """Return the split to read: the one that the user named, else the only one, else `train`.

    Raises:
        UserError: There is no such split, or several of which none is `train`.
    """
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
    """Refuse a folder whose files belong to several splits, of which at least one is not for training.

    Only what cannot be ordinary words counts: a folder directly in the location that is named after a split, and, other
    than for images, files such as `test-00000-of-00002.parquet`.

    Args:
        location: The folder, for messages.
        names: Paths of the data files relative to it.
        kind: Kind of the source.

    Raises:
        UserError: The files belong to several splits.
    """
    found: dict[str, str] = {}
    for name in names:
        first, slash, _ = name.partition('/')
        split = _SPLIT_OF_WORD.get(first.lower()) if slash else None
        if split is None and kind != 'folder' and (start := _SHARD_START.fullmatch(name.rpartition('/')[2])):
            split = _SPLIT_OF_WORD[start[1].lower()]
        if split is not None:
            found.setdefault(split, name)
    if len(found) < 2:
        return
    listed = ', '.join(f'{split} ({name})' for split, name in sorted(found.items()))
    split = TRAIN if TRAIN in found else sorted(found)[0]
    first = found[split].partition('/')[0]
    inside = _SPLIT_OF_WORD.get(first.lower()) == split and '/' in found[split]
    narrower = f'{location.rstrip("/")}/{first}' if inside else f'{location.rstrip("/")}/{_pattern(found[split])}'
    raise UserError(
        f'{location}: has files of several splits, which training must not mix: {listed}; read one of them with '
        f'`diffusion prepare huggingface {location} --split {split}`, or give {narrower} as the location'
    )


def _pattern(name: str) -> str:
    """Return a pattern for the files of the same split and folder, such as `data/train-*.parquet`."""
    folder, slash, last = name.rpartition('/')
    found = re.fullmatch(r'([A-Za-z]+[-_ ]?)([^.]*)(\..*)', last)
    assert found is not None, name
    return f'{folder}{slash}{found[1]}{"*" if found[2] else ""}{found[3]}'
