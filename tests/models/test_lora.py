"""LoRA of a denoiser: trained parameters, the update that it computes, its file, and targets that do not exist."""

import copy
import re
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_pipeline import (
    SD3LoraLoaderMixin,
    StableDiffusionLoraLoaderMixin,
    StableDiffusionXLLoraLoaderMixin,
)
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.recipe import Component, LoraConfig, Recipe
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.lora import add_lora, merge_lora, save_lora
from diffusion.training import components

CONV_AND_LINEAR = LoraConfig(rank=3, alpha=6.0, targets=['to_q', 'to_out.0', 'conv1'])


def predict(unet):
    draw = torch.Generator().manual_seed(1)
    noisy, text = (torch.randn(2, *shape, generator=draw) for shape in ((4, 4, 4), (16, 32)))
    with torch.no_grad():
        return unet(noisy, torch.tensor([3, 700]), text, return_dict=False)[0]


@pytest.fixture(scope='module')
def plain(make_model):
    """U-Net that no test changes."""
    return make_model(layers_per_block=0).denoiser


def randomized(plain, settings):
    """A U-Net with a LoRA whose matrices B are not zero."""
    unet = copy.deepcopy(plain)
    add_lora(unet, settings, seed=7)
    with torch.no_grad():
        for name, weight in unet.named_parameters():
            if 'lora_B' in name:
                weight.normal_(std=0.2)
    return unet


def reference(plain, with_lora, settings):
    """The plain U-Net with W + (alpha / rank) B A in place of W (Hu et al. 2021, section 4.1), without peft."""
    layers, weights = dict(plain.named_modules()), with_lora.state_dict()
    changed = 0
    for name, layer in layers.items():
        if f'{name}.lora_A.default.weight' not in weights:
            continue
        first, second = (weights[f'{name}.{part}.default.weight'] for part in ('lora_A', 'lora_B'))
        product = second.flatten(1) @ first.flatten(1)
        with torch.no_grad():
            layer.weight += settings.alpha / settings.rank * product.view_as(layer.weight)
        changed += 1
    assert changed
    return plain


def test_lora_starts_as_the_denoiser_and_trains_its_matrices_alone(plain):
    unet = copy.deepcopy(plain)
    add_lora(unet, LoraConfig(rank=3), seed=7)
    torch.testing.assert_close(predict(unet), predict(plain), rtol=1e-5, atol=1e-5)
    trained = {name for name, weight in unet.named_parameters() if weight.requires_grad}
    assert trained and all('.lora_A.' in name or '.lora_B.' in name for name in trained)
    weights = unet.state_dict()
    assert all(3 in weights[name].shape for name in trained)
    kinds = {name.split('.lora_')[0].rpartition('attn')[2][2:] for name in trained}
    assert kinds == {'to_q', 'to_k', 'to_v', 'to_out.0'}
    frozen = {name.replace('.base_layer', ''): each for name, each in weights.items() if name not in trained}
    assert frozen.keys() == plain.state_dict().keys()
    assert all(torch.equal(frozen[name], each) for name, each in plain.state_dict().items())


def test_initial_values_depend_on_the_seed_alone(plain):
    def first(seed):
        unet = copy.deepcopy(plain)
        torch.manual_seed(torch.seed() % 2**32)
        before = torch.get_rng_state()
        add_lora(unet, LoraConfig(rank=3), seed=seed)
        assert torch.equal(torch.get_rng_state(), before), 'other random numbers do not change'
        return [each for name, each in unet.named_parameters() if 'lora_A' in name]

    expected = first(3)
    assert all(map(torch.equal, expected, first(3)))
    assert not any(map(torch.equal, expected, first(4)))


