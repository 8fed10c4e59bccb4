"""Settings from YAML files and the command line, and error messages for mistakes."""

from pathlib import Path
from typing import Any

import pytest
from commands import refusal

from diffusion.cli import CommandParser
from diffusion.config.load import RecipeError
from diffusion.config.schema import field_docs
from diffusion.errors import UserError
from diffusion.prepare import cli
from diffusion.prepare.settings import LATER_SETTINGS, SETTINGS_OF_SOURCE, PrepareSettings, load_settings, settings_of
from diffusion.prepare.work_dir import Share

YAMLS = sorted((Path(__file__).parents[2] / 'yamls/prepare').glob('*.yaml'))
VALID: dict[str, Any] = {'source': {'kind': 'webdataset', 'location': 'tars'}, 'out': 'out', 'sizes': [256]}


def parsed(*arguments: str) -> PrepareSettings:
    parser = CommandParser()
    cli.add_arguments(parser)
    return cli._settings(parser.parse_args(arguments))


@pytest.mark.parametrize('path', YAMLS, ids=[path.stem for path in YAMLS])
def test_every_yaml_lacks_only_the_values_to_fill_in(path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_settings(path)
    assert {problem.where for problem in caught.value.problems} == {'source.location', 'out'}
    assert load_settings(path, ['source.location=tars', 'out=mds']).max_distance == 4


def test_every_setting_is_documented_and_plans_have_those_of_their_source_alone() -> None:
    with_captions = settings_of(VALID | {'source': VALID['source'] | {'captions': 't.csv', 'captions_key': 'key'}})
    without = {'kind', *SETTINGS_OF_SOURCE['webdataset']} - LATER_SETTINGS.keys()
    assert set(settings_of(VALID).content_settings()['source']) == without
    assert with_captions.content_settings()['source']['captions'] == 't.csv'
    assert not LATER_SETTINGS.keys() & settings_of(VALID).content_settings().keys()
    folder = settings_of(VALID | {'source': {'kind': 'folder', 'location': 'x'}}).content_settings()['source']
    assert {*SETTINGS_OF_SOURCE['folder']} - {*folder} == {'caption'}, 'datasets of version 0.1.0 do not have it'
    assert set(field_docs(PrepareSettings)) == set(PrepareSettings.__dataclass_fields__)


def test_options_and_yaml_give_equal_settings(tmp_path: Path) -> None:
    text = """
source: {kind: parquet, location: images, image_column: jpg, caption_column: alt}
out: mds
sizes: [256, 512]
aspects: ['640x384', '512x512']
workers: 3
duplicates: near
filters: {columns: {aesthetic: {min: 4.5}}}
"""
    (tmp_path / 'a.yaml').write_text(text)
    short = ['parquet', 'images', '--image-column', 'jpg', '--out', 'mds', '--sizes', '256', '512']
    short += ['--workers', '3', '--caption-column', 'alt']
    short += ['--aspects', '640x384', '512x512', '--duplicates', 'near', '--set', 'filters.columns.aesthetic.min=4.5']
    assert parsed('parquet', 'a', '--out', 'b', '--sizes', '8', '--aspects', 'sdxl').aspects == 'sdxl'
    with pytest.raises(UserError, match='--sizes: is missing; give the side lengths of the resolution buckets'):
        parsed('parquet', 'a', '--out', 'b')
    assert parsed(*short) == load_settings(tmp_path / 'a.yaml') == parsed('recipe', str(tmp_path / 'a.yaml'))


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'sizes': [100, 0]}, r'sizes: \[100, 0\]; sizes must be positive multiples of 8'),
        ({'sizes': [64, 64]}, 'sizes: .*contains a size twice'),
        ({'aspects': 'sdxxl'}, "aspects: 'sdxxl': did you mean 'sdxl'.*, or a list of shapes"),
        ({'aspects': []}, 'aspects: the list is empty'),
        ({'sizes': []}, 'sizes: the list is empty; sizes must be'),
        ({'step': 12}, 'step: 12 is not a positive multiple of 8'),
        ({'step': 0}, 'step: 0 is not a positive multiple of 8'),
        ({'step': 16, 'sizes': [24]}, r'sizes: \[24\]; sizes must be positive multiples of 16'),
        *(
            ({'source': VALID['source'] | {'caption_column': columns}}, 'is not a column or several different ones')
            for columns in ([], ['a', 'a'], ['a', ''])
        ),
        ({'source': VALID['source'] | {'caption_suffix': 'JSON'}}, "'JSON' is not a suffix of text files; give txt"),
        ({'source': VALID['source'] | {'caption_suffix': '.txt'}}, "'.txt' is not a suffix of text files; give txt"),
        (
            {'source': {'kind': 'openmoji', 'split': 'trian'}},
            "source.split: 'trian' is not one of all, train, heldout; did",
        ),
        ({'aspects': ['640x383']}, r"aspects\[0\]: '640x383': sides must be positive multiples of 8"),
        ({'workers': 0}, 'workers: 0 is out of range; give 1 to 4096'),
        ({'max_pixels': 0}, 'max_pixels: 0 is out of range; give 1 to 2147483648'),
        ({'jpeg_quality': 101}, 'jpeg_quality: 101 is out of range; give 1 to 100'),
        ({'max_rejected': 1.1}, 'max_rejected: 1.1 is out of range; give 0 to 1'),
        ({'max_distance': 9}, 'max_distance: 9 is out of range; give 0 to 8'),
        ({'store': 'original', 'fast_jpeg': True}, 'fast_jpeg: has no use with store: original'),
        ({'store': 'original', 'lossless_format': 'webp'}, 'lossless_format: has no use with store: original'),
        ({'shard_mb': 5000}, 'shard_mb: 5000.0 is out of range; give 0.001 to 4000'),
        ({'background': 'transparent'}, "background: 'transparent' is not an opaque color"),
        ({'filters': {'max_aspect': 0.5}}, 'filters.max_aspect: 0.5 is below 1'),
        ({'source': {'kind': 'tar', 'location': 'a'}}, "source.kind: 'tar' is not one of folder, webdataset, parquet"),
        ({'source': {'kind': 'webdataset'}}, 'source.location: is missing; give a folder, a file'),
        ({'source': VALID['source'] | {'limit': 5}}, 'source.limit: is not a setting of webdataset, which'),
        ({'source': {'kind': 'openmoji', 'location': 'a'}}, 'source.location: is not a setting of openmoji, which'),
        ({'out': 's3://bucket/mds'}, 'work: is missing; out is s3://bucket/mds, so give a local folder: --work DIR'),
        ({'out': 's3://b/mds', 'work': 'w', 'overwrite': True}, 'overwrite: is not supported for object stores'),
        ({'out': '.'}, r'out: \. contains the input tars; give another folder'),
        ({'hold_out': -1}, r'hold_out: -1 is out of range; give 0 to 1000000000\b'),
        (
            {'hold_out': 5, 'source': {'kind': 'openmoji'}},
            'hold_out: is not supported for openmoji, since it would separate variants of a drawing; use source.split',
        ),
        (
            {'hold_out': 5, 'out': 's3://bucket/', 'work': 'work'},
            'hold_out: needs a folder beside out, and s3://bucket/ is a whole bucket; give a folder in it as out',
        ),
        (
            {'hold_out': 5, 'source': {'kind': 'folder', 'location': 'out-held-out/images'}},
            'out: out-held-out contains the input out-held-out/images; give another folder',
        ),
    ],
)
def test_mistake_is_reported_with_its_way_out(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        settings_of(VALID | values)


def test_command_accepts_a_yaml_instead_of_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / 'a.yaml').write_text('source: {kind: webdataset, location: nowhere}\nout: o\nsizes: [256]\n')
    errors = refusal(capsys, 'prepare', tmp_path / 'a.yaml', '--engine', 'processes', 'sizes=[7]', 'workers=0')
    assert f'{tmp_path}/a.yaml has 2 mistakes' in errors
    assert 'sizes: [7];' in errors and 'workers: 0' in errors


@pytest.mark.parametrize('text', ['3', '3/', '3/3', '4/3', '-1/3', 'a/3'])
def test_invalid_share_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match='--share: .* is not a share; use 0/16'):
        Share.parse(text)


def test_shares_are_a_partition() -> None:
    shares = [Share.parse(f'{index}/5') for index in range(5)]
    assert all(sum(share.includes(number) for share in shares) == 1 for number in range(23))
