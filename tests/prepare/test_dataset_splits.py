"""Splits by names, as in Hugging Face's `datasets`, and sources that refuse to mix them."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prepare.drawn import tar_of, write_files
from prepare.hub_datasets import image, parquet_of, rows

from diffusion.errors import UserError
from diffusion.prepare.dataset_choice import LAYOUTS, Chooser, DatasetListing
from diffusion.prepare.dataset_splits import choose_config, choose_split, group_by_split, split_in
from diffusion.prepare.hub_repository import Hub
from diffusion.prepare.parquet import ParquetSource
from diffusion.prepare.settings import SourceSettings

GOLDEN = Path(__file__).parent / 'golden'


def config_of(listed: Any, folders: list[str], wanted: str | None) -> list[str | None]:
    found = choose_config(listed, folders, wanted, 'here')
    return [found.config, found.folder]


CALLS: dict[str, Callable[..., Any]] = {
    'data_files': lambda files: choose_config([{'config_name': 'x', 'data_files': files}], (), None, 'here').patterns,
    'config': config_of,
    'split': lambda names, wanted: choose_split(names, wanted, 'here'),
    'word': split_in,
    'group': lambda names, by_file: [*group_by_split(names, str, by_file=by_file)],
}


@pytest.mark.parametrize('case', yaml.safe_load((GOLDEN / 'choices.yaml').read_text()), ids=str)
def test_configuration_patterns_split_words_that_mean_a_split_and_groups_of_files(case: list[Any]) -> None:
    name, *arguments, expected = case
    try:
        found = CALLS[name](*arguments)
    except UserError as error:
        found = str(error)
    assert found == expected


DATASETS = [case for file in sorted(GOLDEN.glob('datasets/*')) for case in yaml.safe_load(file.read_text())]


@pytest.mark.parametrize('case', DATASETS, ids=lambda case: case.get('name') or case['error'])
def test_files_of_a_dataset_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    write_files(tmp_path, {name: size * 'x' for name, size in case.get('sizes', {}).items()} | case.get('files', {}))
    monkeypatch.chdir(tmp_path)
    options = {'split': None, 'config': None, 'layouts': tuple(LAYOUTS)} | case.get('options', {})
    options['layouts'], path = tuple(options['layouts']), options.pop('path', '')
    found: dict[str, Any] = {}
    try:
        dataset = DatasetListing.open('.', Hub())
        choice = Chooser(replace(dataset, path=path), '.', image_suffixes=('png',), **options).choose()
        found['choice'] = [choice.layout, choice.split, [file.name for file in choice.files]]
        for each in (*dataset.hidden, *choice.others):
            found.setdefault('skipped', {}).setdefault(each.kind, []).append(each.key)
        found |= {} if dataset.license is None else {'license': dataset.license}
    except UserError as error:
        found['error'] = str(error)
    assert found == {name: value for name, value in case.items() if name not in ('name', 'sizes', 'files', 'options')}


def folder_of(path: Path, names: list[str]) -> Path:
    contents = {'parquet': parquet_of(rows('train')), 'tar': tar_of([('1.png', image(1))]), 'png': image(1)}
    return write_files(path, {name: contents[name.rpartition('.')[2]] for name in names})


def parts(kind: str, location: Path) -> int:
    source = SourceSettings(kind=kind, location=str(location)).open(sizes=[32])  # pyright: ignore[reportArgumentType]
    return len(source.parts())


@pytest.mark.parametrize(
    ('kind', 'names', 'narrower'),
    [
        ('parquet', ['data/train-00000-of-00001.parquet', 'data/test-00000-of-00001.parquet'], 'data/train-*.parquet'),
        ('parquet', ['train/0000.parquet', 'test/0000.parquet'], 'train'),
        ('webdataset', ['train_0000.tar', 'val_0000.tar'], 'train_*.tar'),
        ('folder', ['val/a.png', 'test/a.png'], 'test'),
        # The Parquet copies of the Hub, splits of fine-tuning data, img2dataset's tars with a prefix, YOLO's, COCO's.
        ('parquet', ['default/train/0000.parquet', 'default/test/0000.parquet'], 'default/train'),
        ('parquet', [f'data/{name}_sft-00000-of-00001.parquet' for name in ('train', 'test')], 'data/train_*.parquet'),
        ('webdataset', ['pictures-train-0000.tar', 'pictures-test-0000.tar'], 'pictures-train-*.tar'),
        ('folder', ['train2017/a.png', 'val2017/a.png'], 'train2017'),
        ('parquet', [f'data/{name}-00000-of-00001.parquet' for name in ('gen', 'test')], None),
    ],
)
def test_folder_of_several_splits_is_refused(tmp_path: Path, kind: str, names: list[str], narrower: str | None) -> None:
    folder = folder_of(tmp_path / 'in', names)
    message = rf"several splits.*prepare huggingface {folder} --split \w+`, or give .*'{folder}/\*\*' to read all"
    with pytest.raises(UserError, match=message) as raised:
        parts(kind, folder)
    location = None if narrower is None else shlex.quote(f'{folder}/{narrower}')
    assert re.findall('give (.*) as the location', str(raised.value)) == ([location] if location else [])
    assert narrower is None or parts(kind, folder / narrower) == 1
    if kind == 'folder':
        with pytest.raises(UserError, match='has files of several splits'):
            parts(kind, folder / ('{' + ','.join(names) + '}'))
    assert parts(kind, folder / '**') == (1 if kind == 'folder' else 2)


@pytest.mark.parametrize(
    ('kind', 'names'),
    [
        ('folder', ['train-station.png', 'test-pattern.png', 'val.png']),
        ('folder', ['vehicles/train/a.png', 'vehicles/test/a.png', 'vehicles/plane/a.png']),
        ('folder', ['test/a.png', 'b.png']),
        ('webdataset', ['train-0.tar', 'train-1.tar', 'extra.tar']),
        ('parquet', ['test-drive-photos.parquet', 'train-photos.parquet', 'latest.parquet']),
        ('parquet', ['test-0.parquet']),
    ],
)
def test_ordinary_names_are_not_refused(tmp_path: Path, kind: str, names: list[str]) -> None:
    assert parts(kind, folder_of(tmp_path / 'in', names)) >= 1


def test_keys_of_a_pattern_do_not_depend_on_the_other_splits(tmp_path: Path) -> None:
    files = {f'data/{split}-0.parquet': parquet_of(rows(split)) for split in ('train', 'test')}
    folder = write_files(tmp_path / 'in', files)
    source = ParquetSource(f'{folder}/data/train-?.parquet')
    assert [part.name for part in source.parts()] == ['train-0']
