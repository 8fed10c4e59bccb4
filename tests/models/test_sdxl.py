"""Stable Diffusion XL: the published architecture, its conditions, and the loss against diffusers alone."""

import shutil
from dataclasses import replace
from typing import Any

import model_batches
import pytest
import torch
import torch.nn.functional as functional
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from diffusion.data.latents import manifest_of
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of, check_parts
from diffusion.models.families.sdxl.builder import UNET, sdxl, sdxl_tokenizers, tiny_sdxl
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.randomness import Draws, Purpose
from diffusion.models.text_conditioner import TextConditioner

# 64 channels, since GroupNorm of 32 groups removes the embedding of sizes and pooled text from 32.
SMALL: dict[str, Any] = {'block_out_channels': (64, 64), 'text_width': 32, 'text_layers': 2}
SIZES = torch.tensor([[640, 480, 0, 11, 64, 64], [64, 64, 0, 0, 64, 64], [99, 3000, 7, 0, 64, 64], [1, 2, 3, 4, 5, 6]])


@pytest.fixture
def make(small_vae):
    """Function that builds a miniature with random weights."""

    def build(**settings: Any) -> Any:
        torch.manual_seed(0)
        keywords: dict[str, Any] = SMALL | {'vae': str(small_vae)} | settings
        return tiny_sdxl(**keywords)

    return build


