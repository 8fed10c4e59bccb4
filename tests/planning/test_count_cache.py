"""Model counts, shipped and cached, when a model is counted again, and costs by name and keywords as in a recipe."""

import json
import sys
from pathlib import Path

import pytest

from diffusion.config import registry
from diffusion.config.image_shapes import Shape, square
from diffusion.config.load import load
from diffusion.config.recipe import Component
from diffusion.models.cost_counting import COUNTERS, answer
from diffusion.models.vae import STABLE_DIFFUSION_VAE
from diffusion.planning import count_cache
from diffusion.planning.count_cache import SHIPPED, CountingFailed, ModelKey, run_counter
from diffusion.planning.model_costs import PRECISIONS, ModelCosts

TINY = {'block_out_channels': [32], 'layers_per_block': 0, 'text_width': 32, 'text_layers': 1}
SHIPPED_FILES = sorted(SHIPPED.glob('*.json'))
LARGE = ('autoencoder', 'i1', 'mmdit', 'perceptual_losses', 'prx', 'sd2', 'sdxl', 'tiny')
"""Models that take seconds to count."""


@pytest.fixture
def requests(monkeypatch, tmp_path):
    """Record the requests to the counter, with an empty cache."""
    recorded, run_counter = [], count_cache.run_counter

    def record(request):
        recorded.append(request)
        return run_counter(request)

    monkeypatch.setattr(count_cache, 'run_counter', record)
    monkeypatch.setattr(count_cache, 'counts_folder', lambda: tmp_path / 'cache')
    return recorded


def precisions_of(content):
    """Return the precisions in which a model is counted; those of `speed` do not apply to losses' networks."""
    return ('float32', 'half') if content['name'] in COUNTERS else PRECISIONS


@pytest.mark.parametrize(
    'path',
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem.startswith(LARGE) else [])
        for path in SHIPPED_FILES
    ],
)
def test_shipped_counts_match_the_models(path):
    """Check one shape per file; if it fails, run benchmarks/model_counts.py."""
    content = json.loads(path.read_text())
    shape, precision = next(iter(content['flops'])), precisions_of(content)[-1]
    # Count in this process: another one would import torch for each file.
    request = {key: content[key] for key in ('name', 'kwargs', 'lora') if key in content}
    again = answer(request | {'imports': [], 'flops': [shape], 'activations': [(shape, precision)]})
    assert again['facts'] == content['facts']
    assert again['flops'][shape] == content['flops'][shape]
    assert again['activations'] == {f'{shape} {precision}': content['activations'][f'{shape} {precision}']}


def test_counts_of_every_recipe_are_shipped():
    recipes = [load(path, allow_missing=True) for path in (Path(__file__).parents[2] / 'yamls').glob('*.yaml')]
    assert {ModelCosts(recipe.model).key.file_name for recipe in recipes} <= {path.name for path in SHIPPED_FILES}


def test_plan_counts_the_encoder_of_flux2_by_the_name_of_its_repository():
    model = {'vae': 'black-forest-labs/FLUX.2-klein-4B', 'vae_layout': 'grouped', 'depth': 1}
    key = ModelCosts(Component('tiny_prx', model)).key
    counted = answer(key.request | {'flops': ['256x256'], 'activations': []})
    assert (counted['facts']['latent_channels'], counted['facts']['pixels_per_cell']) == (128, 16)
    assert counted['flops']['256x256']['image_encoder'] == 273_258_905_600


def test_missing_counts_are_made_once_with_a_message(requests, capsys, tmp_path):
    model = ModelCosts(Component('tiny', TINY))
    model.count([square(64)], [(square(64), 'float32')])
    message = capsys.readouterr().err
    assert message.startswith('counting FLOPs and activations of tiny on the meta device, about 25 s; cached in ')
    assert f'cached in {tmp_path}/cache/tiny-' in message
    again = ModelCosts(Component('tiny', TINY | {'caption_dropout': 0.5, 'resolution': 128, 'vae': None}))
    assert again.trained_flops(square(64)) == model.trained_flops(square(64))
    assert again.activations(square(64), 'float32') == model.activations(square(64), 'float32')
    assert len(requests) == 1
    again.trained_flops(square(128))
    assert [request['flops'] for request in requests] == [['64x64'], ['128x128']]
    assert ModelCosts(Component('tiny', TINY)).trained_flops(square(128)) == again.trained_flops(square(128))
    assert len(requests) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_truncated_counts_and_those_of_other_library_versions_are_made_again(requests, monkeypatch):
    model = ModelCosts(Component('tiny', TINY))
    first = model.trained_parameters
    model.key.cached.write_text('{"facts": {"trained')
    assert ModelCosts(Component('tiny', TINY)).trained_parameters == first > 0
    monkeypatch.setattr(ModelKey, 'made_with', lambda self: {'torch': '99'})
    assert ModelCosts(Component('tiny', TINY)).trained_parameters == first
    assert len(requests) == 3


