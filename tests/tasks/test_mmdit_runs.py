"""Real runs of MMDiT, and of PRX on the latents of DC-AE: ranks, precomputed encoders, stock pipelines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from ranks import Ranks, read_losses
from stock_pipeline import assert_command_draws_the_same, draw

from diffusion.config.load import load
from diffusion.data.latents import LatentManifest
from diffusion.errors import UserError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export
from diffusion.tasks.generate import generate
from diffusion.tasks.precompute import precompute
from diffusion.training.train import train

BATCHES = 3
PROMPT = 'a red square'
MODELS: dict[str, dict[str, Any]] = {
    'mmdit': {'name': 'tiny_mmdit', 'depth': 2, 'dual_attention_blocks': 1, 'patch_size': 2, 'text_width': 32},
    'dc_ae': {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'text_width': 32, 'text_layers': 1},
}
PIPELINES = {
    'mmdit': ('stable_diffusion_3.pipeline_stable_diffusion_3', 'StableDiffusion3Pipeline'),
    'dc_ae': ('prx.pipeline_prx', 'PRXPipeline'),
}
CALLS: dict[str, dict[str, Any]] = {
    'mmdit': {'max_sequence_length': 24},
    'dc_ae': {'use_resolution_binning': False, 'skip_text_cleaning': True},
}
LATENTS = {'mmdit': (4, 4, 4), 'dc_ae': (4, 2, 2)}
"""Shape of the latents of 32 px images."""


class Runs:
    """Runs of one recipe."""

    def __init__(self, kind: str, root: Path, content: dict[str, Any], ranks: Ranks) -> None:
        self.kind, self.root, self.content, self.ranks = kind, root, content, ranks

    def recipe(self, name: str, **sections: Any) -> Path:
        path = self.root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(self.content | {'name': name} | sections))
        return path

    def folder(self, name: str) -> Path:
        return self.root / 'runs' / name

    def whole(self) -> Path:
        """Return the folder of an uninterrupted run of this process."""
        if not self.folder('whole').exists():
            train(load(self.recipe('whole'))).close()
        return self.folder('whole')


@pytest.fixture(scope='module', params=['mmdit', pytest.param('dc_ae', marks=pytest.mark.slow)])
def runs(request, tmp_path_factory, tiny_recipe, ranks, small_vae, small_dc_ae):
    root = tmp_path_factory.mktemp(request.param)
    content = tiny_recipe(root / 'runs', algorithms={'ema': {'ema_start': '1ba', 'smoothing': 0.9}})
    vae = {'mmdit': small_vae, 'dc_ae': small_dc_ae}[request.param]
    content['model'] = MODELS[request.param] | {'resolution': 32, 'vae': str(vae)}
    content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': '10ba'}
    return Runs(request.param, root, content, ranks)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['ddp', 'fsdp2'])
def test_two_ranks_give_the_curve_of_one(runs, strategy):
    fsdp2 = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'activation_checkpointing': True}
    settings = fsdp2 if strategy == 'fsdp2' else {}
    runs.ranks.run(2, runs.recipe(strategy, parallelism=settings))
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
    latents = torch.randn(1, *LATENTS[runs.kind])
    sampling = {'num_inference_steps': 5, 'guidance_scale': 3.0}
    call = {'prompt': PROMPT, 'height': 32, 'width': 32, **sampling, **CALLS[runs.kind]}
    theirs, printed = draw(PIPELINES[runs.kind], tmp_path / 'exported', latents, call, tmp_path)
    assert 'are not expected' not in printed
    ours = model.generate([PROMPT], latents=latents, noise_scheduler='euler', **sampling)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert_command_draws_the_same(model, tmp_path / 'exported', noise_scheduler='euler')


@pytest.mark.slow
def test_task_generate_writes_an_image(runs, tmp_path):
    runs.whole()
    words = [
        'task=generate',
        f'generate.out={tmp_path}',
        'generate.num_inference_steps=2',
        f'generate.prompts=[{PROMPT}]',
    ]
    assert [file.name for file in generate(load(runs.recipe('whole'), words))] == ['00000-a-red-square.png']


@pytest.fixture(scope='module')
def stored(runs):
    """Recipe with frozen text encoders, and the folder of its precomputed latents and text."""
    model = runs.content['model'] | {'train_text_encoder': False, 'caption_dropout': 0.3}
    streams = runs.content['streams']
    out = runs.root / 'latents'
    settings = {'out': str(out), 'streams': streams, 'latents': 'image+text', 'dtype': 'float32', 'batch_size': 8}
    precompute(load(runs.recipe('stored', model=model, task='precompute', precompute=settings)))
    return model, out / 'small'


@pytest.mark.slow
def test_precomputed_encoders_give_the_losses_of_online_ones(runs, stored):
    model, folder = stored
    latents = {'dataset': {'name': 'latents'}, 'streams': {'small': {'local': str(folder), 'resolution': 32}}}
    sections = {
        'model': model,
        # Shuffling depends on the shards, which differ.
        'loader': {'num_workers': 0, 'shuffle': False},
        'trainer': {'max_duration': '1ep', 'progress_bar': False, 'device': 'cpu'},
    }
    train(load(runs.recipe('online', **sections))).close()
    train(load(runs.recipe('latents', **sections | latents))).close()
    online, offline = (read_losses(runs.folder(name)) for name in ('online', 'latents'))
    assert list(online) == list(offline) == list(range(5))
    assert [*offline.values()] == pytest.approx([*online.values()], rel=1e-4)


@pytest.mark.slow
def test_stored_output_of_the_encoders_is_recorded_and_checked(runs, stored):
    model, folder = stored
    manifest = folder / 'manifest.json'
    found, text = LatentManifest.read(folder, ''), manifest.read_text()
    if runs.kind == 'dc_ae':
        assert (found.posterior, found.text_output) == ('mean', 'last'), 'DC-AE has no variance'
        return
    assert (found.posterior, found.text_output) == ('sample', 'penultimate+pooled+t5')
    try:
        manifest.write_text(text.replace('penultimate+pooled+t5', 'last'))
        streams = {'small': {'local': str(folder), 'resolution': 32}}
        with pytest.raises(UserError, match=r'output of the text encoders is last, but the model takes penultimate'):
            train(load(runs.recipe('refused', model=model, dataset={'name': 'latents'}, streams=streams)))
    finally:
        manifest.write_text(text)
