"""OpenMoji source: selection, rendering, splits and reproducibility."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import modules_of
from drawn import report_of, samples
from golden import check_transcripts
from PIL import Image

from diffusion.cli import main
from diffusion.errors import UserError
from diffusion.prepare import openmoji
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.openmoji import SKIN_TONES, Emoji, all_emoji, choose_emoji


@pytest.fixture(scope='module')
def emojis() -> list[Emoji]:
    return all_emoji()


def prepare_openmoji(out: Path, sizes: list[int], **source: object) -> PrepareReport:
    values = {'source': {'kind': 'openmoji'} | source, 'out': str(out), 'sizes': sizes}
    return report_of(values | openmoji.SETTINGS)


def test_every_size_has_the_same_images(tmp_path: Path) -> None:
    report = prepare_openmoji(tmp_path / 'out', [64, 16], limit=5)
    small, large = samples(tmp_path / 'out/16px'), samples(tmp_path / 'out/64px')
    assert report.buckets == {'16px': 5, '64px': 5}
    assert [sample['key'] for sample in small] == [sample['key'] for sample in large]
    for sample in large:
        image = Image.open(io.BytesIO(sample['image']))
        assert (image.format, image.mode, image.size) == ('PNG', 'RGB', (64, 64))
        assert image.getpixel((0, 0)) == (255, 255, 255)
        assert sample['captions'] and all(sample['captions'])
    saved = json.loads((tmp_path / 'out/report.json').read_text())
    assert (saved['source'], saved['arguments']['source']['limit']) == ('OpenMoji', 5)
    assert 'resvg-py' in saved['versions'] and 'CC BY-SA 4.0' in saved['license']


def test_quickstart_draws_captions_of_its_images(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    prompts = yaml.safe_load((root / 'yamls/quickstart.yaml').read_text())['callbacks']['image_grid']['prompts']
    (command,) = re.findall('diffusion (prepare openmoji .*)', (root / 'Makefile').read_text())
    words = command.replace('data/openmoji', str(tmp_path / 'out')).replace('64', '16').split()
    assert main(words) == 0
    first = [sample['captions'][0] for sample in samples(tmp_path / 'out/16px')]
    assert len(first) == 200
    assert set(prompts) <= set(first)
    assert len(set(prompts)) == 8


def test_images_are_stored_as_rendered(tmp_path: Path, emojis: list[Emoji], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmoji, 'PART_EMOJI', 8)
    chosen = choose_emoji(emojis, select='all', split='all', limit=openmoji.PART_EMOJI + 5)
    prepare_openmoji(tmp_path / 'out', [16], select='all', limit=len(chosen))
    stored = samples(tmp_path / 'out/16px')
    assert [sample['key'] for sample in stored] == [emoji.hexcode for emoji in chosen]
    assert [sample['image'] for sample in stored] == [emoji.png(16) for emoji in chosen]
    assert [sample['captions'] for sample in stored] == [emoji.names or ['emoji'] for emoji in chosen]
    assert not chosen[10].names


def test_all_emoji_joins_drawings_with_names(emojis: list[Emoji]) -> None:
    by_hexcode = {emoji.hexcode: emoji for emoji in emojis}
    named = [emoji for emoji in emojis if emoji.names]
    assert (len(emojis), len(named)) == (4495, 3953)
    assert len([emoji for emoji in named if not SKIN_TONES.intersection(emoji.codes)]) == 1918
    assert by_hexcode['1FAD1'].names == ['bell pepper']
    assert by_hexcode['1F6A8'].names == ['police car light', 'rotating light']
    assert by_hexcode['1F44D'].names[0] == 'thumbs up'
    assert '+1' not in by_hexcode['1F44D'].names


@pytest.mark.slow
def test_no_heldout_image_has_a_near_duplicate_in_train(emojis: list[Emoji]) -> None:
    thumbnails = np.stack([np.asarray(emoji.render(16), np.float64).ravel() / 255 for emoji in emojis])
    is_heldout = np.array([emoji.is_heldout for emoji in emojis])
    heldout, train = thumbnails[is_heldout], thumbnails[~is_heldout]
    # |a - b|^2 = |a|^2 + |b|^2 - 2ab: one matrix product instead of a difference for each pair.
    squares = (heldout**2).sum(axis=1)[:, None] + (train**2).sum(axis=1) - 2 * heldout @ train.T
    assert 200 < len(heldout) < 360
    assert np.sqrt(squares.min() / thumbnails.shape[1]) > 0.01


def test_splits_partition_each_selection(emojis: list[Emoji]) -> None:
    for select in ('named', 'all'):
        train, heldout = (
            {emoji.hexcode for emoji in choose_emoji(emojis, select=select, split=split)}
            for split in ('train', 'heldout')
        )
        assert not train & heldout
        assert train | heldout == {emoji.hexcode for emoji in choose_emoji(emojis, select=select, split='all')}


def test_distinct_images_differ(emojis: list[Emoji]) -> None:
    family = {Emoji(hexcode, Path(), []).family for hexcode in ('1F469-1F3FD-200D-1F33E', '1F468-200D-1F33E', '1F33E')}
    assert family == {'1F33E'}
    chosen = choose_emoji(emojis, select='distinct', split='all', limit=60)
    thumbnails = np.stack([np.asarray(emoji.render(16), np.float32).ravel() / 255 for emoji in chosen])
    distances = np.sqrt(np.mean((thumbnails[:, None] - thumbnails[None]) ** 2, axis=2)) + np.eye(60)
    assert distances.min() >= openmoji.DISTINCT_DISTANCE
    assert len({emoji.family for emoji in chosen}) == len({emoji.names[0] for emoji in chosen}) == 60
    assert not any('button' in emoji.names[0] or '20E3' in emoji.codes for emoji in chosen)


def test_selections_are_those_of_earlier_versions(emojis: list[Emoji]) -> None:
    def chosen(line: str) -> list[str]:
        try:
            return [f'{emoji.hexcode} {", ".join(emoji.names)}' for emoji in choose_emoji(emojis, **json.loads(line))]
        except UserError as error:
            return [str(error)]

    check_transcripts(Path(__file__).parent / 'golden/openmoji', chosen)


def test_missing_package_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmoji, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r"quickstart extra .* pip install -e '\.\[quickstart\]'"):
        all_emoji()


def test_adding_arguments_imports_nothing_heavy() -> None:
    program = 'from diffusion import cli; from diffusion.prepare.cli import add_arguments; '
    loaded = modules_of(program + 'add_arguments(cli.CommandParser())')
    assert not {'torch', 'streaming', 'PIL', 'numpy'} & loaded