@pytest.mark.parametrize('keyword', ['block_out_channels', 'layers_per_block', 'text_width', 'train_text_encoder'])
def test_keywords_that_change_the_architecture_change_the_file_name(keyword):
    values = {'block_out_channels': [64], 'layers_per_block': 2, 'text_width': 64, 'train_text_encoder': False}
    names = {ModelCosts(Component('tiny', kwargs)).key.file_name for kwargs in ({}, {keyword: values[keyword]})}
    assert len(names) == 2


def test_unwritable_cache_prints_a_message_and_planning_continues(requests, monkeypatch, capsys, tmp_path):
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(count_cache, 'counts_folder', lambda: tmp_path / 'file' / 'cache')
    assert ModelCosts(Component('tiny', TINY)).trained_parameters > 0
    assert 'cannot be written (' in capsys.readouterr().err


def test_failing_counter_raises_counting_failed_and_its_output_is_printed(monkeypatch, capsys, tmp_path):
    script = tmp_path / 'python'
    found = '$CUDA_VISIBLE_DEVICES,$PYTHONSAFEPATH,${PYTHONPATH%%:*},$*,$(cat)'
    script.write_text(f'#!/bin/sh\necho "{found}" >&2\nexit 3\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(script))
    with pytest.raises(CountingFailed, match='counting tiny failed with exit status 3; see the traceback above'):
        run_counter({'name': 'tiny'})
    folder = Path(count_cache.__file__).parents[2]
    assert capsys.readouterr().err == f',1,{folder},-m diffusion.models.cost_counting,{{"name": "tiny"}}\n\n'


def costs(name, **kwargs):
    return ModelCosts(Component(name, kwargs))


def test_sd2_has_the_published_parameters_and_flops():
    model = costs('sd2', resolution=256)
    assert (model.trained_parameters, model.frozen_parameters) == (865_910_724, 83_653_863 + 340_387_840)
    assert (model.posterior, model.trains_text, model.text_embedding_elements) == ('sample', False, 77 * 1024)
    assert model.notes == []
    gigaflops = {256: (181.09, 272.7), 512: (804.26, 1116.7), 768: (2149.11, None), 1024: (4674.99, None)}
    for side, (trained, encoder) in gigaflops.items():
        assert model.trained_flops(square(side)) / 1e9 == pytest.approx(trained, abs=0.005)
        if encoder is not None:
            assert model.image_encoder_flops(square(side)) / 1e9 == pytest.approx(encoder, abs=0.05)
    assert model.text_encoder_flops / 1e9 == pytest.approx(45.13, abs=0.005)


LARGE_MODELS = {'sdxl', 'mmdit', 'prx', 'i1', 'tiny_sdxl', 'tiny_mmdit'}


@pytest.mark.parametrize(
    'name',
    [pytest.param(name, marks=pytest.mark.slow if name in LARGE_MODELS else ()) for name in registry.names('model')],
)
def test_every_registered_model_can_be_counted(name):
    assert costs(name).trained_flops(square(64 if name != 'sd2' else 256)) > 0


def test_hub_weights_use_the_default_architecture_with_a_note():
    model = costs('sd2', pretrained='somebody/sd2', vae='somebody/vae')
    assert model.key == costs('sd2').key
    assert [note.split(' is not')[0] for note in model.notes] == ['somebody/sd2', 'somebody/vae']


def test_config_of_a_local_folder_is_used(tmp_path):
    (tmp_path / 'vae').mkdir()
    config = STABLE_DIFFUSION_VAE | {'latent_channels': 16, 'block_out_channels': [32, 32, 32, 32]}
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config))
    settings = {'block_out_channels': [32], 'text_layers': 1, 'vae': str(tmp_path)}
    assert costs('tiny', **settings).latent_elements(square(256)) == 16 * 32 * 32
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config | {'latent_channels': 8}))
    assert costs('tiny', **settings).latent_elements(square(256)) == 8 * 32 * 32
    (tmp_path / 'vae' / 'config.json').write_text('{')
    with pytest.raises(ValueError, match=r'config\.json: not JSON .*save_pretrained'):
        costs('tiny', **settings)


def test_shape_that_is_not_a_multiple_of_the_latent_cell_is_an_error():
    for shape in (Shape(64, 68), Shape(68, 64)):
        with pytest.raises(ValueError, match=f'streams: {shape} px is not a multiple of 8 px'):
            costs('sd2').count([shape])
