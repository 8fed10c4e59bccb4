"""Cost counts of complete models, and their FLOPs against torch's counter on the modules themselves."""

import io
import json
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from golden import check_golden
from model_batches import size_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig

from diffusion.config import registry
from diffusion.config.image_shapes import square
from diffusion.config.recipe import LoraConfig
from diffusion.models import batch_keys
from diffusion.models.activation_memory import blocks_of, count_activations
from diffusion.models.cost_counting import ModelCounter, answer, build_empty, main
from diffusion.models.families.adapter import DenoiserAdapter, DenoiserSizes
from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.flops import FlopCount, empty_copy, text_encoder_flops, vae_encoder_flops
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
    lora = ModelCounter(build_empty('tiny', settings), LoraConfig(rank=4)).facts()
    assert lora['frozen_denoiser_parameters'] == size_of(built.denoiser) > 10 * lora['trained_parameters'] > 0
    assert lora['frozen_parameters'] == facts['frozen_parameters'], 'of VAE and text encoder'
    sizes = [size_of(each) for each in blocks_of(built.denoiser)]
    assert (facts['block_parameters'], facts['largest_block_parameters']) == (sum(sizes), max(sizes))


@pytest.mark.parametrize(
    ('name', 'settings', 'routes'),
    [
        ('tiny_sdxl', {'block_out_channels': [32, 64], 'train_text_encoder': False}, []),
        ('tiny_mmdit', {'depth': 3, 'dual_attention_blocks': 3}, ['96x64 tread=0:2:0.5']),
        ('tiny_prx', {'hidden_size': 32, 'num_heads': 2, 'depth': 3, 'patch_size': 2}, ['96x64 tread=1:3:0.25']),
        ('tiny_i1', {'hidden_size': 32, 'num_heads': 2, 'depth': 3, 'max_length': 8}, ['96x64 tread=1:2:0.75']),
    ],
)
def test_facts_and_flops_of_each_family_are_the_reviewed_ones(name, settings, routes, capsys):
    request = {'imports': [], 'name': name, 'kwargs': settings, 'flops': ['96x64', *routes]}
    found = answer(request | {'activations': []})
    folder = Path(__file__).parent / 'golden' / 'costs' / name
    check_golden(folder, {'costs.json': json.dumps(found['facts'] | found['flops'], indent=2) + '\n'})
    assert capsys.readouterr().out == ''


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


def test_training_the_text_encoder_adds_its_flops_and_memory():
    training = ModelCounter(build_empty('tiny', SMALLEST))
    frozen = ModelCounter(build_empty('tiny', {**SMALLEST, 'train_text_encoder': False}))
    extra = training.flops(square(64))['trained'] - frozen.flops(square(64))['trained']
    assert extra == frozen.facts()['text_encoder_flops']
    of_text = count_activations(training.text, lambda batch: ((training._tokens(batch),), {}), 'float32')
    memory = [vars(each) for each in (training.activations(square(64), 'float32'), of_text)]
    for name, alone in vars(frozen.activations(square(64), 'float32')).items():
        is_transient = name in ('kept_inside', 'copies_inside', 'largest')
        assert memory[0][name] == (max if is_transient else operator.add)(alone, memory[1][name]), name
    assert memory[1]['kept'] > 0


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


def test_third_party_model_is_counted(monkeypatch, capsys):
    monkeypatch.setitem(registry.TARGETS['model'], 'pixels', Pixels)
    request = {'imports': [], 'name': 'pixels', 'kwargs': {'width': 16}, 'flops': ['64x32']}
    found = answer(request | {'activations': [('64x32', 'float32'), ('64x32', 'half')]})
    assert capsys.readouterr().out == '', 'no tables of torch'
    facts = found['facts']
    assert (facts['trained_parameters'], facts['frozen_parameters']) == (16 * (27 + 1), 16 * (3 + 1))
    pixels = 64 * 32
    assert found['flops'] == {'64x32': {'trained': 2 * 16 * 27 * pixels, 'image_encoder': 2 * 16 * 3 * pixels}}
    assert found['activations']['64x32 float32']['kept'] == 4 * 3 * pixels  # the input of the convolution
    assert found['activations']['64x32 half']['kept'] == 2 * 3 * pixels
    with pytest.raises(ModuleNotFoundError, match='no_such_module'):
        answer(request | {'imports': ['no_such_module'], 'activations': []})
    memory = {'kept_inside': 0, 'copies_inside': 0, 'largest_encoder_elements': 0, 'largest': 4 * 16 * pixels}
    assert memory.items() <= found['activations']['64x32 float32'].items()
    assert found['activations']['64x32 half']['copies'] == 2 * 16 * 27