def test_prediction_and_merged_weights_equal_those_of_the_paper(plain):
    unet = randomized(plain, CONV_AND_LINEAR)
    expected = reference(copy.deepcopy(plain), unet, CONV_AND_LINEAR)
    assert not torch.allclose(predict(expected), predict(plain), atol=1e-2)
    torch.testing.assert_close(predict(unet), predict(expected), rtol=1e-4, atol=1e-4)
    merge_lora(unet)
    weights = unet.state_dict()
    assert weights.keys() == expected.state_dict().keys(), 'no trace of the LoRA is left'
    torch.testing.assert_close(weights, expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_file_has_the_matrices_scaled_for_alpha_equal_to_rank(plain, tmp_path):
    settings = LoraConfig(rank=3, alpha=6.0)
    unet = randomized(plain, settings)
    save_lora(unet, settings, tmp_path / 'lora.safetensors', torch.float32)
    saved = load_file(tmp_path / 'lora.safetensors')
    weights = unet.state_dict()
    assert len(saved) == sum('.lora_' in name for name in weights)
    name = 'mid_block.attentions.0.transformer_blocks.0.attn1.to_q'
    assert torch.equal(saved[f'unet.{name}.lora_A.weight'], weights[f'{name}.lora_A.default.weight'])
    assert torch.equal(saved[f'unet.{name}.lora_B.weight'], 2 * weights[f'{name}.lora_B.default.weight'])
    with pytest.raises(UserError, match=r'diffusers loads the LoRA of a SD3.*, UNet.*, but the denoiser is a Linear'):
        save_lora(nn.Linear(2, 2), settings, tmp_path / 'other.safetensors', torch.float32)


NARROW = {'cross_attention_dim': 16, 'attention_head_dim': 4, 'norm_num_groups': 4, 'use_linear_projection': True}
SD2 = NARROW | {'block_out_channels': (8, 8, 16, 16)}
SDXL = NARROW | {
    'block_out_channels': (8, 16, 16),
    'down_block_types': ('DownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'),
    'up_block_types': ('CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'UpBlock2D'),
    'transformer_layers_per_block': [1, 2, 10],
    'addition_embed_type': 'text_time',
    'addition_time_embed_dim': 4,
    'projection_class_embeddings_input_dim': 32,
}
"""Stable Diffusion's U-Nets with their structure, and narrow layers."""


def layer_names(unet: nn.Module) -> list[str]:
    return [name for name, layer in unet.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize('sizes', [SD2, pytest.param(SDXL, marks=pytest.mark.slow)], ids=['sd2', 'sdxl'])
def test_file_for_comfyui_has_its_name_of_every_layer(sizes, tmp_path):
    """ComfyUI looks up `lora_unet_` and diffusers' name with underscores, of every weight of the U-Net."""
    unet = UNet2DConditionModel(sample_size=8, **sizes)
    names = layer_names(unet)
    kinds = sorted({re.sub(r'.*\.(?=\D)', '', name) for name in names})
    settings = LoraConfig(rank=2, alpha=8.0, targets=kinds)
    add_lora(unet, settings, seed=7)
    save_lora(unet, settings, tmp_path / 'lora.safetensors', torch.float32, single_file=True)
    found = load_file(tmp_path / 'lora.safetensors')
    prefixes = {f'lora_unet_{name.replace(".", "_")}' for name in names}
    parts = ('lora_down.weight', 'lora_up.weight', 'alpha')
    assert found.keys() == {f'{prefix}.{part}' for prefix in prefixes for part in parts}
    assert {float(found[f'{prefix}.alpha']) for prefix in prefixes} == {8.0}


@pytest.mark.parametrize('single_file', [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(('family', 'sizes'), [('sd2', SD2), pytest.param('sdxl', SDXL, marks=pytest.mark.slow)])
def test_diffusers_loads_both_files(family, sizes, single_file, tmp_path):
    torch.manual_seed(3)
    plain = UNet2DConditionModel(sample_size=8, **sizes)
    settings = LoraConfig(rank=2, alpha=8.0)
    trained, loaded = randomized(plain, settings), copy.deepcopy(plain)
    save_lora(trained, settings, tmp_path / 'lora.safetensors', torch.float32, single_file=single_file)
    mixin = {'sd2': StableDiffusionLoraLoaderMixin, 'sdxl': StableDiffusionXLLoraLoaderMixin}[family]
    weights, alphas, *_ = mixin.lora_state_dict(tmp_path, weight_name='lora.safetensors', unet_config=loaded.config)
    mixin.load_lora_into_unet(weights, network_alphas=alphas, unet=loaded)
    merge_lora(trained)
    merge_lora(loaded)
    ours, theirs = trained.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    changed = [name for name, each in plain.state_dict().items() if not torch.equal(each, theirs[name])]
    assert {name.removesuffix('.weight') for name in changed} == {
        name for name in layer_names(plain) if re.search(r'attn\d', name)
    }


def test_transformer_of_stable_diffusion_3_loads_its_lora(tmp_path):
    sizes: dict[str, Any] = {'num_attention_heads': 2, 'attention_head_dim': 8, 'joint_attention_dim': 16}
    sizes |= {'num_layers': 2, 'caption_projection_dim': 16, 'pooled_projection_dim': 16, 'pos_embed_max_size': 4}
    plain = SD3Transformer2DModel(sample_size=8, in_channels=4, **sizes)
    settings = LoraConfig(rank=3, alpha=6.0)
    trained, loaded = randomized(plain, settings), copy.deepcopy(plain)
    save_lora(trained, settings, tmp_path / 'lora.safetensors', torch.float32)
    SD3LoraLoaderMixin.load_lora_into_transformer(load_file(tmp_path / 'lora.safetensors'), loaded)
    draw = torch.Generator().manual_seed(1)
    states = [torch.randn(*shape, generator=draw) for shape in ((2, 4, 8, 8), (2, 5, 16), (2, 16))]
    calls = [each.eval()(*states, torch.tensor([3, 700]), return_dict=False)[0] for each in (plain, trained, loaded)]
    assert not torch.allclose(calls[0], calls[1], atol=1e-3)
    torch.testing.assert_close(calls[2], calls[1], rtol=1e-4, atol=1e-5)


def test_flops_per_batch_are_those_of_a_frozen_denoiser(make_model):
    settings = {'block_out_channels': (64, 64), 'layers_per_block': 0, 'train_text_encoder': False}
    model = make_model(**settings)
    batch = {
        batch_keys.LATENT_MOMENTS: torch.randn(2, 8, 8, 8),
        batch_keys.TEXT_EMBEDS: torch.randn(2, 16, 32),
        batch_keys.INPUT_IDS: torch.zeros(2, 1, 16, dtype=torch.int64),
    }
    recipe = Recipe('run', 2, Component('tiny'), lora=LoraConfig(rank=2))
    components.add_lora(recipe, model)
    with FlopCounterMode(display=False) as counter:
        model.loss(model(batch), batch).backward()
    assert model.flops_per_batch(batch) == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert make_model(**settings).flops_per_batch(batch) == 1.5 * model.flops_per_batch(batch)


def test_targets_without_layers_are_named_with_those_that_fit(plain):
    unet = copy.deepcopy(plain)
    with pytest.raises(UserError, match=r'^lora\.targets: to_qq, norm1 matches no layer; use some of'):
        add_lora(unet, LoraConfig(targets=['to_q', 'to_qq', 'norm1']), seed=0)
    assert not any('lora' in name for name, _ in unet.named_parameters())
