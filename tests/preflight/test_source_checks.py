"""Preflight check of the pretrained weights that a recipe names, against a Hub on localhost and local folders."""

import json
import re
import shutil
from typing import Any

import pytest
from hub_server import COMMIT, serving
from transformers import Dinov2Config, Dinov2Model

from diffusion.config.load import load
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch.gpu_health import Finding
from diffusion.models import hub_files
from diffusion.models.families.sd2.builder import tiny
from diffusion.preflight import node_checks
from diffusion.preflight.node_checks import check_sources
from diffusion.storage.retry import RetryPolicy

ALIGNMENT = {'encoder': 'someone/model', 'revision': COMMIT, 'block': 1}
HUB_DENOISER = {'from': 'hf://someone/model', 'revision': COMMIT}
VAE = 'vae/diffusion_pytorch_model.safetensors'


@pytest.fixture(scope='module')
def repository(small_vae, tmp_path_factory):
    """Folder of a repository: an image encoder at the top, a VAE and a denoiser of the tiny recipe in subfolders."""
    folder = tmp_path_factory.mktemp('repository')
    sizes: dict[str, Any] = {'hidden_size': 32, 'num_attention_heads': 2, 'num_hidden_layers': 1}
    Dinov2Model(Dinov2Config(**sizes, image_size=28, patch_size=14)).save_pretrained(folder)
    shutil.copytree(small_vae, folder / 'vae')
    denoiser: Any = tiny(32, vae=str(small_vae), block_out_channels=(32, 32), text_width=32, text_layers=1).denoiser
    denoiser.save_pretrained(folder / 'unet')
    return folder


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """Hub that serves a copy of the repository, with an empty cache."""
    monkeypatch.setattr(node_checks, 'POLICY', RetryPolicy(tries=2, timeout_seconds=0.3))
    shutil.copytree(repository, tmp_path / 'repository')
    with serving(tmp_path / 'repository', tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def recipe(write_recipe):
    """Function that loads the tiny recipe, of a U-Net or a transformer, with keywords of the model and sections."""

    def make(*, prx: bool = False, init_from: Any = None, **model: Any):
        unet = {'name': 'tiny', 'block_out_channels': [32, 32], 'text_width': 32, 'text_layers': 1}
        transformer = {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'text_width': 32}
        small = transformer if prx else unet
        return load(write_recipe(model={**small, 'resolution': 32, **model}, init_from=init_from))

    return make


def test_every_source_is_checked_without_downloading_weights(recipe, hub, small_vae):
    assert check_sources(recipe()) == []
    vae, initial = check_sources(recipe(vae='someone/model', init_from=HUB_DENOISER))
    size = (hub.folder / VAE).stat().st_size / 1000
    assert vae == Finding('weights', True, f'model.vae: someone/model (vae: {size:.1f} kB to download)')
    assert initial.ok and re.fullmatch(r'init_from: hf://someone/model \(\d.* MB to download\)', initial.detail)
    aligned = recipe(prx=True, vae=str(small_vae), representation_alignment=ALIGNMENT)
    local, encoder = check_sources(aligned)
    assert local.detail == f'model.vae: {small_vae} (AutoencoderKL: in {small_vae})'
    assert encoder.ok and 'representation_alignment.encoder: someone/model (Dinov2Model: ' in encoder.detail
    assert not any(each.startswith('GET') and each.endswith('.safetensors') for each in hub.requests)
    hub_files.fetch(Dinov2Model, 'someone/model', subfolder='', revision=COMMIT, weights=True)
    before = len(hub.requests)
    assert check_sources(aligned)[1].detail.endswith('(Dinov2Model: in the cache)')
    assert len(hub.requests) == before


@pytest.mark.parametrize(
    ('fault', 'status', 'message'),
    [
        ('gated', CONFIG_ERROR, 'access is restricted: accept the terms at .*/someone/model, and set HF_TOKEN or log'),
        ('no-repository', CONFIG_ERROR, '401: there is no such repository, or it is private'),
        ('no-revision', CONFIG_ERROR, '404: there is no revision'),
        (503, FAILED, 'tried 2 times .*HF_HUB_OFFLINE=1'),
    ],
)
def test_refusals_and_faults_of_the_hub_have_their_own_status(recipe, hub, fault, status, message):
    hub.always = fault
    found = check_sources(recipe(prx=True, vae='someone/model', representation_alignment=ALIGNMENT))
    # After a fault of the network, the other sources are not asked for.
    assert [(each.ok, each.status) for each in found] == [(False, status)] * (1 if fault == 503 else 2)
    assert all(re.search(message, each.detail) for each in found)
    if fault == 503:
        assert len(hub.requests) <= 2 * 2, 'of the VAE alone, as a subfolder and at the top'


def test_missing_file_of_lpips_is_found_although_the_hub_does_not_answer(recipe, hub, tmp_path):
    hub.always = 503
    losses = {'lpips_backbone': str(tmp_path / 'vgg.pth'), 'features_weight': 0}
    flow = {'path': 'flow', 'prediction_type': 'sample'}
    pixels = {'vae': 'pixels', 'patch_size': 8, 'objective': flow, 'perceptual_losses': losses}
    found = check_sources(recipe(prx=True, **pixels, representation_alignment=ALIGNMENT))
    assert [each.status for each in found] == [CONFIG_ERROR, FAILED]
    assert 'lpips_backbone: ' in found[0].detail and 'does not exist on this machine' in found[0].detail
    assert 'use a local folder written by save_pretrained instead' in found[1].detail
    (tmp_path / 'vgg.pth').write_bytes(b'weights')
    assert [each.ok for each in check_sources(recipe(prx=True, **pixels))] == [True]


def test_missing_weight_files_are_found(recipe, hub, small_vae, tmp_path):
    (hub.folder / VAE).unlink()
    folder = tmp_path / 'local'
    shutil.copytree(small_vae, folder)
    (folder / 'diffusion_pytorch_model.safetensors').unlink()
    for vae, message in (
        ('someone/model', 'someone/model/vae: AutoencoderKL .*has no weights in the format safetensors'),
        (str(folder), f'{folder}: has no diffusion_pytorch_model.safetensors'),
        (str(tmp_path / 'nowhere'), 'nowhere is not a folder on this machine'),
    ):
        (found,) = check_sources(recipe(vae=vae))
        assert (found.ok, found.status) == (False, CONFIG_ERROR)
        assert re.search(f'model.vae: .*{message}', found.detail), found.detail
    missing = ALIGNMENT | {'encoder': '/nowhere'}
    _, found = check_sources(recipe(prx=True, vae=str(small_vae), representation_alignment=missing))
    assert found.detail.startswith('model.representation_alignment.encoder: /nowhere is not a folder')


def test_shard_that_the_hub_lacks_is_found(recipe, hub, small_vae):
    (hub.folder / 'model.safetensors').rename(hub.folder / 'model-00001-of-00002.safetensors')
    shards = {'a': 'model-00001-of-00002.safetensors', 'b': 'model-00002-of-00002.safetensors'}
    (hub.folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': shards}))
    _, found = check_sources(recipe(prx=True, vae=str(small_vae), representation_alignment=ALIGNMENT))
    assert (found.ok, found.status) == (False, CONFIG_ERROR)
    assert 'has no model-00002-of-00002.safetensors, which model.safetensors.index.json lists' in found.detail


def test_initial_weights_of_another_architecture_are_found(recipe, hub, repository, tmp_path):
    other = {'block_out_channels': [64, 64], 'vae': str(repository / 'vae')}
    for start in (HUB_DENOISER, str(repository)):
        _, found = check_sources(recipe(**other, init_from=start))
        assert not found.ok and 'the architecture differs from the recipe: block_out_channels' in found.detail
    _, found = check_sources(recipe(vae=str(repository / 'vae'), init_from=str(tmp_path / 'runs' / 'nothing')))
    assert not found.ok and 'init_from: ' in found.detail and 'does not exist' in found.detail
