"""`init_from` with published weights: folders of diffusers, the Hub, and files in the original layout."""

import json
import logging
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from hub_server import COMMIT, serving
from huggingface_hub import constants
from original_layout import original_layout
from safetensors.torch import save_file

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.diffusers_weights import check_local_denoiser, fitting_hint, way_out
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.original_layout import read_original
from diffusion.tasks.export import export
from diffusion.training.initial_weights import read_weights
from diffusion.training.train import build_trainer, train
from tests.models.test_single_file import SD2, XL


@pytest.fixture(scope='module')
def published(make_model, tmp_path_factory):
    """A model with other weights than a recipe's, and the folder of its pipeline in the layout of diffusers."""
    model = make_model(resolution=32)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    folder = tmp_path_factory.mktemp('published') / 'pipeline'
    model.adapter.pipeline(model).save_pretrained(folder)
    return model, folder


@pytest.fixture
def recipe_from(write_recipe):
    """Function that loads a recipe whose run starts from a source; keywords replace settings of the model.

    The model has the layers of published ones, with names of weights of each kind.
    """

    def write(start, *, train_text_encoder=False, name='run', **settings):
        path = write_recipe(name, init_from=start if isinstance(start, dict) else str(start))
        model = {'layers_per_block': 1, 'train_text_encoder': train_text_encoder} | settings
        return load(path, [f'model.{key}={json.dumps(value)}' for key, value in model.items()])

    return write


@pytest.fixture
def single_file(published, tmp_path):
    """The published U-Net in the original layout, with averages, beside tensors of other parts."""
    model, _ = published
    weights = original_layout(model.denoiser.state_dict(), layers_per_block=1, ema=True)
    file = tmp_path / 'v2-1.safetensors'
    others = {'first_stage_model.encoder.conv_in.weight': torch.zeros(1), 'alphas_cumprod': torch.ones(1000)}
    save_file(weights | others, file)
    return file


def started(recipe) -> dict[str, torch.Tensor]:
    """Return a run's weights before its first batch."""
    trainer = build_trainer(recipe)
    weights = {name: each.clone() for name, each in trainer.state.model.state_dict().items()}
    trainer.close()
    return weights


def read(published, recipe) -> None:
    read_weights(published[0], recipe.initial_weights)


def assert_equal(weights, expected):
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def denoiser_of(model) -> dict[str, torch.Tensor]:
    return {f'denoiser.{name}': each for name, each in model.denoiser.state_dict().items()}


def test_run_starts_from_a_folder_of_diffusers(published, recipe_from, caplog):
    model, folder = published
    with caplog.at_level(logging.INFO):
        weights = started(recipe_from(folder))
    assert_equal(weights, denoiser_of(model))
    assert f"init_from: loaded the denoiser's weights of {folder}" in caplog.text


def test_trained_text_encoder_is_loaded_too(published, recipe_from, caplog):
    model, folder = published
    with caplog.at_level(logging.INFO):
        assert_equal(started(recipe_from(folder, train_text_encoder=True)), model.state_dict())
    assert 'loaded the weights of denoiser and text encoder' in caplog.text
    with pytest.raises(UserError, match=r'init_from: .*/unet: has no text_encoder/, .*train_text_encoder: false'):
        build_trainer(recipe_from(folder / 'unet', train_text_encoder=True, name='other'))


def test_half_precision_weights_are_read(published, recipe_from, tmp_path, caplog):
    model, folder = published
    unet = UNet2DConditionModel.from_pretrained(folder / 'unet', low_cpu_mem_usage=False)
    unet.half().save_pretrained(tmp_path / 'shards', max_shard_size='300KB')
    assert len([*(tmp_path / 'shards').glob('*.safetensors')]) > 1
    expected = {name: each.half().float() for name, each in denoiser_of(model).items()}
    assert_equal(started(recipe_from(tmp_path / 'shards')), expected)
    unet.save_pretrained(tmp_path / 'halves', variant='fp16')
    assert_equal(started(recipe_from(tmp_path / 'halves', name='other')), expected)
    assert f'{tmp_path}/halves: only has half-precision weights (fp16), which are loaded' in caplog.messages


