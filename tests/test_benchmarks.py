"""Benchmarks run at a tiny size, where times mean nothing, and their counts are checked."""

import json
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forkserver import Server
from PIL import Image, ImageDraw

from diffusion.config.load import load
from diffusion.models.families.adapter import Condition
from diffusion.training import performance
from diffusion.training.train import train

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'

Rows = dict[str, list[str]]
ADDED = ('tf32', 'fused_optimizer', 'flash_attention', 'conv_benchmark', 'channels_last', 'low_precision_norms')


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """Function that runs `python benchmarks/NAME.py WORDS` and returns the rows of its tables by their first cell."""

    def run(name: str, *words: str) -> Rows:
        path = str(BENCHMARKS / f'{name}.py')
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, 'argv', [path, *words])
        runpy.run_path(path, run_name='__main__')
        return rows_of(capsys.readouterr().out)

    return run


@pytest.fixture
def rows_of_process(forkserver: Server, tmp_path: Path) -> Callable[..., Rows]:
    """Function like `rows` for benchmarks that fork, which is not safe in the process of the tests with its threads."""

    def run(name: str, *words: str) -> Rows:
        return rows_of(forkserver.run(BENCHMARKS / f'{name}.py', *words, output=tmp_path / 'output'))

    return run


def rows_of(output: str) -> Rows:
    """Return the rows of the tables in an output, by their first cell."""
    lines = [line[2:-2].split(' | ') for line in output.splitlines() if line.startswith('| ')]
    return {cells[0]: cells[1:] for cells in lines}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Function that imports a module of the folder of benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module


def test_near_duplicates_are_found_by_both_searches(rows):
    table = rows('near_duplicates', '3000', '100', '4', 'all')

    assert table['of the delivery in the dataset'][2] == table['of all images'][2] == '10'


TABLES = {
    'cache_limit': ('200 100', {'make room, evict', 'list all shards, as a download did before'}),
    'dispatch': ('1', {'eager', '38 compiled blocks'}),
    'ema': ('1 1', {'allocated during an update, MiB', 'held before the start, MiB', 'held after the start, MiB'}),
    'host': ('3 none 1', {'optimizer', 'GradientClipping', 'LossGuard', 'EMA', 'noise', 'Composer', 'total'}),
    'loader': ('32 1', {f'{side} px, {name} loader' for side in (256, 512) for name in ('published', 'our')}),
    'muon': ('1 1', {'Muon in batches', 'Muon, one matrix at a time', 'AdamW, fused'}),
    'noise': ('1 1', {'256 px', 'keyed draws', 'A100 80GB, 256 px', 'H200, 512 px'}),
    'overhead': ('25 2', {'Trainer', 'bare PyTorch loop', "trainer as in diffusers' example"}),
    'prepare': ('40 64 32 1', {'bare loop', 'diffusion prepare', 'diffusion prepare --fast-jpeg'}),
    'startup': ('0.1', {'0.1 M'}),
    'step': ('--pixels 256 --steps 1 --warmup 1 --millions 1', {'plain', *(f'+ {part}' for part in ADDED)}),
    'tread': ('8 64 8 1', {'TREAD over all tokens'}),
    'width_transfer': ('{pictures} 32,64 -9,-8 4', {'32', '64'}),
}
"""Arguments and rows of benchmarks."""


@pytest.mark.parametrize(
    'name', [each if each == 'cache_limit' else pytest.param(each, marks=pytest.mark.slow) for each in TABLES]
)
def test_benchmark_prints_its_rows(rows, rows_of_process, pictures, monkeypatch, name):
    monkeypatch.setattr(performance, 'BACKEND', 'eager')
    words, expected = TABLES[name]
    run = rows_of_process if name in ('loader', 'prepare') else rows
    assert expected <= {*run(name, *words.format(pictures=pictures[64]).split())}


@pytest.mark.slow
def test_recipe_speed_trains_with_drawn_images_and_prints_a_row(module, monkeypatch, write_recipe, tmp_path, capsys):
    benchmark = module('recipe_speed')

    def run(command, cwd):
        """Train in this process, as the launcher would in others."""
        assert command[1:3] == ['-m', 'composer.cli.launcher']
        path, *overrides = command[command.index(str(benchmark.ROOT / 'run.py')) + 1 :]
        recipe = load(path, overrides)
        assert recipe.streams['small'].local == str(tmp_path / 'images-32px')
        train(recipe).close()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(benchmark, 'subprocess', SimpleNamespace(run=run))
    monkeypatch.setattr(benchmark, 'IMAGES', 16)
    recipe = write_recipe(callbacks={'breakdown': None})
    sizes = ['--share-of', '2', '--batches', '4', '--folder', str(tmp_path), '--json', str(tmp_path / 'found.json')]
    benchmark.main([str(recipe), *sizes, 'optimizer.lr=0.01'])
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('| run |'))
    assert len(row.split('|')) == 2 + 1 + len(benchmark.METRICS)
    found = json.loads((tmp_path / 'found.json').read_text())['run']
    assert found['throughput/step_seconds'] > 0 and found['second save/stall_seconds'] > 0
    written = load(tmp_path / 'runs' / 'run' / 'recipe.yaml')
    assert (written.global_batch, written.optimizer.kwargs['lr']) == (4, 0.01)


