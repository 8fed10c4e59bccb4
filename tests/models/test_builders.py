"""Model builders: exact configurations, pretrained parts from local folders, errors without access to the Hub."""

import json
import shutil
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from model_batches import shapes_of, size_of
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config import registry
from diffusion.errors import UserError
from diffusion.models.autoencoder import tiny_autoencoder
from diffusion.models.cost_counting import build_empty
from diffusion.models.families.sd2.builder import sd2, sd2_tokenizers, tiny
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.vae import latent_statistics

# https://huggingface.co/stabilityai/stable-diffusion-2-base/blob/main/unet/config.json, as published
PUBLISHED_UNET = json.loads(
    """{"act_fn": "silu", "attention_head_dim": [5, 10, 20, 20], "block_out_channels": [320, 640, 1280, 1280],
    "center_input_sample": false, "cross_attention_dim": 1024, "down_block_types": ["CrossAttnDownBlock2D",
    "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"], "downsample_padding": 1,
    "dual_cross_attention": false, "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
    "use_linear_projection": true}"""
)


def test_sd2_is_stable_diffusion_2_base():
    with torch.device('meta'):
        model = sd2(pretrained=None)
        published: Any = UNet2DConditionModel.from_config(PUBLISHED_UNET)
    sizes = [size_of(module) for module in (model.denoiser, model.vae, model.text)]
    assert sizes == [865_910_724, 83_653_863, 340_387_840]
    assert shapes_of(model.denoiser) == shapes_of(published)
    assert not {key for key in PUBLISHED_UNET if model.denoiser.config[key] != published.config[key]}


def test_miniatures_have_the_documented_sizes():
    names = [f'tiny{each}' for each in ('', '_sdxl', '_prx', '_i1', '_mmdit')]
    models: list[Any] = [build_empty(name, {}) for name in names]
    assert [size_of(each.denoiser) for each in models] == [16_744_720, 16_049_552, 5_175_760, 7_593_232, 9_971_984]
    assert [size_of(each.text) for each in models] == [6_723_072, 6_530_560, 6_723_072, 6_723_072, 7_977_984]
    others = [(each.latent_size, each.text.token_length, each.train_text_encoder) for each in models]
    assert others == [(8, 16, True)] * 4 + [(8, 24, True)]
    for name, model in zip(names, models, strict=True):
        alone: Any = registry.resolve('model', name).tokenizers()  # type: ignore[attr-defined]
        assert [each.model_max_length for each in alone] == [each.model_max_length for each in model.text.tokenizers]


def test_sd2_loads_its_frozen_parts_from_a_folder(tmp_path, small_vae, monkeypatch):
    """The parts are narrow, with as few layers as possible."""
    shutil.copytree(small_vae, tmp_path / 'vae')
    config = CLIPTextConfig(hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    CLIPTextModel(config).save_pretrained(tmp_path / 'text_encoder')
    clip_tokenizer().save_pretrained(tmp_path / 'tokenizer')
    small = {'block_out_channels': (32, 32, 32, 32), 'cross_attention_dim': 64}
    monkeypatch.setattr('diffusion.models.families.sd2.builder.UNET', small)
    model = sd2(64, pretrained=str(tmp_path))
    weights = AutoencoderKL.from_pretrained(tmp_path / 'vae', low_cpu_mem_usage=False).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.vae.state_dict().items())
    assert model._tokens(['a cat']).shape == (1, 1, 77)
    again = sd2_tokenizers(pretrained=str(tmp_path))[0]
    assert again('a cat').input_ids == clip_tokenizer()('a cat').input_ids


@pytest.mark.parametrize(
    ('config', 'mean', 'std'),
    [
        ({'scaling_factor': 0.18215}, 0.0, 1 / 0.18215),
        ({'scaling_factor': 0.3611, 'shift_factor': 0.1159}, 0.1159, 1 / 0.3611),
        ({'scaling_factor': 0.5, 'latents_mean': [1.0] * 4, 'latents_std': [4.0] * 4}, 1.0, 8.0),
    ],
    ids=['sd2', 'shifted', 'per-channel'],
)
def test_latent_statistics_for_each_form_of_configuration(config, mean, std):
    vae = AutoencoderKL(block_out_channels=(32,), **config)  # type: ignore[arg-type]
    ours = latent_statistics(vae)
    torch.testing.assert_close(ours[0], torch.full((4,), mean))
    torch.testing.assert_close(ours[1], torch.full((4,), std))


@pytest.mark.parametrize(
    ('build', 'settings', 'message'),
    [
        (tiny, {'block_out_channels': [64, 100]}, 'block_out_channels: 100 is not a positive multiple of 32; use 96'),
        (tiny, {'block_out_channels': []}, 'block_out_channels: is empty; give at least one multiple of 32'),
        (tiny, {'text_width': 100}, 'text_width: 100 is not a positive multiple of 32; use 96 or 128'),
        (tiny, {'max_length': -3}, 'max_length: -3 is less than 3'),
        (tiny_autoencoder, {'block_out_channels': [24, 50]}, r'50 is not .*; use 48 or 56 \(norm_num_groups is 8\)'),
        (tiny_autoencoder, {'norm_num_groups': 7}, r'24 is not .* of 7; use 21 or 28 \(norm_num_groups is 7\)'),
        (tiny_autoencoder, {'norm_num_groups': 0}, 'norm_num_groups: 0 is less than 1'),
        (tiny_autoencoder, {'latent_channels': -1}, 'latent_channels: -1 is less than 1'),
    ],
)
def test_sizes_that_diffusers_cannot_build_are_refused_with_the_rule(build, settings, message):
    with pytest.raises(UserError, match=message), torch.device('meta'):
        build(**settings)