@pytest.mark.slow
def test_trained_run_exports_and_starts_another_run(published, recipe_from, tmp_path):
    """From a folder of diffusers over a batch of training and our export to the next run."""
    _, folder = published
    recipe = recipe_from(folder)
    recipe.trainer |= {'max_duration': '1ba', 'save_interval': '1ba'}
    train(recipe).close()
    trained = weights_of(find_checkpoint(recipe.run_dir), 'training')[0]
    assert any(not torch.equal(trained[name], each) for name, each in denoiser_of(published[0]).items())
    export(recipe.run_dir, tmp_path / 'exported')
    assert_equal(started(recipe_from(tmp_path / 'exported', name='next')), trained)
    resumed = build_trainer(recipe)
    assert resumed.state.timestamp.batch.value == 1, 'the checkpoint takes precedence over init_from'
    resumed.close()


def test_run_starts_from_a_file_in_the_original_layout(published, recipe_from, single_file):
    weights = started(recipe_from({'from': str(single_file), 'weights': 'ema'}))
    assert_equal(weights, {name: each + 1 for name, each in denoiser_of(published[0]).items()})


def test_original_file_of_another_architecture_is_refused(tmp_path, recipe_from, single_file, published):
    file = tmp_path / 'model.safetensors'
    unet = UNet2DConditionModel(**SD2)
    save_file(original_layout(UNet2DConditionModel(**XL).state_dict(), layers_per_block=1), file)
    with pytest.raises(UserError, match=r'safetensors: the architecture differs .*: \d+ unknown tensors \(model\.'):
        read_original(unet, file, 'training')
    save_file(original_layout(unet.state_dict(), layers_per_block=2), file)
    with pytest.raises(UserError, match=r'lacks model\.diffusion_model\.label_emb\.0\.0\.weight'):
        read_original(UNet2DConditionModel(**XL), file, 'training')
    with pytest.raises(UserError, match=r'it has no averaged weights \(model_ema\.\*\); use weights: training'):
        read_original(unet, file, 'ema')
    save_file(published[0].denoiser.state_dict(), file)
    with pytest.raises(UserError, match=r'it is in the layout of diffusers: name its folder'):
        read_original(unet, file, 'training')
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(UserError, match=r'model\.safetensors: not readable'):
        read_original(unet, file, 'training')
    with pytest.raises(UserError, match=r'init_from: .*trains its text encoder, .*from_single_file'):
        build_trainer(recipe_from(single_file, train_text_encoder=True))


def test_missing_tensor_of_an_original_file_is_named(tmp_path, published, recipe_from):
    weights = original_layout(published[0].denoiser.state_dict(), layers_per_block=1)
    del weights['model.diffusion_model.middle_block.1.proj_in.weight']
    save_file(weights, tmp_path / 'part.safetensors')
    with pytest.raises(UserError, match=r'1 tensors missing \(denoiser\.mid_block\.attentions\.0\.proj_in\.weight\)'):
        build_trainer(recipe_from(tmp_path / 'part.safetensors'))


def test_text_width_that_does_not_fit_is_named(recipe_from, single_file):
    message = r'\(32, 32\), expected \(32, 64\); .* text embeddings of width 32, the model has width 64'
    with pytest.raises(UserError, match=message):
        build_trainer(recipe_from(single_file, text_width=64))


@pytest.mark.parametrize(
    ('width', 'name'),
    [(768, 'Stable Diffusion 1.x'), (1024, 'Stable Diffusion 2.x'), (2048, 'Stable Diffusion XL')],
)
def test_families_are_named_by_the_width_of_their_text(width, name):
    assert way_out(Mock(config={'cross_attention_dim': width})) == f'use weights of {name}, or other model settings'
    stored, own = ({'down.attn2.to_k.weight': torch.zeros(3, each)} for each in (width, 64))
    expected = f'takes text embeddings of width {width} ({name}), the model has width 64'
    assert fitting_hint(stored, own) == f'; its cross-attention {expected}'
    assert fitting_hint(stored, stored) == fitting_hint(stored, {}) == ''


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'attention_head_dim': [2, 2]}, r'attention_head_dim is \[2, 2\], expected'),
        ({'_class_name': 'PRXTransformer2DModel'}, r"a PRXTransformer2DModel, but the model's denoiser is a UNet"),
        ({'attention_head_dim': 1, 'sample_size': 8, 'only_cross_attention': [False, False]}, None),
        ({'cross_attention_dim': 768}, r'cross_attention_dim is 768, expected 32; use other model settings'),
    ],
)
def test_settings_that_compute_something_else_are_refused(published, recipe_from, tmp_path, change, message):
    folder = tmp_path / 'unet'
    shutil.copytree(published[1] / 'unet', folder)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | change))
    if message is None:
        assert_equal(started(recipe_from(folder)), denoiser_of(published[0]))
    else:
        with pytest.raises(UserError, match=f'^init_from: .*config.json: .*{message}'):
            read(published, recipe_from(folder))


