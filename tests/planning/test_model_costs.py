"""What the plan says a model is made of, against the builders themselves."""

import pytest

from diffusion.config import registry
from diffusion.config.image_shapes import square
from diffusion.config.signatures import defaults_of_source
from diffusion.models import sd2_config
from diffusion.models.autoencoder import tiny_autoencoder
from diffusion.models.builders import sd2, tiny
from diffusion.planning.model_costs import Model, describe, describes
from diffusion.planning.unet import DEFAULTS


def trained(model):
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def size_of(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'block_out_channels': [64, 128], 'layers_per_block': 2},
        {'text_width': 64, 'text_layers': 1, 'max_length': 8, 'train_text_encoder': False},
    ],
)
def test_tiny_is_what_its_builder_builds(settings):
    built, described = tiny(**settings), describe('tiny', settings)
    assert described.trained_parameters == trained(built)
    frozen = size_of(built.vae) + (0 if built.train_text_encoder else size_of(built.text))
    assert described.frozen_parameters == frozen
    assert described.text_length == built.text.tokenizers[0].model_max_length
    assert described.denoiser is not None
    config = built.denoiser.config
    for key in DEFAULTS.keys() & described.denoiser.keys():
        value = config[key]
        assert (tuple(value) if isinstance(value, list) else value) == described.denoiser[key], key


def test_the_autoencoder_is_what_its_builder_builds():
    settings = {'block_out_channels': (8, 16, 24), 'latent_channels': 4}
    described = describe('autoencoder', settings)
    assert described.trained_parameters == trained(tiny_autoencoder(**settings))
    assert described.frozen_parameters == 0


def test_sd2_is_the_published_model():
    described = describe('sd2', {'resolution': 256})
    assert described.trained_parameters == 865_910_724
    assert described.frozen_parameters == 83_653_863 + 340_387_840
    assert (described.posterior, described.trains_text, described.text_length, described.notes) == (
        'sample',
        False,
        77,
        (),
    )


@pytest.mark.slow
def test_sd2_is_what_its_builder_builds():
    built = sd2(pretrained=None, encoder_dtype='bfloat16')
    assert trained(built) == describe('sd2', {}).trained_parameters
    assert size_of(built.vae) + size_of(built.text) == describe('sd2', {}).frozen_parameters


@pytest.mark.parametrize('name', registry.names('model'))
def test_every_registered_model_is_described(name):
    assert describe(name, {}).train(square(64)).forward_flops > 0


def test_defaults_are_read_from_the_builders_themselves():
    import inspect

    for name in ('sd2', 'tiny'):
        builder = registry.resolve('model', name)
        own = {p.name: p.default for p in inspect.signature(builder).parameters.values() if p.default is not p.empty}
        assert defaults_of_source('diffusion.models.builders', name) == own


def test_training_the_text_encoder_makes_it_part_of_the_work():
    frozen, training = (describe('sd2', {'train_text_encoder': train}) for train in (False, True))
    assert training.trained_parameters - frozen.trained_parameters == 340_387_840
    extra = training.train(square(256)).forward_flops - frozen.train(square(256)).forward_flops
    assert extra == frozen.encode_text().forward_flops


def test_parts_from_elsewhere_are_counted_as_usual_and_said_so():
    described = describe('sd2', {'pretrained': 'somebody/sd2', 'vae': 'somebody/vae'})
    assert described.trained_parameters == 865_910_724
    assert [note.split(' is not')[0] for note in described.notes] == ['somebody/vae', 'somebody/sd2']


def test_parts_from_a_local_folder_are_read(tmp_path):
    import json

    (tmp_path / 'vae').mkdir()
    config = sd2_config.VAE | {'latent_channels': 16}
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config))
    described = describe('sd2', {'vae': str(tmp_path)})
    assert described.latent_elements(square(256)) == 16 * 32 * 32
    assert described.denoiser is not None and described.denoiser['in_channels'] == 16
    (tmp_path / 'vae' / 'config.json').write_text('{')
    with pytest.raises(ValueError, match=r'config\.json: not JSON .*save_pretrained'):
        describe('sd2', {'vae': str(tmp_path)})


def test_an_unknown_model_says_how_to_describe_it():
    with pytest.raises(
        ValueError, match=r"'mine' is made of \(it knows autoencoder, sd2, tiny\); .*describes\('mine'\)"
    ):
        describe('mine', {})


def test_a_model_of_somebodys_own_can_be_described(monkeypatch):
    from diffusion.planning import model_costs

    monkeypatch.setattr(model_costs, '_DESCRIBERS', dict(model_costs._DESCRIBERS))
    monkeypatch.setitem(registry.TARGETS['model'], 'mine', object)

    @describes('mine')
    def mine(settings):
        return Model(vae=sd2_config.VAE, denoiser=sd2_config.UNET | {'block_out_channels': settings['widths']})

    assert describe('mine', {'widths': [64, 128, 128, 128]}).trained_parameters < 20e6


def test_a_shape_that_is_no_multiple_of_a_cell_is_an_error():
    with pytest.raises(ValueError, match='streams: 68x68 px is not a multiple of 8 px'):
        describe('sd2', {}).check_shape(square(68))