def batch_of(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    return model_batches.batch_of(model) | {batch_keys.IMAGE_SIZES: SIZES}


def reference_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the same loss, computed with diffusers and transformers alone."""
    draws = Draws(model.seed, batch[batch_keys.SAMPLE_ID], batch[batch_keys.EPOCH], batch[batch_keys.BATCH_INDEX])
    latents = model.latents_of(batch, draws)
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    timesteps: Any = draws.integers(Purpose.TIMESTEP, 1000)
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule='scaled_linear')
    first, second = (
        encoder(batch[batch_keys.INPUT_IDS][:, index], output_hidden_states=True)
        for index, encoder in enumerate(model.text.encoders)
    )
    predicted = model.denoiser(
        scheduler.add_noise(latents, noise, timesteps),
        timesteps,
        encoder_hidden_states=torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1),
        added_cond_kwargs={'text_embeds': second.text_embeds, 'time_ids': batch[batch_keys.IMAGE_SIZES].float()},
    ).sample
    return functional.mse_loss(predicted, noise)


def test_sdxl_loads_its_frozen_parts_from_a_folder(tmp_path, small_vae, monkeypatch):
    """The parts are narrow, with as few layers as possible."""
    shutil.copytree(small_vae, tmp_path / 'vae')
    sizes: dict[str, Any] = {'intermediate_size': 8, 'num_hidden_layers': 2, 'bos_token_id': 0, 'eos_token_id': 2}
    first = CLIPTextConfig(hidden_size=32, num_attention_heads=2, projection_dim=32, **sizes)
    second = CLIPTextConfig(hidden_size=64, num_attention_heads=2, projection_dim=64, **sizes)
    CLIPTextModel(first).save_pretrained(tmp_path / 'text_encoder')
    CLIPTextModelWithProjection(second).save_pretrained(tmp_path / 'text_encoder_2')
    for name, tokenizer in zip(('tokenizer', 'tokenizer_2'), sdxl_tokenizers(pretrained=None), strict=True):
        tokenizer.save_pretrained(tmp_path / name)
    small: dict[str, Any] = {'block_out_channels': (32, 32, 32), 'transformer_layers_per_block': 1}
    small |= {'attention_head_dim': 1, 'layers_per_block': 1}
    small |= {'cross_attention_dim': 32 + 64, 'projection_class_embeddings_input_dim': 64 + 6 * 256}
    monkeypatch.setattr('diffusion.models.families.sdxl.builder.UNET', UNET | small)
    model = sdxl(64, pretrained=str(tmp_path))
    weights = CLIPTextModelWithProjection.from_pretrained(tmp_path / 'text_encoder_2').state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.text.encoders[1].state_dict().items())
    assert model._tokens(['a']).tolist()[0] == [[49406, 320, *[49407] * 75], [49406, 320, 49407, *[0] * 74]]
    with pytest.raises(UserError, match=r'vae.* has force_upcast, since its activations overflow in float16; set enc'):
        sdxl(64, pretrained=str(tmp_path), encoder_dtype='float16')


def test_loss_and_gradients_equal_diffusers_alone(make):
    model = make(caption_dropout=0.0)
    batch = batch_of(model)
    model_batches.assert_same_loss_and_gradients(model, batch, reference_loss(model, batch), rtol=1e-3, atol=1e-5)
    # DDP waits for the gradient of each; the first text encoder's last layer has none and is not trained.
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert without == frozen
    first = 'text_encoder.encoders.0.text_model.'
    assert frozen and all(name.startswith((f'{first}encoder.layers.1.', f'{first}final')) for name in frozen)


@pytest.mark.parametrize(('stored', 'mode'), [(False, 'empty'), (True, 'zeros')])
def test_dropped_captions_replace_embeddings_and_pooled_text_together(make, mode, stored):
    model = make(caption_dropout=1.0, caption_dropout_mode=mode, train_text_encoder=False)
    batch = batch_of(model)
    if stored:
        text = model.embed(batch[batch_keys.INPUT_IDS])
        batch |= {batch_keys.TEXT_EMBEDS: text.embeds.half(), batch_keys.TEXT_POOLED: text.pooled.half()}
    condition = model._condition_of(batch, model.draws_of(batch))
    empty = model.embed(model.empty_ids[None])
    for found, expected in ((condition.embeds, empty.embeds), (condition.pooled, empty.pooled)):
        expected = torch.zeros_like(expected) if mode == 'zeros' else expected
        torch.testing.assert_close(found, expected.expand_as(found), rtol=2e-3, atol=2e-3)
    assert condition.sizes is batch[batch_keys.IMAGE_SIZES]
    assert condition.mask is None


@pytest.fixture(scope='module')
def frozen_text(small_vae) -> Any:
    """Miniature whose text encoders are not trained, which no test changes."""
    return tiny_sdxl(vae=str(small_vae), train_text_encoder=False, **SMALL)


def test_generated_images_are_conditioned_on_their_own_size(frozen_text, monkeypatch):
    model, seen = frozen_text, []
    forward = model.denoiser.forward

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs['added_cond_kwargs']['time_ids'])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.denoiser, 'forward', record)
    model.generate(['a', 'b'], size=(64, 128), num_inference_steps=1)
    assert seen[0].tolist() == [[64, 128, 0, 0, 64, 128]] * 4  # with and without the prompt


def test_errors_name_the_way_out(frozen_text):
    model = frozen_text
    batch = batch_of(model)
    text = model.embed(batch[batch_keys.INPUT_IDS])
    stored = batch | {batch_keys.TEXT_EMBEDS: text.embeds}
    with pytest.raises(UserError, match=r'batch: has text_embeds but no text_pooled, .*; precompute the text again'):
        model(stored)
    del batch[batch_keys.IMAGE_SIZES]
    with pytest.raises(UserError, match=r'batch: has no image_sizes, .*; build the dataset with image_sizes=True'):
        model(batch)
    config = CLIPTextConfig(hidden_size=32, num_attention_heads=1, num_hidden_layers=2, max_position_embeddings=16)
    with pytest.raises(UserError, match='have up to 77 tokens, but its text encoder takes at most 16; load both from'):
        TextConditioner([CLIPTextModel(config)], [clip_tokenizer(max_length=77)])
    without_pooled = TextConditioner([CLIPTextModel(config)] * 2, model.text.tokenizers, layer='penultimate')
    with pytest.raises(UserError, match='takes pooled text of width 32, but the text encoders give None; use the text'):
        LatentDiffusion(model.denoiser, model.vae, without_pooled)
    with pytest.raises(UserError, match='4 input and 8 output channels, but the VAE has 4 latent channels'):
        check_parts(replace(model.denoiser_sizes, out_channels=8), model.vae, model.text)
    with pytest.raises(UserError, match=r'mask_padding: true, but a UNet2DConditionModel takes no mask'):
        LatentDiffusion(model.denoiser, model.vae, model.text, mask_padding=True)


def test_manifest_and_single_file_name_the_output_and_the_architecture(frozen_text):
    model = frozen_text
    manifest = manifest_of(model.vae, shape='', posterior='', dtype='', text=model.text, image_sizes=True)
    assert (manifest.text_output, manifest.image_sizes) == ('penultimate+pooled', True)
    assert adapter_of(model.denoiser).single_file(model).architecture == 'stable-diffusion-xl-v1-base'
