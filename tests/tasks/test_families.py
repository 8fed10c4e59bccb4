"""Families of denoisers in real runs: one curve on any ranks, exported to stock diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import Ranks, read_losses
from stock_pipeline import assert_command_draws_the_same, draw

from diffusion.config.load import load
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export
from diffusion.training.train import train

BATCHES = 3
PROMPT = 'a red square'
PRX: dict[str, Any] = {
    'name': 'tiny_prx',
    'hidden_size': 32,
    'num_heads': 2,
    'depth': 2,
    'patch_size': 2,
    'text_width': 32,
    'text_layers': 1,
}
MODELS = {
    'prx': PRX | {'mup_base_width': 16},  # two parameter groups, whose learning rates differ
    'prx_sample': PRX | {'objective': {'path': 'flow', 'prediction_type': 'sample'}, 'train_text_encoder': False},
    'prx_pixels': PRX
    | {'vae': 'pixels', 'patch_size': 8, 'bottleneck_size': 16}
    | {'objective': {'path': 'flow', 'prediction_type': 'sample', 'noise_scale': 2.0, 'snr_shift': 3.0}},
}
PIPELINES = {
    'prx': ('prx.pipeline_prx', 'PRXPipeline'),
    'prx_sample': ('prx.pipeline_prx', 'PRXPipeline'),
    'prx_pixels': ('prx.pipeline_prx_pixel', 'PRXPixelPipeline'),
}
"""Module and class of the stock pipeline."""
CALLS: dict[str, dict[str, Any]] = {
    'prx': {'use_resolution_binning': False, 'skip_text_cleaning': True, 'height': 32, 'width': 32},
}
CALLS |= {'prx_sample': CALLS['prx'], 'prx_pixels': {'use_resolution_binning': False, 'height': 32, 'width': 32}}
SCHEDULERS = {'prx_sample': 'dpm++'}
"""Our scheduler for the images of the pipeline, if it is not Euler's method."""


class Runs:
    """Runs of one family's recipe."""

    def __init__(self, root: Path, content: dict[str, Any], ranks: Ranks) -> None:
        self.root, self.content, self.ranks = root, content, ranks

    def recipe(self, name: str, **parallelism: Any) -> Path:
        path = self.root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(self.content | {'name': name, 'parallelism': parallelism}))
        return path

    def folder(self, name: str) -> Path:
        return self.root / 'runs' / name

    def whole(self) -> Path:
        """Return the folder of an uninterrupted run of this process."""
        if not self.folder('whole').exists():
            train(load(self.recipe('whole'))).close()
        return self.folder('whole')


@pytest.fixture(
    scope='module',
    params=[pytest.param(name, marks=pytest.mark.slow) if name == 'prx_sample' else name for name in MODELS],
)
def runs(request, tmp_path_factory, tiny_recipe, ranks, small_vae):
    root = tmp_path_factory.mktemp(request.param)
    content = tiny_recipe(root / 'runs', algorithms={'ema': {'ema_start': '1ba', 'smoothing': 0.9}})
    content['model'] = {'resolution': 32, 'vae': str(small_vae)} | MODELS[request.param]
    content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': '10ba'}
    found = Runs(root, content, ranks)
    found.family = request.param  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_two_ranks_give_the_curve_of_one(runs, strategy):
    settings = {'strategy': 'fsdp2', 'checkpoints': 'sharded'} if strategy == 'fsdp2' else {}
    runs.ranks.run(2, runs.recipe(strategy, **settings))
    ours, whole = read_losses(runs.folder(strategy)), read_losses(runs.whole())
    assert ours.keys() == whole.keys() == set(range(BATCHES))
    assert [ours[batch] for batch in range(BATCHES)] == pytest.approx(
        [whole[batch] for batch in range(BATCHES)], rel=1e-4
    )


@pytest.mark.cpu_seconds(12)
def test_stock_pipeline_draws_the_same_images(runs, tmp_path):
    recipe = load(runs.recipe('whole'))
    export(runs.whole(), tmp_path / 'exported', weights='ema')
    model = trained_model(recipe, 'ema').model
    assert isinstance(model, LatentDiffusion)
    latents = torch.randn(1, *model.latent_grid.shape(None))
    sampling = {'num_inference_steps': 5, 'guidance_scale': 3.0}
    call = {'prompt': PROMPT, **sampling, **CALLS[runs.family]}
    start = latents * model.objective.noise_scale
    theirs, _ = draw(PIPELINES[runs.family], tmp_path / 'exported', start, call, tmp_path)
    scheduler = SCHEDULERS.get(runs.family, 'euler')
    ours = model.generate([PROMPT], latents=latents, noise_scheduler=scheduler, **sampling)
    if runs.family == 'prx_pixels':  # this pipeline returns pixels in [-1, 1]
        theirs = (theirs / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert_command_draws_the_same(model, tmp_path / 'exported', noise_scheduler=scheduler)
