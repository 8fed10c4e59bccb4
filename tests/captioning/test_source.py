"""A source is captioned before its preparation, which joins the captions by key and keeps the source's own."""

import io
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from captioning.vlm_server import VlmServer, caption_of, write_settings
from commands import output_of, refusal
from PIL import Image
from prepare.drawn import draw, encode, samples, tar_of, write_files
from prepare.hub_datasets import parquet_of
from prepare.tfrecords import example, record
from waiting import wait_until

from diffusion.cli import main
from diffusion.config.load import load
from diffusion.training.train import train

IMAGES = [encode(draw(n, width=36 + n, height=34), ('JPEG', 'PNG', 'GIF')[n % 3]) for n in range(8)]
IMAGES[5] = encode(draw(5, width=12, height=12))
IMAGES[6] = IMAGES[6][:-60]
FILES = {f'{n}.jpg': image for n, image in enumerate(IMAGES)}
TEXTS = {f'{n}.txt': b'own %d' % n for n in range(3)}
RECORDS = [{'image': [image], 'key': [str(n)], 'caption': [f'own {n}']} for n, image in enumerate(IMAGES)]
SOURCES: dict[str, dict[str, bytes]] = {
    'folder': FILES | TEXTS,
    'webdataset': {
        f'{n}.tar': tar_of([each for each in sorted((FILES | TEXTS).items()) if each[0][0] in of])
        for n, of in enumerate(('0123', '4567'))
    },
    'parquet': {'a.parquet': parquet_of({'image': IMAGES, 'key': [*'01234567'], 'caption': ['own', *[None] * 7]})},
    'tfrecord': {'a.tfrecord': b''.join(record(example(each)) for each in RECORDS)},
    'huggingface': FILES,
}
OWN = {'parquet': ['own'], 'huggingface': [], 'tfrecord': [f'own {n}' for n in (0, 1, 2, 3, 4, 7)]}
"""Captions that the source has itself, if not those of TEXTS."""


def write_source(folder: Path, kind: str, files: dict[str, bytes]) -> Path:
    """Write a source and the YAML file that prepares it at 16 and 32 px; return the file."""
    source = {'kind': kind, 'location': str(write_files(folder / 'in', files))}
    values = {'source': source, 'out': str(folder / 'out'), 'sizes': [16, 32], 'workers': 1, 'key_prefix': 'monday/'}
    (folder / 'prepare.yaml').write_text(yaml.safe_dump(values | {'max_rejected': 0.2}))
    return folder / 'prepare.yaml'


def check_prepared(bucket: Path, usage: str) -> list[dict[str, Any]]:
    """Run the command that `diffusion caption` has printed, and check the captions; return the samples."""
    assert main(shlex.split(usage)) == 0
    found = samples(bucket)
    for sample in found:
        stored = Image.open(io.BytesIO(sample['image']))
        named = dict(zip(sample['caption_columns'], sample['captions'], strict=True))
        assert [named[name] for name in ('brief', 'full')] == [caption_of(name, stored) for name in ('brief', 'full')]
    return found


@pytest.mark.parametrize('kind', SOURCES)
def test_captions_of_a_source_are_joined_beside_its_own(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    recipe, settings = write_source(tmp_path, kind, SOURCES[kind]), write_settings(tmp_path / 'vlm.yaml', server.url)
    words = ('caption', recipe, '--with', settings)
    assert 'needs a prepared dataset' in refusal(capsys, *words, '--report', tmp_path / 'a.html')
    assert 'each million images of this source: ' in output_of(capsys, *words, '--plan')
    assert not (tmp_path / 'out-captions').exists()
    server.good.clear()
    usage = output_of(capsys, *words).splitlines()[-1].partition(': diffusion ')[2]
    assert server.good.total() == len(server.good) == 2 * 6
    assert 'captioned already' in output_of(capsys, *words)
    changed = recipe.with_name('changed.yaml')
    changed.write_text(recipe.read_text() + 'filters: {min_side: 40}\n')
    message = refusal(capsys, 'caption', changed, '--with', settings)
    assert 'prepare.filters.min_side: 1 at the start, 40 now' in message
    found = check_prepared(tmp_path / 'out/32px', usage)
    assert 'filtered 1, unusable 1 ' in capsys.readouterr().out, 'the reasons are too_small and truncated'
    assert len(found) == 6
    own = [sample['captions'][0] for sample in found if 'original' in sample['caption_columns']]
    assert own == OWN.get(kind, ['own 0', 'own 1', 'own 2'])


def test_a_killed_captioning_of_a_source_resumes_and_the_dataset_trains(
    server: VlmServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], write_recipe: Callable[..., Path]
) -> None:
    files = {
        f'{n:02d}.{kind}': encode(draw(n, width=32, height=32)) if kind == 'jpg' else b'own %d' % n
        for n in range(60)
        for kind in ('jpg', 'txt')
    }
    recipe = write_source(tmp_path, 'webdataset', {'a.tar': tar_of(files.items())})
    settings = write_settings(tmp_path / 'vlm.yaml', server.url, concurrency=2)
    process = subprocess.Popen([sys.executable, '-m', 'diffusion', 'caption', str(recipe), '--with', str(settings)])
    wait_until(lambda: server.good.total() >= 20)
    process.kill()
    process.wait()
    usage = output_of(capsys, 'caption', recipe, '--with', settings).splitlines()[-1].partition(': diffusion ')[2]
    assert len(server.good) == 120 > server.good.total() - 4, 'only requests in flight were sent again'
    found = check_prepared(tmp_path / 'out/32px', usage)
    assert [sample['captions'][0] for sample in found] == [f'own {n}' for n in range(60)]
    streams = {'photos': {'local': str(tmp_path / 'out/32px'), 'resolution': 32}}
    dataset = {'name': 'image_text', 'caption_weights': {'original': 0.2, 'brief': 0.4, 'full': 0.4}}
    train(load(write_recipe(streams=streams, dataset=dataset), ['trainer.max_duration=1ba'])).close()