def test_folder_without_safetensors_or_denoiser_is_refused(published, recipe_from, tmp_path, small_vae):
    folder = tmp_path / 'pipeline'
    shutil.copytree(published[1], folder)
    file = folder / 'unet' / 'diffusion_pytorch_model.safetensors'
    file.rename(file.with_suffix('.bin'))
    with pytest.raises(UserError, match=r'safetensors does not exist; save .*safe_serialization=True'):
        read(published, recipe_from(folder))
    with pytest.raises(UserError, match=r'safetensors does not exist'):
        check_local_denoiser(published[0].denoiser, folder)
    shutil.rmtree(folder / 'unet')
    with pytest.raises(UserError, match=r'has neither unet/config.json nor transformer/config.json nor config.json'):
        read(published, recipe_from(folder))
    with pytest.raises(UserError, match=r"holds a AutoencoderKL, but the model's denoiser is a UNet2DCondition"):
        read(published, recipe_from(small_vae))
    with pytest.raises(UserError, match=r'init_from\.weights: ema, but .* has only one set of weights; use training'):
        read(published, recipe_from({'from': str(published[1]), 'weights': 'ema'}))


def test_additional_latent_channels_start_at_zero_if_asked(published, recipe_from, tmp_path, caplog):
    model, folder = published
    vae = tmp_path / 'vae6'
    torch.manual_seed(0)
    config: Any = AutoencoderKL.load_config(folder / 'vae')
    six: Any = AutoencoderKL.from_config(config | {'latent_channels': 6})
    six.save_pretrained(vae)
    message = r'conv_in\.weight \(32, 4, 3, 3\) -> \(32, 6, 3, 3\); .*init_from\.resize: true'
    with pytest.raises(UserError, match=message):
        build_trainer(recipe_from(folder, vae=str(vae)))
    with caplog.at_level(logging.INFO):
        weights = started(recipe_from({'from': str(folder), 'resize': True}, vae=str(vae), name='resized'))
    expected, changed = denoiser_of(model), ('conv_in.weight', 'conv_out.weight', 'conv_out.bias')
    enter, leave, bias = (weights.pop(f'denoiser.{name}') for name in changed)
    assert torch.equal(enter[:, :4], expected['denoiser.conv_in.weight']) and not enter[:, 4:].any()
    assert torch.equal(leave[:4], expected['denoiser.conv_out.weight']) and not leave[4:].any() and not bias[4:].any()
    assert_equal(weights, {name: expected[name] for name in weights})
    assert 'added channels of zeros: denoiser.conv_in.weight (32, 4, 3, 3) -> (32, 6, 3, 3)' in caplog.text
    six = UNet2DConditionModel.from_config(dict(model.denoiser.config) | {'in_channels': 6})
    six.save_pretrained(tmp_path / 'six')
    with pytest.raises(UserError, match=r'conv_in\.weight is \(32, 6, 3, 3\), expected \(32, 4, 3, 3\)'):
        build_trainer(recipe_from({'from': str(tmp_path / 'six'), 'resize': True}, name='fewer'))


@pytest.fixture
def hub(published, tmp_path, monkeypatch):
    """Hub that serves the published pipeline, with an empty cache, and retries without pauses."""
    with serving(published[1], tmp_path, monkeypatch) as server:
        yield server


def test_run_starts_from_a_pinned_repository(hub, published, recipe_from):
    recipe = recipe_from({'from': 'hf://someone/model', 'revision': COMMIT}, train_text_encoder=True)
    assert_equal(started(recipe), published[0].state_dict())
    asked = len(hub.requests)
    assert not any(each.endswith('/vae/diffusion_pytorch_model.safetensors') for each in hub.requests)
    hub.always = 503
    model = tiny(**recipe.model.kwargs)
    assert_equal(read_weights(model, recipe.initial_weights).tensors, published[0].state_dict())
    assert len(hub.requests) == asked, 'everything is in the cache'


def test_hub_that_refuses_or_is_not_reached_is_named(hub, published, recipe_from, monkeypatch):
    recipe = recipe_from({'from': 'hf://someone/model', 'revision': COMMIT})
    hub.always = 'no-repository'
    with pytest.raises(UserError, match=r'init_from: someone/model/unet: .*there is no such repository'):
        build_trainer(recipe)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    with pytest.raises(UserError, match=r'init_from: someone/model/unet: .*HF_HUB_OFFLINE is set'):
        read(published, recipe)
