"""Averages of any width, reconstructed from a run's snapshots: `diffusion export --ema-width`, and autoguidance."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import output_of, refusal
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from PIL import Image
from recipe_files import write_yaml
from safetensors.torch import load_file

from diffusion.algorithms.post_hoc_ema import find_snapshots, reconstruct_average
from diffusion.algorithms.power_function import SNAPSHOT_FOLDER
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.data.image_sheet import to_images
from diffusion.errors import UserError
from diffusion.models.randomness import Purpose, draws_for
from diffusion.models.sampler import inference_scheduler
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export
from diffusion.tasks.generate import generate
from diffusion.training.train import train

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope='module')
def run(tmp_path_factory, tiny_recipe) -> Path:
    """A run of 8 batches with checkpoints after 4 and 8 and snapshots after 3, 6 and 8."""
    root = tmp_path_factory.mktemp('post-hoc')
    algorithms = {'post_hoc_ema': {'widths': [0.05, 0.1, 0.2], 'every': '3ba', 'dtype': 'float32'}}
    recipe = write_yaml(root / 'recipe.yaml', tiny_recipe(root / 'runs', name='run', algorithms=algorithms))
    train(load(recipe)).close()
    return root / 'runs' / 'run'


def denoiser_of(exported: Path) -> Weights:
    return UNet2DConditionModel.from_pretrained(exported / 'unet', low_cpu_mem_usage=False).state_dict()


def same(found: Weights, average: Weights) -> bool:
    names = [name for name in average if name.startswith('denoiser.')]
    assert len(names) == len(found)
    return all(torch.allclose(found[n.removeprefix('denoiser.')], average[n], rtol=1e-5, atol=1e-7) for n in names)


@pytest.mark.parametrize(
    ('place', 'options', 'batch'), [('ba4', [], 3), pytest.param('ba8', ['--at', '6'], 6, marks=pytest.mark.slow)]
)
def test_width_with_a_snapshot_exports_that_snapshot(run, tmp_path, capsys, place, options, batch):
    output = output_of(capsys, 'export', run / place, '--out', tmp_path / 'sd', '--ema-width', 0.1, *options)
    assert f'post-hoc EMA 0.1 (batch {batch}) weights; load with StableDiffusionPipeline' in output
    assert same(denoiser_of(tmp_path / 'sd'), load_file(run / SNAPSHOT_FOLDER / f'width0.1-ba{batch}.safetensors'))
    (tmp_path / 'plain').touch()
    files = [path for root in (run, tmp_path) for path in root.rglob('*') if path.is_file()]
    assert {path.stat().st_mode for path in files} == {(tmp_path / 'plain').stat().st_mode}, 'as the umask says'


def test_width_without_a_snapshot_is_reconstructed(run, tmp_path):
    assert sorted({snapshot.batch for snapshot in find_snapshots(run)}) == [3, 6, 8], 'at the interval and the end'
    assert export(run, tmp_path / 'sd', ema_width=0.15, at=7) == 'post-hoc EMA 0.15 (batch 7)'
    found = denoiser_of(tmp_path / 'sd')
    assert same(found, reconstruct_average(run, 0.15, at=7).tensors)
    assert not same(found, load_file(run / SNAPSHOT_FOLDER / 'width0.1-ba8.safetensors'))


def test_average_without_its_snapshots_is_refused_with_the_algorithm_that_takes_them(run, tmp_path, capsys):
    with pytest.raises(ValueError, match='--ema-width: reconstructs weights from snapshots; remove'):
        export(run, tmp_path / 'sd', ema_width=0.1, weights='training')
    with pytest.raises(ValueError, match='batch 9 is not between 1 and 8'):
        export(run, tmp_path / 'sd', ema_width=0.1, at=9)
    shutil.copytree(run, tmp_path / 'plain', symlinks=True, ignore=shutil.ignore_patterns(SNAPSHOT_FOLDER))
    error = refusal(capsys, 'export', tmp_path / 'plain', '--out', tmp_path / 'sd', '--ema-width', 0.1)
    assert 'plain/post_hoc_ema: no snapshots; to save them in training, set `algorithms: {post_hoc_ema: }`' in error
    assert not (tmp_path / 'sd').exists()


@pytest.fixture(scope='module')
def small_run(tmp_path_factory, tiny_recipe) -> Path:
    """A run of 8 batches of a small flow without a trained text encoder, with the same checkpoints and snapshots."""
    root = tmp_path_factory.mktemp('autoguidance')
    algorithms = {'post_hoc_ema': {'widths': [0.05, 0.1], 'every': '3ba', 'dtype': 'float32'}}
    recipe = write_yaml(root / 'recipe.yaml', tiny_recipe(root / 'runs', small=True, algorithms=algorithms))
    train(load(recipe)).close()
    return root / 'runs' / 'run'


def recipe_with(run: Path, guidance: str, *words: str) -> Any:
    sampling = ['generate.guidance_scale=2.5', 'generate.num_inference_steps=3', 'generate.prompts=[a red circle]']
    return load(run / 'recipe.yaml', ['task=generate', *sampling, f'generate.guidance={guidance}', *words])


@torch.no_grad()
@pytest.mark.parametrize('line', ['{name: autoguidance, batch: 6, ema_width: 0.1}', '{name: autoguidance, batch: 4}'])
def test_autoguidance_moves_away_from_worse_weights_of_the_run(small_run, tmp_path, line):
    """Euler's method by hand with two models, one with the weights of the snapshot or of the earlier checkpoint."""
    recipe = recipe_with(small_run, line, f'generate.out={tmp_path}')
    (file,) = generate(recipe)
    models: list[Any] = [trained_model(recipe).model.eval() for _ in range(2)]
    strong, worse = models
    snapshot = load_file(small_run / SNAPSHOT_FOLDER / 'width0.1-ba6.safetensors')
    worse.load_state_dict(worse.state_dict() | (snapshot if 'ema' in line else weights_of(small_run / 'ba4')[0]))
    scheduler = inference_scheduler('euler', strong.objective)
    scheduler.set_timesteps(3)
    x = draws_for([0], seed=0, device='cpu').normal(Purpose.SAMPLING, strong.latent_grid.shape(None))
    condition = strong._condition(strong._tokens(['a red circle']))
    for time, after in itertools.pairwise(scheduler.sigmas.tolist()):
        p, q = (each._predict(x, torch.full((1,), 1000 * time), condition) for each in models)
        assert not torch.allclose(p, q, rtol=1e-3, atol=1e-3)
        x = x + (after - time) * (q + 2.5 * (p - q))
    (expected,) = to_images(strong.decode(x))
    with Image.open(file) as image:
        assert abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1


def test_autoguidance_without_the_other_weights_is_refused(run, small_run, capsys):
    for words, message in (
        ('{name: autoguidance}', '--guide.batch: is missing and has no default; set it'),
        ('ap', "--guide.name: no guidance is called 'ap'; did you mean 'apg'?"),
    ):
        assert message in refusal(capsys, 'generate', small_run, 'a', '--guide', words)
    with pytest.raises(UserError, match='ba5 is not a checkpoint or a run .*contains ba8, ba4'):
        generate(recipe_with(small_run, '{name: autoguidance, batch: 5}'))
    with pytest.raises(UserError, match='guidance: autoguidance needs the same text encoder, and this run trains it'):
        generate(recipe_with(run, '{name: autoguidance, batch: 4}'))
