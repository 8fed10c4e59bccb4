"""LoRA of a denoiser: trained parameters, the update that it computes, its file, and targets that do not exist."""

import copy
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_pipeline import SD3LoraLoaderMixin
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from safetensors.torch import load_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.recipe import Component, LoraConfig, Recipe
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.lora import add_lora, merge_lora, save_lora
from diffusion.training import components

CONV_AND_LINEAR = LoraConfig(rank=3, alpha=6.0, targets=['to_q', 'to_out.0', 'conv1'])


def inputs():
    draw = torch.Generator().manual_seed(1)
    return (torch.randn(2, 4, 4, 4, generator=draw), torch.tensor([3, 700]), torch.randn(2, 16, 32, generator=draw))


def predict(unet):
    with torch.no_grad():
        return unet(*inputs(), return_dict=False)[0]


def randomized(make_model, settings, *, seed=7):
    """A U-Net with a LoRA whose matrices B are not zero."""
    unet = make_model().denoiser
    add_lora(unet, settings, seed=seed)
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


def test_lora_starts_as_the_denoiser_and_trains_its_matrices_alone(make_model):
    plain, unet = make_model().denoiser, make_model().denoiser
    add_lora(unet, LoraConfig(rank=3), seed=7)
    torch.testing.assert_close(predict(unet), predict(plain), rtol=1e-5, atol=1e-5)
    trained = {name for name, weight in unet.named_parameters() if weight.requires_grad}
    assert trained and all('.lora_A.' in name or '.lora_B.' in name for name in trained)
    weights = unet.state_dict()
    assert all(3 in weights[name].shape for name in trained)
    assert {name.split('.lora_')[0].rpartition('attn')[2][2:] for name in trained} == {
        'to_q',
        'to_k',
        'to_v',
        'to_out.0',
    }
    frozen = {name.replace('.base_layer', ''): each for name, each in weights.items() if name not in trained}
    assert frozen.keys() == plain.state_dict().keys()
    assert all(torch.equal(frozen[name], each) for name, each in plain.state_dict().items())


def test_initial_values_depend_on_the_seed_alone(make_model):
    def first(seed):
        unet = make_model().denoiser
        torch.manual_seed(torch.seed() % 2**32)
        before = torch.get_rng_state()
        add_lora(unet, LoraConfig(rank=3), seed=seed)
        assert torch.equal(torch.get_rng_state(), before), 'other random numbers do not change'
        return [each for name, each in unet.named_parameters() if 'lora_A' in name]

    assert all(map(torch.equal, first(3), first(3)))
    assert not any(map(torch.equal, first(3), first(4)))


@pytest.mark.parametrize('settings', [LoraConfig(rank=3, alpha=6.0), CONV_AND_LINEAR], ids=['attention', 'convolution'])
def test_prediction_and_merged_weights_equal_those_of_the_paper(make_model, settings):
    unet = randomized(make_model, settings)
    expected = reference(make_model().denoiser, unet, settings)
    assert not torch.allclose(predict(expected), predict(make_model().denoiser), atol=1e-2)
    torch.testing.assert_close(predict(unet), predict(expected), rtol=1e-4, atol=1e-4)
    merge_lora(unet)
    weights = unet.state_dict()
    assert weights.keys() == expected.state_dict().keys(), 'no trace of the LoRA is left'
    torch.testing.assert_close(weights, expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_file_has_the_matrices_scaled_for_alpha_equal_to_rank(make_model, tmp_path):
    settings = LoraConfig(rank=3, alpha=6.0)
    unet = randomized(make_model, settings)
    save_lora(unet, settings, tmp_path / 'lora.safetensors', torch.float32)
    saved = load_file(tmp_path / 'lora.safetensors')
    weights = unet.state_dict()
    assert len(saved) == sum('.lora_' in name for name in weights)
    name = 'mid_block.attentions.0.transformer_blocks.0.attn1.to_q'
    assert torch.equal(saved[f'unet.{name}.lora_A.weight'], weights[f'{name}.lora_A.default.weight'])
    assert torch.equal(saved[f'unet.{name}.lora_B.weight'], 2 * weights[f'{name}.lora_B.default.weight'])
    with pytest.raises(
        UserError, match=r'diffusers loads the LoRA of a UNet.*, SD3.*, but the denoiser is a Linear; use --merge'
    ):
        save_lora(nn.Linear(2, 2), settings, tmp_path / 'other.safetensors', torch.float32)


def test_transformer_of_stable_diffusion_3_loads_its_lora(tmp_path):
    sizes: dict[str, Any] = {'num_attention_heads': 2, 'attention_head_dim': 8, 'joint_attention_dim': 16}
    sizes |= {'num_layers': 2, 'caption_projection_dim': 16, 'pooled_projection_dim': 16, 'pos_embed_max_size': 4}
    plain = SD3Transformer2DModel(sample_size=8, in_channels=4, **sizes)
    trained, loaded = copy.deepcopy(plain), copy.deepcopy(plain)
    settings = LoraConfig(rank=3, alpha=6.0)
    add_lora(trained, settings, seed=7)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if 'lora_B' in name:
                weight.normal_(std=0.2)
    save_lora(trained, settings, tmp_path / 'lora.safetensors', torch.float32)
    SD3LoraLoaderMixin.load_lora_into_transformer(load_file(tmp_path / 'lora.safetensors'), loaded)
    draw = torch.Generator().manual_seed(1)
    states = [torch.randn(*shape, generator=draw) for shape in ((2, 4, 8, 8), (2, 5, 16), (2, 16))]
    calls = [each.eval()(*states, torch.tensor([3, 700]), return_dict=False)[0] for each in (plain, trained, loaded)]
    assert not torch.allclose(calls[0], calls[1], atol=1e-3)
    torch.testing.assert_close(calls[2], calls[1], rtol=1e-4, atol=1e-5)


def test_flops_per_batch_are_those_of_a_frozen_denoiser(make_model):
    settings = {'block_out_channels': (64, 128), 'train_text_encoder': False, 'resolution': 64}
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


def test_targets_without_layers_are_named_with_those_that_fit(make_model):
    unet = make_model().denoiser
    with pytest.raises(
        UserError, match=r'^lora\.targets: to_qq, norm1 matches no layer; use some of .*proj_in.*to_out\.0'
    ):
        add_lora(unet, LoraConfig(targets=['to_q', 'to_qq', 'norm1']), seed=0)
    assert not any('lora' in name for name, _ in unet.named_parameters())
