"""`diffusion init`: the recipe that it writes fits the prepared images and the GPUs."""

import json
from pathlib import Path

import pytest
from commands import refusal, refusals
from golden import check_golden
from nvml_driver import Driver
from shards import write_buckets

from diffusion.cli import main
from diffusion.config.image_shapes import Shape
from diffusion.config.load import check_paths, load
from diffusion.planning.gpus import load_gpus
from diffusion.storage import mds
from diffusion.tasks import init_command
from diffusion.tasks.init_command import closest_gpu


def prepared(folder, *captions, side):
    """Write shards without images: `diffusion init` reads captions and numbers only."""
    samples = [{'captions': [text], 'width': side, 'height': side} for text in captions]
    mds.write_dataset(folder, samples, {'captions': 'json', 'width': 'int', 'height': 'int'})


def pretend(folder, count):
    """Write an index of shards that do not exist."""
    folder.mkdir(parents=True)
    size = {'basename': 'shard.00000.mds', 'bytes': 10_000 * count, 'hashes': {}}
    entry = {'samples': count, 'raw_data': size, 'hashes': []}
    entry |= {'zip_data': None, 'compression': None, 'size_limit': None}
    entry |= {'column_names': ['key'], 'column_encodings': ['str'], 'column_sizes': [None]}
    (folder / 'index.json').write_text(json.dumps({'version': 2, 'shards': [entry]}))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    return tmp_path


def written(name, *words, data='data/photos', allow_missing=False):
    """Return the recipe that `diffusion init` writes, which must be complete, and equal to the reviewed file."""
    assert main(['init', data, '--out', 'mine.yaml', *words]) == 0
    check_golden(Path(__file__).parent / 'golden' / f'init-{name}', {'mine.yaml': Path('mine.yaml').read_text()})
    return load('mine.yaml', allow_missing=allow_missing)


def test_few_images_without_gpu_get_the_small_recipe(folder, capsys):
    captions = [f'"photo": {index} #1 – ü' for index in range(46)]
    captions[:0] = ['${HOME}', '???', ' ', 'a' * 301, 'ü'.rjust(300, 'a')]
    prepared(folder / 'data/photos/64px', *captions, side=64)
    prepared(folder / 'data/photos-held-out/64px', 'a cat', side=64)
    recipe = written('small')
    out, before = capsys.readouterr().out, (folder / 'mine.yaml').read_text()
    assert before.startswith(out) and out.endswith('export runs/mine --out mine-model\n')
    assert recipe.model.name == 'tiny_prx' and recipe.callbacks['image_grid'].kwargs['prompts'] == captions[4:12]
    assert check_paths(recipe) == []
    assert 'mine.yaml exists' in refusal(capsys, 'init', 'data/photos', '--out', 'mine.yaml')
    assert (folder / 'mine.yaml').read_text() == before


def test_few_images_with_a_gpu_get_a_lora_of_a_length_that_fits_them(folder):
    prepared(folder / 'data/photos/512px', *(f'photo {index}' for index in range(64)), side=512)
    pretend(folder / 'data/photos/64px', 64)
    recipe = written('lora', '--gpu', 'v100-16gb', '--gpus', '2')
    assert recipe.lora is not None and recipe.eval_streams == {} and check_paths(recipe) == []


@pytest.mark.parametrize(
    ('size', 'count', 'gpu', 'base'),
    [
        (512, 2_000, 'h100-sxm', 'finetune'),
        (768, 5_000, 'rtx-4090', 'finetune'),
        (512, 1_999, 'h100-sxm', 'lora'),
        (512, 5_000, 'v100-16gb', 'lora'),
        (256, 5_000, 'h100-sxm', 'small'),
        (256, 1_000_000, 'h100-sxm', 'phase1'),
    ],
)
def test_base_follows_number_size_and_memory(folder, size, count, gpu, base):
    pretend(folder / f'data/photos/{size}px', count)
    recipe = written(f'{base}-{size}-{count}', '--gpu', gpu, '--gpus', '1', allow_missing=True)
    assert ([*recipe.streams], recipe.eval_streams, recipe.missing) == (['photos'], {}, [])


def test_aspect_buckets_are_read_as_such(folder):
    prepared(folder / 'data/photos/512px/512x512', *map(str, range(16)), side=512)
    write_buckets(folder / 'data/photos/512px', 512, {Shape(512, 512): {'samples': 16}})
    recipe = written('aspects', '--gpu', 'h200', '--gpus', '16', data='data/photos/512px')
    assert recipe.streams['photos'].aspects and check_paths(recipe) == []


def test_wrong_input_is_answered_in_a_line_or_two(folder, capsys):
    prepared(folder / 'data/photos/64px', 'a', 'b', 'c', side=64)
    pretend(folder / 'data/icons/32px', 9)
    pretend(folder / 'data/wide/512px/512x512', 9)
    write_buckets(folder / 'data/wide/512px', 512, {Shape(512, 512): {'samples': 9}})
    (folder / 'data/torn/64px').mkdir(parents=True)
    (folder / 'data/torn/64px/index.json').write_text('{"shards"')
    (folder / 'empty/64px').mkdir(parents=True)
    for name, count in (('few', 15), ('photos', 16)):
        (folder / name / 'more').mkdir(parents=True)
        for index in range(count):
            (folder / name / 'more' / f'{index}.JPG').touch()
    commands = [f'init {words} --out mine.yaml' for words in ('nowhere', 's3://bucket/photos', 'empty', 'data/torn')]
    commands += [f'init {name} --out mine.yaml' for name in ('few', 'photos', 'data/icons', 'data/wide')]
    commands += [f'init {name} --gpu h200 --out mine.yaml' for name in ('photos', 'data/photos --gpus 4')]
    commands += [f'init data/photos {words} --out mine.yaml' for words in ('--gpus 2', '--gpu h100-smx')]
    commands += ['init data/photos --out mine', 'init data/photos --out nowhere/mine.yaml']
    found = refusals(capsys, folder, commands)
    check_golden(Path(__file__).parent / 'golden/init-mistakes', {'messages.txt': found})
    assert not (folder / 'mine.yaml').exists()


def test_driver_names_of_gpus_are_matched_with_known_models(monkeypatch):
    gpus = load_gpus().values()
    for name, memory, expected in (
        ('NVIDIA A100-SXM4-80GB', 79.2, 'a100-80gb'),
        ('NVIDIA A100-SXM4-40GB', 39.4, 'a100-40gb'),
        ('NVIDIA H100 PCIe', 78.1, 'h100-pcie'),
        ('NVIDIA A100', 37.5, 'v100-32gb'),
        ('NVIDIA H100 80GB HBM3', 79.6, 'h100-sxm'),
        ('NVIDIA GeForce RTX 4090', 24.0, 'rtx-4090'),
        ('NVIDIA GeForce RTX 3090', 24.0, 'rtx-4090'),
        ('Tesla V100-SXM2-32GB', 32.0, 'v100-32gb'),
        ('NVIDIA H200', 140.4, 'h200'),
    ):
        assert closest_gpu(name, memory, gpus).name == expected, name
    driver = Driver(name=b'NVIDIA H200', total=141)
    driver.gpus[0] |= {'name': b'NVIDIA A100', 'total': 40}
    monkeypatch.setattr(init_command, 'load_nvml', lambda: driver)
    assert init_command.this_gpu().name == 'a100-40gb', 'the first one'
