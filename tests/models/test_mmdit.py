"""MMDiT against diffusers alone: parameter counts, the loss, the text encoders, pretrained parts, and mistakes."""

import json
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from model_batches import CAPTIONS, assert_same_loss_and_gradients, batch_of

from diffusion.config.recipe import Component
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.mmdit import builder as mmdit_builder
from diffusion.models.families.mmdit.builder import mmdit, sd3_objective, tiny_mmdit
from diffusion.models.families.mmdit.text_encoders import Sd3TextConditioner
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.randomness import Draws, Purpose
from diffusion.models.text_conditioner import tokenize
from diffusion.planning.model_costs import ModelCosts

TINY: dict[str, Any] = {'depth': 2, 'dual_attention_blocks': 1, 'text_width': 32, 'patch_size': 2}
SHALLOW: dict[str, Any] = TINY | {'depth': 1, 'dual_attention_blocks': 0}


@pytest.fixture(scope='module')
def model(small_vae) -> LatentDiffusion:
    torch.manual_seed(0)
    return tiny_mmdit(vae=str(small_vae), caption_dropout=0.0, **TINY)


def stock(model: LatentDiffusion) -> StableDiffusion3Pipeline:
    return adapter_of(model.denoiser).pipeline(model)


def test_default_objective_shifts_timesteps_in_proportion_to_the_side():
    shifts = {side: sd3_objective(side).snr_shift for side in (256, 512, 1024, 1536)}
    assert shifts == {256: 1.0, 512: 1.5, 1024: 3.0, 1536: 4.5}