def test_held_out_combinations_have_known_parts(module):
    openmoji_split = module('openmoji_split')
    found = openmoji_split.load_split()
    names = {split: [openmoji_split.divide(emoji.names[0]) for emoji in found[split]] for split in found}

    trained, held_out = names['train'], names['combinations']
    assert openmoji_split.divide('man firefighter dark skin tone') == ('man firefighter', 'dark skin tone')
    assert openmoji_split.divide('green circle') == ('circle', 'green')
    assert len(trained) > 3000 and len(held_out) > 200
    assert not set(held_out) & set(trained)
    assert {name.subject for name in held_out} <= {name.subject for name in trained}
    assert {name.attribute for name in held_out} <= {name.attribute for name in trained} - {''}
    assert not {emoji.family for emoji in found['drawings']} & {emoji.family for emoji in found['train']}


def test_ablation_changes_i1_as_named_at_equal_parameters(module):
    ablation, models = module('ablation'), {}
    for row in ablation.rows_named('mmdit,wide-prx,i1,i1-no-skips,i1-no-sandwich,i1-timestep,i1-empty'):
        torch.manual_seed(17)
        models[row.key] = ablation.build_model(row, torch.empty(0), seed=17)
    counts = {key: sum(each.numel() for each in model.denoiser.parameters()) for key, model in models.items()}
    assert all(abs(count / counts['mmdit'] - 1) < 0.05 for count in counts.values())

    noisy, condition = torch.randn(1, 16, 8, 8), Condition(torch.randn(1, 12, 128), torch.ones(1, 12).bool())

    @torch.no_grad()
    def predicted(key, timestep):
        return models[key].adapter.predict(models[key].denoiser, noisy, torch.tensor([timestep]), condition)

    assert torch.equal(predicted('i1', 100.0), predicted('i1', 900.0))
    assert torch.equal(predicted('i1', 100.0), predicted('i1-empty', 100.0))
    assert not torch.equal(predicted('i1-timestep', 100.0), predicted('i1-timestep', 900.0))
    assert len({float(predicted(key, 100.0).sum()) for key in models if key.startswith('i1')}) == 4
    names = {key: ' '.join(models[key].denoiser.state_dict()) for key in models}
    assert '_skip' not in names['i1-no-skips'] and 'attention_output_norm' not in names['i1-no-sandwich']


def test_described_regions_have_color_shape_and_position(module):
    image = Image.new('RGB', (64, 64), 'white')
    drawing = ImageDraw.Draw(image)
    drawing.line((0, 60, 63, 60), 'black', width=2)
    drawing.ellipse((4, 24, 20, 40), '#ea5a47', outline='black', width=2)
    drawing.rectangle((24, 2, 62, 26), '#1e50a0')
    emoji = SimpleNamespace(names=['drawing', 'picture', 'image'])
    described = module('caption_worth').describe(emoji, np.array(image))
    assert described == 'drawing, picture: large dark blue wide bar at the top right, red circle at the left'


def test_ablation_names_the_rows_it_has(module, capsys):
    with pytest.raises(SystemExit):
        module('ablation').parse(['1', '1', '--rows', 'i1,mmditt'])
    assert '--rows: mmditt: not a row; use unet, ' in capsys.readouterr().err


def test_quickstart_models_prints_ratios(rows, tmp_path):
    (tmp_path / 'data' / 'openmoji').mkdir(parents=True)
    (tmp_path / 'data' / 'openmoji-latents' / 'openmoji').mkdir(parents=True)
    first = {'batches': 100, 'seconds': 50.0, 'loss': 0.5, 'retrieval': 1.0, 'color_error': 0.02}
    (tmp_path / 'first.json').write_text(json.dumps(first))
    (tmp_path / 'today.json').write_text(json.dumps(first | {'seconds': 20.0, 'loss': 0.25}))

    assert rows('quickstart_models', str(tmp_path))['ratio'][:3] == ['1.00', '0.40', '0.50']
