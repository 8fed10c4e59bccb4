"""PRX against diffusers alone: parameter counts, the loss, text masks, pretrained parts, and mistakes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.prx.pipeline_prx import PRXPipeline
from diffusers.pipelines.prx.pipeline_prx_pixel import PRXPixelPipeline
from model_batches import CAPTIONS, assert_same_loss_and_gradients, batch_of, size_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.config.load import load
from diffusion.config.recipe import LoraConfig
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.prx.builder import FLOW, prx, tiny_prx, transformer
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.lora import add_lora
from diffusion.models.objective import Objective
from diffusion.models.randomness import Draws, Purpose

TINY: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'text_width': 32, 'text_layers': 1}
GEMMA = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'num_attention_heads': 2}
GEMMA |= {'num_key_value_heads': 1, 'head_dim': 16, 'vocab_size': 128, 'query_pre_attn_scalar': 16}


@pytest.fixture(scope='module')
def model(small_vae) -> LatentDiffusion:
    torch.manual_seed(0)
    return tiny_prx(vae=str(small_vae), patch_size=2, caption_dropout=0.0, **TINY)


def gemma_tokenizer(**settings: Any) -> Any:
    """Return a tokenizer of Gemma's class with a small vocabulary."""
    words = Tokenizer(models.BPE(byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ['<pad>', '<eos>', '<bos>', '<unk>']
    words.train_from_iterator(CAPTIONS * 5, trainers.BpeTrainer(vocab_size=120, special_tokens=special))
    words.post_processor = processors.TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', 2)])
    return fast_tokenizer('Gemma')(tokenizer_object=words, pad_token='<pad>', **settings)


@pytest.fixture(scope='module')
def pipeline_folder(tmp_path_factory, small_vae):
    """Folder in diffusers' layout with a VAE, a tiny T5-Gemma encoder and a tokenizer of Gemma's class."""
    folder = tmp_path_factory.mktemp('prx')
    AutoencoderKL.from_pretrained(small_vae, low_cpu_mem_usage=False).save_pretrained(folder / 'vae')
    gemma_tokenizer(model_max_length=12).save_pretrained(folder / 'tokenizer')
    config = T5GemmaConfig(encoder=GEMMA, decoder=GEMMA)
    torch.manual_seed(0)
    part_config: Any = config.encoder
    encoder = T5GemmaEncoder(part_config)
    encoder.config = config  # as published: the configuration of encoder and decoder
    encoder.save_pretrained(folder / 'text_encoder')
    return folder


@pytest.fixture(scope='module')
def qwen_folder(tmp_path_factory):
    """Folder in diffusers' layout with the language part of a tiny Qwen3-VL, and a tokenizer of Qwen2's class."""
    folder = tmp_path_factory.mktemp('qwen')
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator(CAPTIONS * 5, trainers.BpeTrainer(vocab_size=120, special_tokens=['<|endoftext|>']))
    # The published setting: the padding token differs from the end token, which captions do not have.
    tokenizer = fast_tokenizer('Qwen2')(tokenizer_object=words, pad_token='<|endoftext|>', eos_token='<|im_end|>')
    tokenizer.save_pretrained(folder / 'tokenizer')
    part: dict[str, Any] = {'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'vocab_size': 128}
    part |= {'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 16}
    part |= {'rope_scaling': {'rope_type': 'default', 'mrope_section': [4, 2, 2], 'mrope_interleaved': True}}
    torch.manual_seed(0)
    Qwen3VLTextModel(Qwen3VLTextConfig(**part)).save_pretrained(folder / 'text_encoder')
    return folder


def test_published_number_of_parameters_of_prxpixel_7b():
    large = load('yamls/prxpixel_7b.yaml', allow_missing=True).model.kwargs
    keys = 'hidden_size', 'num_heads', 'depth', 'patch_size', 'bottleneck_size', 'resolution_embeds'
    with torch.device('meta'):
        seven = transformer(3, 2048, **{key: large[key] for key in keys})  # 2048 is the width of Qwen3-VL 2B
    assert (size_of(seven), seven.config['axes_dim']) == (7_003_535_872, [64, 64])


@pytest.mark.parametrize(
    ('prediction', 'scale'), [pytest.param('velocity', 1.0, marks=pytest.mark.slow), ('velocity', 3.0), ('sample', 2.0)]
)
def test_loss_and_gradients_equal_a_reference_with_diffusers_alone(small_vae, prediction, scale):
    objective = replace(FLOW, prediction_type=prediction, noise_scale=scale)
    torch.manual_seed(0)
    model = tiny_prx(vae=str(small_vae), patch_size=2, caption_dropout=0.0, objective=objective, **TINY)
    batch = batch_of(model, height=32)
    draws = Draws(17, batch[batch_keys.SAMPLE_ID], batch[batch_keys.EPOCH], batch[batch_keys.BATCH_INDEX])
    time = objective.time_of(draws.uniform(Purpose.TIMESTEP)).float()
    latents = model.latents_of(batch, draws)
    noise = scale * draws.normal(Purpose.NOISE, latents.shape[1:])
    t = time.view(-1, 1, 1, 1)
    noisy = (1 - t) * latents + t * noise
    ids = batch[batch_keys.INPUT_IDS][:, 0]
    mask = torch.tensor([[i <= row.index(49407) for i in range(16)] for row in ids.tolist()])
    embeds = model.text.encoders[0](ids, attention_mask=mask).last_hidden_state
    predicted: Any = model.denoiser(noisy, timestep=time, encoder_hidden_states=embeds, attention_mask=mask).sample
    if prediction == 'sample':
        predicted = (noisy - predicted) / t.clamp(min=0.05)
        target = (noisy - latents) / t.clamp(min=0.05)
    else:
        target = noise - latents
    reference = functional.mse_loss(predicted, target)
    assert_same_loss_and_gradients(model, batch, reference, rtol=1e-4, atol=1e-6)


def test_padding_of_captions_has_no_effect(model):
    condition = model._condition(model._tokens(['two cats']))
    used = int(condition.mask.sum())
    assert used == 4, 'start, two words, end'
    trimmed = replace(condition, embeds=condition.embeds[:, :used], mask=condition.mask[:, :used])
    noisy, time = torch.randn(1, 4, 4, 4), torch.tensor([500.0])
    found, expected = (model._predict(noisy, time, each) for each in (trimmed, condition))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings('ignore:`LoraLoaderMixin` is deprecated')
def test_pretrained_parts_are_read_and_a_saved_pipeline_loads_them_again(pipeline_folder, tmp_path, caplog):
    sizes: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'max_length': 12}
    model = prx(32, pretrained=str(pipeline_folder), encoder_dtype='float32', **sizes)
    ids = model._tokens(CAPTIONS)
    mask = model.text.padding_mask(ids)
    tokenizer: Any = model.text.tokenizers[0]
    expected = tokenizer(CAPTIONS, padding='max_length', truncation=True, max_length=12, return_tensors='pt')
    assert torch.equal(mask, expected.attention_mask.bool())
    assert mask[2].sum() == 1, 'the empty caption has the start token'
    encoder: Any = model.text.encoders[0]
    embeds = encoder(expected.input_ids, attention_mask=expected.attention_mask).last_hidden_state
    seen = {}
    handle = encoder.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    torch.testing.assert_close(model.embed(ids).embeds, embeds)
    handle.remove()
    assert torch.equal(seen['attention_mask'], mask)

    adapter_of(model.denoiser).pipeline(model).save_pretrained(tmp_path / 'saved')
    assert 'images will differ' not in caplog.text
    pipeline: Any = PRXPipeline.from_pretrained(tmp_path / 'saved', local_files_only=True, low_cpu_mem_usage=False)
    assert pipeline.tokenizer(CAPTIONS).input_ids == tokenizer(CAPTIONS).input_ids


def test_language_part_of_qwen_is_read_and_saved_with_a_pixel_pipeline(qwen_folder, tmp_path):
    """Padding is hidden from the encoder too; the empty caption has no token at all."""
    objective = replace(FLOW, prediction_type='sample', noise_scale=2.0)
    sizes: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'patch_size': 8, 'bottleneck_size': 16}
    sizes |= {'max_length': 12, 'encoder_dtype': 'float32'}
    model = prx(32, pretrained=str(qwen_folder), vae='pixels', objective=objective, **sizes)
    ids = model._tokens(CAPTIONS)
    mask = model.text.padding_mask(ids)
    tokenizer, encoder = model.text.tokenizers[0], model.text.encoders[0]
    assert isinstance(tokenizer, fast_tokenizer('Qwen2')) and isinstance(encoder, Qwen3VLTextModel)
    assert mask.sum(dim=1).tolist() == [len(tokenizer(caption).input_ids) for caption in CAPTIONS]
    assert 0 < mask[0].sum() < 12 and not mask[2].any()
    embeds = model.embed(ids).embeds
    assert embeds.isfinite().all()
    for caption, row, kept in zip(CAPTIONS, embeds, mask, strict=True):
        if caption:
            alone = encoder(**tokenizer(caption, return_tensors='pt')).last_hidden_state[0]
            torch.testing.assert_close(row[kept], alone, rtol=1e-4, atol=1e-5)
    batch = batch_of(model, height=32)
    assert model.loss(model(batch), batch).isfinite()

    adapter_of(model.denoiser).pipeline(model).save_pretrained(tmp_path / 'saved')
    pipeline: Any = PRXPixelPipeline.from_pretrained(tmp_path / 'saved', local_files_only=True, low_cpu_mem_usage=False)
    assert isinstance(pipeline.text_encoder, Qwen3VLTextModel)


def test_images_must_divide_into_patches(model):
    batch = batch_of(model, height=32)
    batch[batch_keys.IMAGE] = batch[batch_keys.IMAGE][..., :40]
    with pytest.raises(UserError, match='latents of 5x4 cells do not divide into .* patches of 2x2; .* of 16 px'):
        model(batch)
    with pytest.raises(UserError, match='size: 40x32; use positive multiples of 16 px, the size of a patch'):
        model.generate(['a'], size=(40, 32))


def test_transformer_also_trains_diffusion(small_vae):
    model = tiny_prx(vae=str(small_vae), objective=Objective(prediction_type='v_prediction'), **TINY)
    seen = {}
    model.denoiser.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    batch = batch_of(model, height=32)
    assert model.loss(model(batch), batch).isfinite()
    assert float(seen['timestep'].min()) >= 0 and float(seen['timestep'].max()) < 1
    assert model.generate(['a'], size=(32, 32), num_inference_steps=2).shape == (1, 3, 32, 32)


@pytest.mark.parametrize(('width', 'heads'), [(28, 2), (44, 5)])
def test_heads_of_other_sizes_are_refused(width, heads):
    with pytest.raises(UserError, match=f'hidden_size: {width} does not divide into {heads} .*multiple of {4 * heads}'):
        tiny_prx(hidden_size=width, num_heads=heads)


def test_denoiser_of_no_known_family_is_refused():
    with pytest.raises(UserError, match='denoiser: Linear belongs to no known family; use .*UNet2DConditionModel, or'):
        adapter_of(torch.nn.Linear(1, 1))


def test_lora_is_refused(model):
    with pytest.raises(UserError, match='lora: diffusers has no LoRA for a .*Transformer2DModel; remove the section'):
        add_lora(model.denoiser, LoraConfig(), seed=0)
