"""Stable Diffusion XL in miniature: precomputed data, and the exported pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import largest_difference, read_losses
from recipe_files import write_yaml
from shards import write_image_shards
from stock_pipeline import assert_command_draws_the_same, draw

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export
from diffusion.tasks.precompute import precompute
from diffusion.training.components import build_loader, build_model
from diffusion.training.train import train


@pytest.fixture(scope='module')
def content(tmp_path_factory, tiny_recipe):
    """Recipe of a run on random mirrored crops of images of two sizes, for a model with trained text encoders."""
    root = tmp_path_factory.mktemp('sdxl')
    streams = {}
    for index, (name, side) in enumerate({'small': 40, 'large': 72}.items()):
        folder = write_image_shards(root / name, count=16, side=side, offset=100 * index)
        streams[name] = {'local': str(folder), 'resolution': 32 * (index + 1)}
    recipe = tiny_recipe(root / 'runs', streams=streams)
    recipe['model'] |= {'name': 'tiny_sdxl', 'block_out_channels': [64, 64], 'text_layers': 2}
    recipe['dataset'] |= {'crop': 'random', 'min_crop_scale': 0.6, 'flip': True}
    recipe['trainer'] |= {'max_duration': '6ba', 'save_interval': '2ba'}
    return recipe


@pytest.fixture
def write(content, tmp_path):
    """Function that writes the recipe with some sections replaced, for runs in the test's temporary folder."""

    def write_file(name: str, *, model: dict[str, Any] | None = None, **sections: Any) -> Path:
        path = tmp_path / f'{name}.yaml'
        sections |= {'name': name, 'runs_dir': str(tmp_path / 'runs'), 'model': content['model'] | (model or {})}
        return write_yaml(path, content | sections)

    return write_file


@pytest.fixture
def stored(write, content, tmp_path):
    """Function that precomputes the data with a model, and returns the streams of the output."""

    def encode(latents: str, name: str = 'sdxl', model: dict[str, Any] | None = None) -> dict[str, Any]:
        out = tmp_path / f'{name}-{latents.replace("+", "-")}'
        settings = {
            **{'out': str(out), 'streams': content['streams'], 'batch_size': 4, 'dtype': 'float32'},
            **{'latents': latents, 'crop': 'random', 'min_crop_scale': 0.6},
        }
        frozen = {'train_text_encoder': False} | (model or {})
        precompute(load(write(out.name, model=frozen, precompute=settings, task='precompute')))
        return {key: value | {'local': str(out / key)} for key, value in content['streams'].items()}

    return encode


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_and_a_kill_give_the_curve_of_one(write, tmp_path, ranks):
    sharded = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'activation_checkpointing': True}
    ranks.run(1, write('one'))
    path, run = write('two', parallelism=sharded), tmp_path / 'runs' / 'two'
    job = ranks.start(2, path)
    job.wait_for_batch(run, 3)
    job.kill()
    ranks.run(2, path)
    losses = read_losses(tmp_path / 'runs' / 'one')
    assert len(losses) == 6
    assert largest_difference(losses, read_losses(run)) < 1e-4


@pytest.mark.cpu_seconds(20)
@pytest.mark.parametrize('latents', ['image+text', pytest.param('image', marks=pytest.mark.slow)])
def test_losses_on_precomputed_data_equal_losses_online(write, stored, tmp_path, latents):
    streams = stored(latents)
    frozen = {'train_text_encoder': False}
    in_order = {'num_workers': 0, 'shuffle': False}  # shuffling depends on the shards, which differ
    dataset = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.6, 'caption_choice': 'random'}
    batches, model = [], None
    for name, sections in {
        'online': {'dataset': dataset},
        'stored': {'dataset': {'name': 'latents', 'caption_choice': 'random'}, 'streams': streams},
    }.items():
        recipe = load(write(name, model=frozen, loader=in_order, **sections), ['trainer.max_duration=2ba'])
        batches.append(next(iter(build_loader(recipe))))
        train(recipe).close()
        model = build_model(recipe)
    online, offline = (read_losses(tmp_path / 'runs' / name) for name in ('online', 'stored'))
    assert len(online) == 2
    assert largest_difference(online, offline) < 1e-4
    # At initialization, sizes and pooled text hardly change the loss: compare them too.
    online_batch, stored_batch = batches
    assert (online_batch[batch_keys.IMAGE_SIZES][:, 2:4] > 0).any()
    assert online_batch[batch_keys.IMAGE_SIZES].equal(stored_batch[batch_keys.IMAGE_SIZES])
    assert (batch_keys.TEXT_POOLED in stored_batch) == (latents == 'image+text')
    if latents == 'image+text':
        assert isinstance(model, LatentDiffusion)
        text = model.embed(online_batch[batch_keys.INPUT_IDS])
        torch.testing.assert_close(stored_batch[batch_keys.TEXT_POOLED], text.pooled)
        torch.testing.assert_close(stored_batch[batch_keys.TEXT_EMBEDS], text.embeds)


@pytest.mark.slow
def test_data_without_sizes_or_pooled_text_is_refused_with_the_way_out(write, stored, tmp_path):
    frozen = {'train_text_encoder': False}
    streams = stored('image+text')

    def problem() -> str:
        with pytest.raises(UserError) as error:
            train(load(write('refused', model=frozen, dataset={'name': 'latents'}, streams=streams)))
        return str(error.value)

    manifests = [*tmp_path.glob('sdxl-image-text/*/manifest.json')]

    def change(key: str, value: object) -> None:
        assert manifests
        for manifest in manifests:
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {key: value}))

    change('text_output', 'last')
    expected = 'the stored output of the text encoders is last, but the model takes penultimate+pooled; precompute it'
    assert expected in problem()
    change('image_sizes', False)
    expected = 'its latents have no image sizes, on which the model is conditioned; precompute them again with this'
    assert expected in problem()
    change('version', 1)
    assert 'manifest.json is not a manifest of version 2. To fix: precompute the latents again' in problem()


STOCK = ('stable_diffusion_xl.pipeline_stable_diffusion_xl', 'StableDiffusionXLPipeline')


@pytest.mark.cpu_seconds(20)
@pytest.mark.parametrize(
    ('mode', 'negative'),
    [('zeros', ''), *(pytest.param(*each, marks=pytest.mark.slow) for each in (('empty', ''), ('zeros', 'blue')))],
)
def test_stock_pipeline_generates_the_same_images(write, tmp_path, mode, negative):
    path = write('run', model={'caption_dropout_mode': mode, 'caption_dropout': 0.5, 'resolution': 64})
    train(load(path, ['trainer.max_duration=1ba'])).close()
    export(tmp_path / 'runs' / 'run', tmp_path / 'out')
    index = json.loads((tmp_path / 'out' / 'model_index.json').read_text())
    assert index['_class_name'] == 'StableDiffusionXLPipeline'
    assert (index['force_zeros_for_empty_prompt'], index['add_watermarker']) == (mode == 'zeros', False)
    model = trained_model(load(path), None).model
    assert isinstance(model, LatentDiffusion)
    latents = torch.randn(1, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    sampling: dict[str, Any] = {'num_inference_steps': 4, 'guidance_scale': 3.0}
    call = {'prompt': 'a red square', 'negative_prompt': negative or None, 'height': 32, 'width': 64, **sampling}
    theirs, _ = draw(STOCK, tmp_path / 'out', latents, call, tmp_path)
    ours = model.generate(['a red square'], latents=latents, negative_prompt=negative, **sampling)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)
    if mode == 'empty':
        assert_command_draws_the_same(model, tmp_path / 'out', noise_scheduler='ddim')
