"""Families of denoisers in real runs: one curve on any ranks, precomputed encoders, export to stock diffusers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Runs, read_losses
from stock_pipeline import assert_command_draws_the_same, draw

from diffusion.config.load import load
from diffusion.data.latents import LatentManifest
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export
from diffusion.tasks.precompute import precompute
from diffusion.training.train import train

BATCHES = 3
PROMPT = 'a red square'
DC_AE: dict[str, Any] = {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2}
DC_AE |= {'text_width': 32, 'text_layers': 1}
PRX = DC_AE | {'patch_size': 2}
X_PREDICTION = {'path': 'flow', 'prediction_type': 'sample'}
PIXELS: dict[str, Any] = {'use_resolution_binning': False, 'height': 32, 'width': 32}
LATENTS = PIXELS | {'skip_text_cleaning': True}


class Family(NamedTuple):
    """Model of a recipe, and how the stock pipeline of its export is called."""

    model: dict[str, Any]
    module: str
    pipeline: str
    call: dict[str, Any] = {}  # noqa: RUF012
    scheduler: str = 'euler'
    """Our scheduler for the images of the pipeline."""
    load: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of `from_pretrained`."""
    sampling: dict[str, Any] = {}  # noqa: RUF012
    """Settings of `generate` in the recipe that the exported pipeline keeps."""


FAMILIES = {
    # Two parameter groups, whose learning rates differ.
    'prx': Family(PRX | {'mup_base_width': 16}, 'prx.pipeline_prx', 'PRXPipeline', LATENTS),
    'prx_sample': Family(
        PRX | {'objective': X_PREDICTION, 'train_text_encoder': False},
        'prx.pipeline_prx',
        'PRXPipeline',
        LATENTS,
        'dpm++',
    ),
    'prx_pixels': Family(
        PRX
        | {'vae': 'pixels', 'patch_size': 8, 'bottleneck_size': 16}
        | {'objective': X_PREDICTION | {'noise_scale': 2.0, 'snr_shift': 3.0}},
        'prx.pipeline_prx_pixel',
        'PRXPixelPipeline',
        PIXELS,
    ),
    'dc_ae': Family(DC_AE, 'prx.pipeline_prx', 'PRXPipeline', LATENTS),
    'mmdit': Family(
        {'name': 'tiny_mmdit', 'depth': 2, 'dual_attention_blocks': 1, 'patch_size': 2, 'text_width': 32},
        'stable_diffusion_3.pipeline_stable_diffusion_3',
        'StableDiffusion3Pipeline',
        {'max_sequence_length': 24, 'height': 32, 'width': 32},
    ),
    'i1': Family(
        PRX | {'name': 'tiny_i1', 'depth': 3},
        'pipeline_utils',
        'DiffusionPipeline',
        {'guidance_rescale': 0.0},
        load={'trust_remote_code': True},
        sampling={'snr_shift': 3.0},
    ),
}


@dataclass
class FamilyRuns(Runs):
    name: str

    def whole(self) -> Path:
        """Return the folder of an uninterrupted run of this process."""
        if not self.folder('whole').exists():
            train(load(self.recipe('whole'))).close()
        return self.folder('whole')


@pytest.fixture(
    scope='module',
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in ('prx_sample', 'dc_ae') else name for name in FAMILIES
    ],
)
def runs(request, tmp_path_factory, tiny_recipe, ranks, small_vae, small_dc_ae):
    root = tmp_path_factory.mktemp(request.param)
    content = tiny_recipe(root / 'runs', algorithms={'ema': {'ema_start': '1ba', 'smoothing': 0.9}})
    vae = small_dc_ae if request.param == 'dc_ae' else small_vae
    content['model'] = {'resolution': 32, 'vae': str(vae)} | FAMILIES[request.param].model
    if FAMILIES[request.param].sampling:
        content['generate'] = {'noise_scheduler': 'euler'} | FAMILIES[request.param].sampling
    content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': '10ba'}
    return FamilyRuns(root, content, ranks, request.param)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('runs', 'count', 'strategy'),
    [*((name, 2, 'fsdp2') for name in FAMILIES), ('i1', 2, 'ddp'), ('i1', 4, 'ddp'), ('i1', 4, 'fsdp2')],
    indirect=['runs'],
)
def test_several_ranks_give_the_curve_of_one(runs, count, strategy):
    sharded = {'checkpoints': 'sharded', 'activation_checkpointing': True} if strategy == 'fsdp2' else {}
    name = f'{strategy}-{count}'
    runs.ranks.run(count, runs.recipe(name, parallelism={'strategy': strategy, **sharded}))
    ours, whole = read_losses(runs.folder(name)), read_losses(runs.whole())
    assert list(ours) == list(whole) == list(range(BATCHES))
    assert [*ours.values()] == pytest.approx([*whole.values()], rel=1e-4)


@pytest.mark.cpu_seconds(12)
def test_stock_pipeline_draws_the_same_images(runs, tmp_path):
    family = FAMILIES[runs.name]
    export(runs.whole(), tmp_path / 'exported', weights='ema')
    model = trained_model(load(runs.recipe('whole')), 'ema').model
    assert isinstance(model, LatentDiffusion)
    latents = torch.randn(1, *model.latent_grid.shape(None))
    sampling = {'num_inference_steps': 5, 'guidance_scale': 3.0}
    start = latents * model.objective.noise_scale
    call = {'prompt': PROMPT, **sampling, **family.call}
    place = family.module, family.pipeline
    theirs, printed = draw(place, tmp_path / 'exported', start, call, tmp_path, family.load)
    assert 'are not expected' not in printed
    settings: dict[str, Any] = sampling | family.sampling | {'noise_scheduler': family.scheduler}
    ours = model.generate([PROMPT], latents=latents, **settings)
    if runs.name == 'prx_pixels':  # this pipeline returns pixels in [-1, 1]
        theirs = (theirs / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    assert_command_draws_the_same(model, tmp_path / 'exported', noise_scheduler=family.scheduler, **family.sampling)


@pytest.mark.slow
@pytest.mark.parametrize('runs', ['mmdit', 'dc_ae', 'i1'], indirect=True)
def test_precomputed_encoders_give_the_losses_of_online_ones(runs):
    model = runs.content['model'] | {'train_text_encoder': False, 'caption_dropout': 0.3}
    settings = {'out': str(runs.root / 'latents'), 'streams': runs.content['streams'], 'latents': 'image+text'}
    settings |= {'dtype': 'float32', 'batch_size': 8}
    precompute(load(runs.recipe('stored', model=model, task='precompute', precompute=settings)))
    folder = runs.root / 'latents' / 'small'
    found = LatentManifest.read(folder, '')
    # DC-AE has no variance; i1 reads the padding, which it masks.
    expected = {
        'dc_ae': ('mean', 'last', 'removed'),
        'mmdit': ('sample', 'penultimate+pooled+t5', 'kept'),
        'i1': ('sample', 'last', 'kept'),
    }[runs.name]
    assert (found.posterior, found.text_output, found.text_padding) == expected

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
