"""Model builders: exact configurations, pretrained parts from local folders, errors without access to the Hub."""

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from golden import check_golden
from model_batches import size_of
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config import registry
from diffusion.errors import UserError
from diffusion.models.autoencoder import tiny_autoencoder
from diffusion.models.cost_counting import build_empty
from diffusion.models.families.sd2.builder import sd2, sd2_tokenizers, tiny
from diffusion.models.objective import Objective
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.vae import latent_statistics

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {'pretrained': None}) for name in ('sd2', 'sdxl', 'mmdit', 'prx', 'i1')},
    'mmdit of 3': (
        'mmdit',
        {'pretrained': None, 't5': False, 'dual_attention_blocks': 0, 'qk_norm': False, 'pos_embed_max_size': 192},
    ),
    'prx on pixels': (
        'prx',
        {'pretrained': None, 'resolution': 512, 'vae': 'pixels', 'patch_size': 32, 'bottleneck_size': 256},
    ),
    'i1 3b grouped': ('i1', {'pretrained': None, 'size': '3b', 'vae_layout': 'grouped'}),
    **{name: (name, {}) for name in ('tiny', 'tiny_sdxl', 'tiny_mmdit', 'tiny_prx', 'tiny_i1')},
}
TEXT_SETTINGS = (
    *('vocab_size', 'hidden_size', 'intermediate_size', 'd_ff', 'd_kv', 'num_hidden_layers', 'num_attention_heads'),
    *('num_key_value_heads', 'max_position_embeddings', 'hidden_act', 'feed_forward_proj', 'dropout_rate'),
    *('layer_norm_eps', 'projection_dim', 'bos_token_id', 'eos_token_id', 'pad_token_id'),
)


def changed(settings: Mapping[str, Any], of: Any) -> dict[str, Any]:
    """Return the settings that differ from the defaults of a class."""
    defaults = {name: each.default for name, each in inspect.signature(of).parameters.items()}
    return {key: value for key, value in settings.items() if key in defaults and value != defaults[key]}


def description(name: str, settings: dict[str, Any]) -> str:
    """Return the sizes and settings of a model, one a line."""
    model: Any = build_empty(name, settings)
    tokenizers: Any = registry.resolve('model', name).tokenizers  # type: ignore[attr-defined]
    alone = tokenizers(**{key: value for key, value in settings.items() if key in ('pretrained', 't5')})
    vae = getattr(model.vae, 'autoencoder', model.vae)
    parts = [(each, changed(each.config, type(each))) for each in (model.denoiser, vae)]
    for each in model.text.encoders:
        found = {key: getattr(each.config, key, None) for key in TEXT_SETTINGS}
        parts.append((each, {key: value for key, value in found.items() if value is not None}))
    lines = []
    for part, values in parts:
        lines.append(f'{type(part).__name__}, {size_of(part):,} parameters')
        lines += [f'    {key}: {json.dumps(value)}' for key, value in values.items()]
    for each, other in zip(model.text.tokenizers, alone, strict=True):
        assert (each.model_max_length, each.pad_token) == (other.model_max_length, other.pad_token)
        lines.append(
            f'tokenizer: {each.model_max_length} of {len(each)} tokens, {each.pad_token} on the {each.padding_side}'
        )
    lines.append(f'objective: {json.dumps(changed(vars(model.objective), Objective))}')
    names = ('denoiser_sizes', 'latent_grid', 'mask_padding', 'train_text_encoder', 'caption_dropout_mode')
    lines += [f'{each}: {getattr(model, each)}' for each in names]
    names = ('length', 'token_length', 'width', 'pooled_width', 'output')
    lines += [f'text.{each}: {getattr(model.text, each)}' for each in names]
    return '\n'.join([*lines, f'encoder_dtype: {model.vae.dtype}', ''])


def test_models_have_the_published_sizes_and_settings():
    """The files were compared with the published configurations, and those of miniatures with the documentation."""
    check_golden(
        Path(__file__).parent / 'golden' / 'models', {f'{each}.txt': description(*MODELS[each]) for each in MODELS}
    )


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


@pytest.mark.parametrize('sizes', [(3, 4), (4, 3)])
def test_statistics_of_another_number_of_channels_are_refused(sizes):
    statistics = dict(zip(('latents_mean', 'latents_std'), ([1.0] * each for each in sizes), strict=True))
    with pytest.raises(UserError, match=f'have {sizes[0]} and {sizes[1]} values for 4 channels; give one value per'):
        latent_statistics(AutoencoderKL(block_out_channels=(32,), **statistics))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ('build', 'settings', 'message'),
    [
        (tiny, {'block_out_channels': [64, 100]}, 'block_out_channels: 100 is not a positive multiple of 32; use 96'),
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