@pytest.mark.parametrize('t5', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_loss_and_gradients_equal_a_reference_with_diffusers_alone(small_vae, t5):
    torch.manual_seed(0)
    model = tiny_mmdit(1024, vae=str(small_vae), caption_dropout=0.0, t5=t5, **TINY)
    batch = batch_of(model, height=32)
    draws = Draws(17, batch[batch_keys.SAMPLE_ID], batch[batch_keys.EPOCH], batch[batch_keys.BATCH_INDEX])
    latents = model.latents_of(batch, draws)
    noise = draws.normal(Purpose.NOISE, latents.shape[1:])
    logit = torch.special.ndtri(draws.uniform(Purpose.TIMESTEP).double())
    t = torch.sigmoid(logit)
    t = (3 * t / (1 + 2 * t)).float()
    noisy = (1 - t.view(-1, 1, 1, 1)) * latents + t.view(-1, 1, 1, 1) * noise
    pipeline: Any = stock(model)
    text = pipeline.encode_prompt(CAPTIONS, None, None, max_sequence_length=24, do_classifier_free_guidance=False)
    embeds, pooled = text[0], text[2]
    predicted = model.denoiser(noisy, timestep=1000 * t, encoder_hidden_states=embeds, pooled_projections=pooled).sample
    reference = functional.mse_loss(predicted, noise - latents)
    assert_same_loss_and_gradients(model, batch, reference, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_each_tokenizer_pads_to_its_own_length(model):
    ids = tokenize(model.text.tokenizers, CAPTIONS)
    assert ids.shape == (4, 3, 24)
    tokenizers: Any = model.text.tokenizers
    for index, length in enumerate((16, 16, 24)):
        keywords = {'padding': 'max_length', 'truncation': True, 'max_length': length, 'return_tensors': 'pt'}
        assert torch.equal(ids[:, index, :length], tokenizers[index](CAPTIONS, **keywords).input_ids)
        assert not ids[:, index, length:].any()
    assert ids[0, 0, 10] == 49407 and ids[0, 1, 10] == 0, 'the first pads with the end of text, the second with !'
    assert tokenizers[2].decode(ids[0, 2], skip_special_tokens=True) == 'a red square'


def test_images_larger_than_the_position_embeddings_are_refused(small_vae):
    model = tiny_mmdit(32, vae=str(small_vae), pos_embed_max_size=2, **SHALLOW)
    assert model.generate(['a'], num_inference_steps=1).shape == (1, 3, 32, 32)
    with pytest.raises(UserError, match='latents of 8x4 cells, but the denoiser has position embeddings for 4x4'):
        model.generate(['a'], num_inference_steps=1, size=(32, 64))


def test_position_embeddings_are_the_same_at_every_resolution(small_vae):
    """So that a run can start from the weights of one at a lower resolution."""
    small, large = (tiny_mmdit(side, vae=str(small_vae), **SHALLOW).denoiser for side in (32, 128))
    assert torch.equal(small.pos_embed.pos_embed, large.pos_embed.pos_embed)  # type: ignore[union-attr]
    assert small.config['sample_size'] == large.config['sample_size'] == 64


@pytest.fixture(scope='module')
def pipeline_folder(tmp_path_factory, model):
    """Folder in diffusers' layout with small encoders of the widths that Stable Diffusion 3's transformer takes."""
    folder = tmp_path_factory.mktemp('sd3')
    stock(model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('t5', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pretrained_parts_are_read(pipeline_folder, monkeypatch, model, t5):
    monkeypatch.setattr(mmdit_builder, 'T5_WIDTH', 128)  # that of the tiny pipeline
    sizes: dict[str, Any] = {'depth': 1, 'dual_attention_blocks': 0, 't5': t5, 't5_length': 24}
    loaded = mmdit(32, pretrained=str(pipeline_folder), encoder_dtype='float32', **sizes)
    ids = loaded._tokens(CAPTIONS)
    assert torch.equal(ids, model._tokens(CAPTIONS)[:, : 3 if t5 else 2, : 24 if t5 else 16])
    ours, theirs = loaded.embed(ids), model.embed(model._tokens(CAPTIONS))
    torch.testing.assert_close(ours.pooled, theirs.pooled)
    assert ours.embeds.shape == theirs.embeds.shape
    torch.testing.assert_close(ours.embeds[:, :16], theirs.embeds[:, :16])
    torch.testing.assert_close(ours.embeds[:, 16:], theirs.embeds[:, 16:] * t5)
    assert type(loaded.vae) is AutoencoderKL
    assert adapter_of(model.denoiser).single_file(model).architecture == 'stable-diffusion-v3.5-medium'


def test_planner_reads_the_configurations_of_all_encoders(pipeline_folder, tmp_path):
    def key(folder):
        costs = ModelCosts(Component('mmdit', {'pretrained': str(folder)}))
        assert costs.notes == []
        return costs.key

    shutil.copytree(pipeline_folder, tmp_path / 'copy')
    path = tmp_path / 'copy' / 'text_encoder_3' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'num_layers': 9}))
    assert key(pipeline_folder).contents != key(tmp_path / 'copy').contents
    assert ModelCosts(Component('mmdit', {'resolution': 512, 'seed': 3})).key == ModelCosts(Component('mmdit')).key


def test_encoders_that_do_not_fit_together_are_refused(model):
    clips: Any = list(model.text.encoders[:2])
    t5: Any = model.text.encoders[2]
    tokenizers = model.text.tokenizers

    def conditioner(clips, t5, tokenizers, width=128):
        return Sd3TextConditioner(clips, t5, tokenizers, width=width, t5_length=24)

    assert (conditioner(clips, t5, tokenizers).width, model.text.output) == (128, 'penultimate+pooled+t5')
    assert conditioner(clips, None, tokenizers[:2], width=64).width == 64
    with pytest.raises(UserError, match='T5 has width 128 and a tokenizer of length 24; expected 256 and 24'):
        conditioner(clips, t5, tokenizers, width=256)
    with pytest.raises(UserError, match=r'2 CLIP models with tokenizers of lengths \[16, 12\]; use two'):
        conditioner(clips, t5, [tokenizers[0], clip_tokenizer(max_length=12), tokenizers[2]])
    with pytest.raises(UserError, match='the CLIP models have width 64 together, T5 has 32'):
        conditioner(clips, None, tokenizers[:2], width=32)
    with pytest.raises(UserError, match='dual_attention_blocks: 3 is more than depth, 2'):
        tiny_mmdit(depth=2, dual_attention_blocks=3)
    with pytest.raises(UserError, match='3 encoders with 2 tokenizers of lengths .16.; use one tokenizer per encoder$'):
        conditioner(clips, t5, tokenizers[:2])


def test_export_without_t5_says_how_to_load_it(small_vae, caplog):
    model = tiny_mmdit(32, vae=str(small_vae), t5=False, caption_dropout_mode='zeros', **TINY)
    caplog.set_level('INFO')
    pipeline: Any = stock(model)
    assert (pipeline.text_encoder_3, pipeline.tokenizer_3) == (None, None)
    assert 'from_pretrained(FOLDER, text_encoder_3=None, tokenizer_3=None)' in caplog.text
    assert 'call the pipeline with max_sequence_length=24' in caplog.text
    sizes = [each.config['sample_size'] for each in (pipeline.transformer, model.denoiser)]
    assert sizes == [4, 64], 'the size of the images of training, and the scale of the position embeddings'
    assert 'zeros for dropped captions' in caplog.text
    assert model.text.output == 'penultimate+pooled+zeros'
