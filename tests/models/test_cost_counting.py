"""Cost counts of complete models: registered ones and a third-party one."""

import io
import json
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from model_batches import size_of
from torch import nn
from transformers import CLIPTextConfig

from diffusion.config import registry
from diffusion.config.image_shapes import Shape, square
from diffusion.models import batch_keys
from diffusion.models.cost_counting import ModelCounter, answer, build_empty, main
from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.vae import STABLE_DIFFUSION_VAE

SETTINGS: dict[str, Any] = {'block_out_channels': [32, 64], 'layers_per_block': 0}
SMALLEST: dict[str, Any] = {'block_out_channels': [32], 'layers_per_block': 0, 'text_width': 32, 'text_layers': 1}


def test_facts_of_tiny_match_the_built_model():
    settings = {**SETTINGS, 'text_width': 64, 'text_layers': 1, 'max_length': 8, 'train_text_encoder': False}
    built, facts = tiny(**settings), ModelCounter(build_empty('tiny', settings)).facts()
    assert facts['trained_parameters'] == size_of(built.denoiser)
    assert facts['frozen_parameters'] == size_of(built.vae) + size_of(built.text)
    assert facts['text_length'] == built.text.tokenizers[0].model_max_length
    assert (facts['text_width'], facts['trains_text_encoder']) == (built.text.width, built.train_text_encoder)
    assert facts['latent_diffusion']


def test_empty_model_is_built_without_reading_weights(small_vae, tmp_path):
    (tmp_path / 'config.json').write_text((small_vae / 'config.json').read_text())
    model = build_empty('tiny', {**SETTINGS, 'vae': str(tmp_path)})
    counter = ModelCounter(model)
    assert {tensor.device.type for tensor in (*model.parameters(), *counter.vae.parameters())} == {'meta'}
    with pytest.raises(ValueError, match='could not be loaded'):
        tiny(**SETTINGS, vae=str(tmp_path))


def test_sd2_is_built_from_the_configurations_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sd2_builder, 'UNET', {'block_out_channels': [32] * 4, 'cross_attention_dim': 1024})
    vae: dict[str, Any] = STABLE_DIFFUSION_VAE | {'latent_channels': 16}
    text: dict[str, Any] = sd2_builder.TEXT_ENCODER | {'num_hidden_layers': 2}
    with torch.device('meta'):
        AutoencoderKL(**vae).save_config(tmp_path / 'vae')
    CLIPTextConfig(**text).save_pretrained(tmp_path / 'text_encoder')
    clip_tokenizer().save_pretrained(tmp_path / 'tokenizer')
    counter = ModelCounter(build_empty('sd2', {'pretrained': str(tmp_path)}))
    assert (counter.channels, len(counter.text.encoders[0].text_model.encoder.layers)) == (16, 2)


@pytest.fixture(scope='module')
def training():
    """Counter of the smallest model, which trains its text encoder."""
    return ModelCounter(build_empty('tiny', SMALLEST))


def test_training_the_text_encoder_adds_its_flops_and_memory(training):
    frozen = ModelCounter(build_empty('tiny', {**SMALLEST, 'train_text_encoder': False}))
    extra = training.flops(square(64))['trained'] - frozen.flops(square(64))['trained']
    assert extra == frozen.facts()['text_encoder_flops']
    kept = [counter.activations(square(64), 'float32').kept for counter in (frozen, training)]
    assert kept[0] < kept[1]


def test_costs_depend_on_the_image_shape(training):
    counter = training
    wide, tall, large = (counter.flops(shape) for shape in (Shape(96, 48), Shape(48, 96), square(128)))
    assert wide == tall
    assert large['image_encoder'] == 4 * counter.flops(square(64))['image_encoder']


class Pixels(ComposerModel):
    """Third-party model that is trained on images, with a frozen teacher and no latents."""

    def __init__(self, width=8):
        super().__init__()
        self.student = nn.Conv2d(3, width, 3, padding=1)
        self.teacher = nn.Conv2d(3, width, 1).requires_grad_(False)

    def forward(self, batch):
        pixels = batch[batch_keys.IMAGE].float()
        with torch.no_grad():
            expected = self.teacher(pixels)
        return self.student(pixels), expected

    def loss(self, outputs, batch):
        return (outputs[0] - outputs[1]).square().mean()


def test_third_party_model_is_counted(monkeypatch):
    monkeypatch.setitem(registry.TARGETS['model'], 'pixels', Pixels)
    request = {'imports': [], 'name': 'pixels', 'kwargs': {'width': 16}, 'flops': ['64x32']}
    found = answer(request | {'activations': [('64x32', 'float32'), ('64x32', 'half')]})
    facts = found['facts']
    assert (facts['trained_parameters'], facts['frozen_parameters']) == (16 * (27 + 1), 16 * (3 + 1))
    pixels = 64 * 32
    assert found['flops'] == {'64x32': {'trained': 2 * 16 * 27 * pixels, 'image_encoder': 2 * 16 * 3 * pixels}}
    assert found['activations']['64x32 float32']['kept'] == 4 * 3 * pixels  # the input of the convolution
    assert found['activations']['64x32 half']['kept'] == 2 * 3 * pixels
    assert found['activations']['64x32 half']['copies'] == 2 * 16 * 27


def test_program_prints_a_user_error_as_json(monkeypatch, capsys):
    request = {'imports': [], 'name': 'tiny', 'kwargs': {'vae': 'nowhere'}, 'flops': [], 'activations': []}
    monkeypatch.setattr('sys.stdin', io.StringIO(json.dumps(request)))
    assert main() == 0
    assert 'nowhere/vae: AutoencoderKL could not be loaded' in json.loads(capsys.readouterr().out)['mistake']
