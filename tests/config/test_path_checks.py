"""Checks of the folders of streams: an index.json of any content, and images smaller than a model sees."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffusion.config.path_checks import check_stream_folders
from diffusion.config.recipe import StreamConfig
from diffusion.errors import UserError
from diffusion.storage import mds

COLUMNS = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}


def write(folder: Path, sizes: list[tuple[int, int]], columns: dict[str, str] = COLUMNS, **settings: Any) -> Path:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=columns, **settings) as writer:
        for number, (width, height) in enumerate(sizes):
            sample = {'image': b'?', 'captions': ['a'], 'width': width, 'height': height, 'key': str(number)}
            writer.write({name: sample.get(name, np.zeros(3)) for name in columns})
    return folder


def problems(folder: Path, **settings: Any) -> list[str]:
    found = check_stream_folders('streams', {'a': StreamConfig(local=str(folder), **settings)}, for_training=True)
    return [str(problem) for problem in found]


def test_small_images_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, [(100, 64), (64, 80)] * 20)
    assert problems(folder, resolution=64) == []
    (problem,) = problems(folder, resolution=512)
    assert problem.startswith('streams.a.resolution: 512x512, but the images in')
    assert 'at most 64 px and would be enlarged; use larger images or a resolution of at most 64, or allow' in problem
    assert problems(folder, resolution=512, enlarge=True) == []
    (problem,) = problems(folder, resolution=64, shape='128x64')
    assert problem.startswith('streams.a.shape: 128x64')
    assert problems(folder, resolution=64, shape='80x64') == [], 'one of the two is large enough'


def test_folder_with_some_large_images_is_accepted(tmp_path: Path) -> None:
    assert problems(write(tmp_path, [(64, 64), (512, 600)]), resolution=512) == []


@pytest.mark.parametrize(
    ('columns', 'settings'),
    [
        ({'image': 'bytes', 'captions': 'json'}, {}),
        (COLUMNS | {'moments': 'ndarray:float64:3'}, {}),
        (COLUMNS, {'compression': 'zstd'}),
    ],
)
def test_folder_of_unknown_sizes_is_accepted(tmp_path: Path, columns: dict[str, str], settings: dict[str, str]) -> None:
    assert problems(write(tmp_path, [(64, 64)], columns, **settings), resolution=512) == []


@pytest.mark.parametrize('damage', [0, 4, 30])
def test_damaged_and_missing_shards_are_left_to_the_reader(tmp_path: Path, damage: int) -> None:
    shard = write(tmp_path, [(64, 64)] * 3) / 'shard.00000.mds'
    assert [sample['width'] for sample in mds.first_samples(tmp_path, 16)] == [64, 64, 64]
    shard.write_bytes(shard.read_bytes()[:damage])
    with pytest.raises(ValueError):
        mds.first_samples(tmp_path, 16)
    assert problems(tmp_path, resolution=512) == []
    shard.unlink()
    assert problems(tmp_path, resolution=512) == []


INDEX = {
    'negative samples': json.dumps({'shards': [{'samples': -5}]}),
    'infinite samples': '{"shards": [{"samples": 1e999}]}',
    'samples as text': json.dumps({'shards': [{'samples': 'x'}]}),
    'deep nesting': '[' * 100_000,
    'a pipe': None,
}


@pytest.mark.parametrize('name', INDEX)
def test_hostile_index_is_refused(name, tmp_path):
    from diffusion.inspection.verify import read_index, source_of

    path = tmp_path / 'index.json'
    if (text := INDEX[name]) is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    stream = StreamConfig(resolution=64, local=str(tmp_path))
    (problem,) = check_stream_folders('streams', {'a': stream})
    assert problem.where == 'streams.a.local'
    with pytest.raises(UserError, match=r'index\.json'):
        read_index(source_of(stream))
