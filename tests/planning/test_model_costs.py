"""Parameters, FLOPs and sizes of models, looked up by name and keywords as in a recipe."""

import json

import pytest

from diffusion.config import registry
from diffusion.config.image_shapes import square
from diffusion.config.recipe import Component
from diffusion.models.vae import STABLE_DIFFUSION_VAE
from diffusion.planning.model_costs import ModelCosts


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


LARGE = {'sdxl', 'mmdit', 'prx', 'i1', 'tiny_sdxl', 'tiny_mmdit'}


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in registry.names('model')]
)
def test_every_registered_model_can_be_counted(name):
    model = costs(name)
    assert model.trained_flops(square(64 if name != 'sd2' else 256)) > 0


def test_hub_weights_use_the_default_architecture_with_a_note():
    model = costs('sd2', pretrained='somebody/sd2', vae='somebody/vae')
    assert model.key == costs('sd2').key
    assert [note.split(' is not')[0] for note in model.notes] == ['somebody/sd2', 'somebody/vae']


def test_config_of_a_local_folder_is_used(tmp_path):
    (tmp_path / 'vae').mkdir()
    config = STABLE_DIFFUSION_VAE | {'latent_channels': 16, 'block_out_channels': [32, 32, 32, 32]}
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config))
    settings = {'block_out_channels': [32], 'text_layers': 1, 'vae': str(tmp_path)}
    model = costs('tiny', **settings)
    assert model.latent_elements(square(256)) == 16 * 32 * 32
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config | {'latent_channels': 8}))
    assert costs('tiny', **settings).latent_elements(square(256)) == 8 * 32 * 32
    (tmp_path / 'vae' / 'config.json').write_text('{')
    with pytest.raises(ValueError, match=r'config\.json: not JSON .*save_pretrained'):
        costs('tiny', **settings)


def test_shape_that_is_not_a_multiple_of_the_latent_cell_is_an_error():
    with pytest.raises(ValueError, match='streams: 68x68 px is not a multiple of 8 px'):
        costs('sd2').count([square(68)])
