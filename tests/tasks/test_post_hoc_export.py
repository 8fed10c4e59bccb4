"""`diffusion export --ema-width`: export of an average of any width, reconstructed from a run's snapshots."""

import shutil
from pathlib import Path

import pytest
import torch
from commands import output_of, refusal
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from recipe_files import write_yaml
from safetensors.torch import load_file

from diffusion.algorithms.post_hoc_ema import find_snapshots, reconstruct_average
from diffusion.algorithms.power_function import SNAPSHOT_FOLDER
from diffusion.config.load import load
from diffusion.tasks.export import export
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


def test_run_writes_snapshots_at_interval_and_end(run):
    assert sorted({snapshot.batch for snapshot in find_snapshots(run)}) == [3, 6, 8]


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
    assert export(run, tmp_path / 'sd', ema_width=0.15, at=7) == 'post-hoc EMA 0.15 (batch 7)'
    found = denoiser_of(tmp_path / 'sd')
    assert same(found, reconstruct_average(run, 0.15, at=7).tensors)
    assert not same(found, load_file(run / SNAPSHOT_FOLDER / 'width0.1-ba8.safetensors'))


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'ema_width': 0.1, 'weights': 'training'}, '--ema-width: reconstructs weights from snapshots; remove'),
        ({'ema_width': 0.1, 'at': 9}, 'batch 9 is not between 1 and 8'),
    ],
)
def test_invalid_width_or_batch_is_an_error(run, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        export(run, tmp_path / 'sd', **settings)
    assert not (tmp_path / 'sd').exists()


def test_missing_snapshots_error_names_the_algorithm_that_takes_them(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / 'plain', symlinks=True, ignore=shutil.ignore_patterns(SNAPSHOT_FOLDER))
    error = refusal(capsys, 'export', tmp_path / 'plain', '--out', tmp_path / 'sd', '--ema-width', 0.1)
    assert 'plain/post_hoc_ema: no snapshots; to save them in training, set `algorithms: {post_hoc_ema: }`' in error
