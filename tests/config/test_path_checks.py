"""Checks of paths: folders of streams, a `runs_dir` in an object store, and `checkpointing.tiers`."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import check_golden, check_transcripts
from shards import write_buckets

from diffusion.config import store_checks
from diffusion.config.image_shapes import Shape
from diffusion.config.load import load
from diffusion.config.path_checks import check_output, check_paths, check_stream_folders
from diffusion.config.recipe import Component, PrecomputeConfig, Recipe, StreamConfig
from diffusion.config.store_checks import copied_streams
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


def write_folders(folder: Path) -> None:
    """Write datasets, most of which have mistakes."""
    write(folder / 'mixed', [(64, 64), (512, 600)])
    write(folder / 'small', [(100, 70), (64, 84)] * 20)
    indexes = {'zero': [0, 0], 'negative': [5, -5], 'huge': [2**31], 'most': [2**31 - 1], 'true': [True], 'pixels': [1]}
    indexes |= {'several/64x32': [7], 'several/40x48': [0], 'several/48x40': ['x']}
    for name, counts in indexes.items():
        (folder / name).mkdir(parents=True)
        (folder / name / 'index.json').write_text(json.dumps({'shards': [{'samples': count} for count in counts]}))
    shapes = {Shape(64, 32): 7, Shape(40, 48): 0, Shape(48, 40): 1, Shape(32, 32): 5}
    write_buckets(folder / 'several', 48, {shape: {'samples': count} for shape, count in shapes.items()})


def test_wrong_folders_are_named_with_the_cause_and_the_way_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folders(Path())
    is_file = Path.is_file

    def is_readable_file(path: Path) -> bool:
        if 'locked' in path.parts:
            raise PermissionError(13, 'Permission denied', str(path))
        return is_file(path)

    monkeypatch.setattr(Path, 'is_file', is_readable_file)
    places = [(name, 512, {}) for name in ('mixed', 'small', 'zero', 'negative', 'huge', 'most', 'true', 'pixels')]
    places += [('small', 64, {}), ('small', 512, {'enlarge': True}), ('small', 64, {'shape': '128x64'})]
    places += [('small', 64, {'shape': '80x64'}), ('several', 48, {}), ('locked', 64, {}), ('none', 64, {})]
    places += [(name, side, {'aspects': True}) for side in (40, 48, 56) for name in ('several', 'mixed', 'locked')]
    streams = {f'{number}': StreamConfig(side, local=name, **more) for number, (name, side, more) in enumerate(places)}
    streams |= {'remote': StreamConfig(64, remote='s3://b/c', local='none'), 'mount': StreamConfig(64, remote='none')}
    for_training = check_stream_folders('streams', streams, for_training=True)
    others = [each for each in for_training if each not in check_stream_folders('streams', streams)]
    lines = [f'{number}: {name} {side} {more}' for number, (name, side, more) in enumerate(places)]
    lines += ['', *map(str, for_training), '', 'for training only:', *map(str, others), '']
    check_golden(Path(__file__).parent / 'golden' / 'folders', {'streams.txt': '\n'.join(lines)})


@pytest.mark.parametrize('task', ['train', 'precompute', 'evaluate'])
def test_streams_in_a_store_have_the_problems_of_the_same_folders(store, tmp_path, monkeypatch, task):
    folder = tmp_path / 'mds'
    write_folders(folder)
    for name, manifest in (
        ('mixed', {'image_encoder': 'x'}),
        ('small', {}),
        ('several/64x32', {'image_encoder': None}),
    ):
        (folder / name / 'manifest.json').write_text(json.dumps(manifest))
    url = store.upload(folder)
    shard = folder / 'small/shard.00000.mds'
    *_, size = struct.unpack('<17I', shard.read_bytes()[4 : 4 + 4 * 17])

    def recipe(place: str, key: str) -> Recipe:
        names = [path.name for path in sorted(folder.iterdir())] + ['none']
        places: dict[str, Any] = {name: {key: f'{place}/{name}'} for name in names}
        streams = {name: StreamConfig(512, aspects=name == 'several', **places[name]) for name in names}
        streams['buckets'] = StreamConfig(48, **places['several'])
        model = Component('tiny_prx', {'representation_alignment': {'encoder': 'x'}})
        sections = {'train': 'streams', 'evaluate': 'eval_streams'}
        more: Any = {sections[task]: streams} if task in sections else {'precompute': PrecomputeConfig(streams=streams)}
        return Recipe('a', 8, model, task, dataset=Component('latents'), checkpoint=str(tmp_path), **more)

    expected = [str(each).replace('.local: ', '.remote: ') for each in check_paths(recipe(str(folder), 'local'))]
    assert ('the latents of streams.small have none' in str(expected)) == (task == 'train')
    for most, missing in ((size, 0), (size - 1, 1)):
        monkeypatch.setattr(store_checks, 'MAX_BEGINNING_BYTES', most)
        with copied_streams(recipe(url, 'remote')) as copies:
            found = [str(each) for each in copies.check()]
        left = [each for each in expected if not missing or 'small have shorter sides' not in each]
        assert found == [each.replace(str(folder), url) for each in left] and len(expected) - len(left) == missing


@pytest.mark.parametrize(
    ('columns', 'settings'),
    [
        ({'image': 'bytes', 'captions': 'json'}, {}),
        ({'image': 'bytes', 'width': 'int'}, {}),
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
    assert [sample['key'] for sample in mds.first_samples(tmp_path, 2)] == ['0', '1']
    shard.write_bytes(shard.read_bytes()[:damage])
    with pytest.raises(ValueError):
        mds.first_samples(tmp_path, 16)
    assert problems(tmp_path, resolution=512) == []
    shard.unlink()
    assert problems(tmp_path, resolution=512) == []


@pytest.mark.parametrize('text', ['{"shards": [{"samples": 1e999}]}', '[' * 100_000, None], ids=['inf', 'deep', 'pipe'])
def test_hostile_index_is_refused(text, tmp_path):
    from diffusion.inspection.verify import read_index, source_of

    path = tmp_path / 'index.json'
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    stream = StreamConfig(resolution=64, local=str(tmp_path))
    (problem,) = check_stream_folders('streams', {'a': stream})
    assert problem.where == 'streams.a.local'
    with pytest.raises(UserError, match=r'index\.json'):
        read_index(source_of(stream))


def test_output_that_cannot_be_written_is_named_before_the_run(write_recipe, tmp_path, monkeypatch):
    """The lines of the file are overrides, and environment variables in capitals."""
    monkeypatch.chdir(tmp_path)
    Path('file').touch()

    def outcome(line):
        words = line.split()
        with monkeypatch.context() as patch:
            for name in ('GCS_KEY', 'GCS_SECRET', 'AZURE_ACCOUNT_NAME', 'AZURE_STORAGE_ACCOUNT_NAME'):
                patch.delenv(name, raising=False)
            for word in words:
                patch.setenv(*word.split('=')) if word[0].isupper() else None
            return check_output(load(write_recipe(), [word for word in words if word[0].islower()])) or ['accepted']

    check_transcripts(Path(__file__).parent / 'golden' / 'outputs', outcome)