def test_program_prints_a_user_error_as_json(monkeypatch, capsys):
    request = {'imports': [], 'name': 'tiny', 'kwargs': {'vae': 'nowhere'}, 'flops': [], 'activations': []}
    monkeypatch.setattr('sys.stdin', io.StringIO(json.dumps(request)))
    assert main() == 0
    assert 'nowhere/vae: AutoencoderKL could not be loaded' in json.loads(capsys.readouterr().out)['mistake']


def counted(call, *inputs):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(*inputs)
    return counter.get_total_flops()


class Other(nn.Module):
    """Denoiser other than a U-Net that counts its calls."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer('table', torch.zeros(3))

    def forward(self, noisy, timesteps, text_embeds, return_dict=True):
        type(self).calls += 1
        return (self.convolution(noisy),)


class OtherFamily(DenoiserAdapter):
    denoiser_class, block_classes, takes_text_mask = Other, (), False

    def sizes(self, denoiser):
        return DenoiserSizes(in_channels=4, out_channels=4, text_width=8)

    def keywords(self, timesteps, condition):
        return {'timesteps': timesteps, 'text_embeds': condition.embeds}

    def pipeline(self, model):
        raise NotImplementedError


def test_any_denoiser_is_counted_once_per_shape():
    count = FlopCount(Other(), OtherFamily())
    before = Other.calls
    assert [count(8, 8, 5), count(8, 8, 5), count(8, 16, 5)] == [2 * 9 * 16 * 64, 2 * 9 * 16 * 64, 2 * 9 * 16 * 128]
    assert Other.calls == before + 2


def test_later_changes_to_the_denoiser_do_not_change_its_count():
    """Changes such as compiling it, or hooks of FSDP."""
    denoiser = Other()
    count = FlopCount(denoiser, OtherFamily())
    denoiser.register_forward_pre_hook(lambda *_: pytest.fail('the original was called'))
    denoiser.forward = None  # type: ignore[assignment]
    assert count(8, 8, 5) == 2 * 9 * 16 * 64
    assert empty_copy(denoiser, 'meta').forward is not None, 'it is not copied'


def test_flops_of_encoders_match_torch(small_vae):
    model = tiny(vae=str(small_vae), **SMALLEST)
    image = torch.zeros(1, 3, 64, 96)
    assert vae_encoder_flops(model.vae, height=8, width=12) == counted(model.vae.encode, image)
    # torch does not count fused attention on a CPU; this VAE has no attention.
    tokens = torch.zeros(1, 1, 16, dtype=torch.int64, device='meta')
    assert text_encoder_flops(model.text, length=16) == counted(empty_copy(model.text, 'meta'), tokens)


@pytest.mark.usefixtures('alone')
def test_flops_of_a_batch_are_counted_when_fsdp2_has_sharded_a_trained_text_encoder(small_vae):
    """FSDP2 refuses to copy a module that it has sharded."""
    model = tiny(vae=str(small_vae), **SMALLEST)
    tokens = torch.ones(2, 1, 16, dtype=torch.int64)
    batch = {batch_keys.IMAGE: torch.zeros(2, 3, 32, 32, dtype=torch.uint8), batch_keys.INPUT_IDS: tokens}
    expected = model.flops_per_batch(batch)
    trained = FlopCount(model.denoiser)(4, 4, 16) + text_encoder_flops(model.text, length=16)
    assert expected == 2 * (3 * trained + vae_encoder_flops(model.vae, height=4, width=4))
    model._flops._counted.clear()
    torch.distributed.init_process_group('gloo')
    fully_shard(model.text)
    fully_shard(model)
    assert model.flops_per_batch(batch) == expected
