"""Settings from YAML files and the command line, and error messages for mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refusal
from golden import check_transcripts, readable_json

from diffusion.cli import CommandParser
from diffusion.config.load import RecipeError
from diffusion.config.schema import field_docs
from diffusion.errors import UserError
from diffusion.prepare import cli
from diffusion.prepare.settings import PrepareSettings, load_settings, settings_of
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


def test_every_setting_is_documented() -> None:
    assert set(field_docs(PrepareSettings)) == set(PrepareSettings.__dataclass_fields__)


def test_options_and_yaml_give_equal_settings(tmp_path: Path) -> None:
    text = """
source: {kind: parquet, location: images, image_column: jpg, caption_column: alt}
out: mds
sizes: [256, 512]
aspects: ['640x384', '512x512']
workers: 3
formats: [svg]
duplicates: near
filters: {columns: {aesthetic: {min: 4.5}}}
"""
    (tmp_path / 'a.yaml').write_text(text)
    short = ['parquet', 'images', '--image-column', 'jpg', '--out', 'mds', '--sizes', '256', '512']
    short += ['--workers', '3', '--caption-column', 'alt', '--formats', 'svg']
    short += ['--aspects', '640x384', '512x512', '--duplicates', 'near', '--set', 'filters.columns.aesthetic.min=4.5']
    for name in ('none', 'sdxl'):
        assert parsed('parquet', 'a', '--out', 'b', '--sizes', '8', '--aspects', name).aspects == name
    with pytest.raises(UserError, match='--sizes: is missing; give the side lengths of the resolution buckets'):
        parsed('parquet', 'a', '--out', 'b')
    assert parsed(*short) == load_settings(tmp_path / 'a.yaml') == parsed('recipe', str(tmp_path / 'a.yaml'))


def test_mistakes_are_reported_with_their_way_out() -> None:
    def mistakes(line: str) -> list[str]:
        with pytest.raises(RecipeError) as error:
            settings_of(VALID | json.loads(line))
        return str(error.value).split('\n  ')[1:]

    check_transcripts(Path(__file__).parent / 'golden/settings', mistakes)


def test_numbers_have_bounds() -> None:
    bounds = {'workers': (1, 4096), 'max_pixels': (1, 2**31), 'jpeg_quality': (1, 100), 'max_distance': (0, 8)}
    bounds |= {'hold_out': (0, 10**9), 'max_rejected': (0, 1), 'shard_mb': (0.001, 4000)}
    for name, (low, high) in bounds.items():
        step = 1e-6 if name in ('max_rejected', 'shard_mb') else 1
        for value in (low, high):
            settings_of(VALID | {name: value})
        for value in (low - step, high + step):
            with pytest.raises(RecipeError, match=f'{name}: .* is out of range; give {low} to {high}'):
                settings_of(VALID | {name: value})


def test_plans_of_earlier_versions_are_those_of_this_one() -> None:
    # Datasets record them, and refuse images that are prepared in another way.
    def plan(line: str) -> list[str]:
        found = settings_of(VALID | json.loads(line))
        others = (found.shard_bytes, found.source.title, found.held_out, found.work_folder, found.source.joins_by_key)
        text = ' '.join(map(str, others)).replace(str(Path.cwd()), 'CWD')
        return [*readable_json(found.content_settings()).splitlines(), text]

    check_transcripts(Path(__file__).parent / 'golden/plans', plan)


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
