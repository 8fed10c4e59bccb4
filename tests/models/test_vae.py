"""Kinds of autoencoders: AutoencoderKL, AutoencoderDC and PixelSpace in the same model."""

import json
import shutil
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.prx.builder import prx, tiny_prx
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.pretrained import load_vae
from diffusion.models.vae import (
    PixelSpace,
    downsampling,
    has_variance,
    latent_channels,
    latent_statistics,
    moments_of,
    with_folded_statistics,
)

PRX: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 1, 'text_width': 32, 'text_layers': 1}
PRX |= {'encoder_dtype': 'float32'}


@pytest.fixture
def images():
    return torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_class_of_an_autoencoder_is_read_from_its_folder(small_vae, small_dc_ae, tmp_path):
    assert type(load_vae(str(small_vae))) is AutoencoderKL
    assert type(load_vae(str(small_dc_ae))) is AutoencoderDC
    shutil.copytree(small_dc_ae, tmp_path / 'model' / 'vae')
    assert type(load_vae(str(tmp_path / 'model'))) is AutoencoderDC
    assert type(load_vae('pixels')) is PixelSpace
    (tmp_path / 'config.json').write_text('{"_class_name": "AutoencoderTiny"}')
    with pytest.raises(UserError, match=r': AutoencoderTiny is not supported; use AutoencoderKL or AutoencoderDC'):
        load_vae(str(tmp_path))


def test_latents_of_dc_ae_are_its_encoding_times_the_scaling_factor(small_dc_ae, images):
    model = tiny_prx(32, vae=str(small_dc_ae), **PRX)
    stock: Any = AutoencoderDC.from_pretrained(small_dc_ae, low_cpu_mem_usage=False)
    encoded = stock.encode(images.float() / 127.5 - 1).latent
    assert (downsampling(model.vae), latent_channels(model.vae), has_variance(model.vae)) == (16, 4, False)
    assert encoded.shape == (2, 4, 2, 3)
    torch.testing.assert_close(model.latents_of({batch_keys.IMAGE: images}), 0.8 * encoded)
    decoded = stock.decode(encoded).sample / 2 + 0.5
    torch.testing.assert_close(model.decode(0.8 * encoded), decoded.clamp(0, 1), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match='images of 40x32 px, but the VAE downsamples by 16'):
        moments_of(model.vae, torch.zeros(1, 3, 32, 40))
    with pytest.raises(UserError, match='resolution: 80 px is not a multiple of 32 px|resolution: 24'):
        tiny_prx(24, vae=str(small_dc_ae), **PRX)


def test_latents_of_pixel_space_are_the_pixels(images):
    model = tiny_prx(32, vae='pixels', patch_size=8, **PRX)
    assert (downsampling(model.vae), latent_channels(model.vae), model.latent_size) == (1, 3, 32)
    latents = model.latents_of({batch_keys.IMAGE: images})
    assert torch.equal(latents, images.float() / 127.5 - 1)
    torch.testing.assert_close(model.decode(latents) * 255, images.float())
    assert model.generate(['a'], num_inference_steps=1).shape == (1, 3, 32, 32)
    with pytest.raises(UserError, match='a PRXPixelPipeline samples a flow by x-prediction, but'):
        adapter_of(model.denoiser).pipeline(model)


def test_pixels_are_not_rounded_to_half_precision(images):
    settings: dict[str, Any] = PRX | {'encoder_dtype': 'bfloat16'}
    model = tiny_prx(32, vae='pixels', patch_size=8, **settings)
    assert torch.equal(model.encode(images), images.float() / 127.5 - 1)


def test_statistics_per_channel_cannot_be_exported_with_dc_ae(small_dc_ae, tmp_path):
    shutil.copytree(small_dc_ae, tmp_path / 'vae')
    config = json.loads((tmp_path / 'vae' / 'config.json').read_text())
    statistics = {'latents_mean': [0.0, 1.0, 2.0, 3.0], 'latents_std': [1.0, 2.0, 1.0, 2.0], 'scaling_factor': 1.0}
    (tmp_path / 'vae' / 'config.json').write_text(json.dumps(config | statistics))
    vae = load_vae(str(tmp_path / 'vae'))
    assert [values.tolist() for values in latent_statistics(vae)] == [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 1.0, 2.0]]
    with pytest.raises(UserError, match='AutoencoderDC has latent statistics per channel but no quant_conv.*task=gen'):
        with_folded_statistics(vae)
    plain = with_folded_statistics(load_vae(str(small_dc_ae)))
    assert plain.config['scaling_factor'] == 0.8


def test_shift_factor_is_kept_for_pipelines_that_apply_it():
    with torch.device('meta'):
        flux = prx(pretrained=None).vae
    assert with_folded_statistics(flux, pipeline_shifts=True).config['shift_factor'] == 0.1159
    with pytest.raises(UserError, match='has a shift_factor but no quant_conv'):
        with_folded_statistics(flux)


def test_stable_diffusion_pipeline_refuses_dc_ae(small_dc_ae):
    model = tiny(32, vae=str(small_dc_ae), block_out_channels=[32], text_width=32, text_layers=1)
    with pytest.raises(UserError, match='StableDiffusionPipeline decodes with an AutoencoderKL, but this model has an'):
        adapter_of(model.denoiser).pipeline(model)
