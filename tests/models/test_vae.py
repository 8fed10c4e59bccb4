"""Kinds of autoencoders in the same model: AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC, AutoencoderRAE, pixels."""

import json
import shutil
from typing import Any, get_args

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.autoencoders.autoencoder_rae import AutoencoderRAE
from safetensors.torch import load_file, save_file

from diffusion.compatibility import diffusers_versions
from diffusion.data.latents import manifest_of
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.i1.builder import tiny_i1
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.prx.builder import prx, tiny_prx
from diffusion.models.families.prx.builder import transformer as prx_transformer
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.flops import vae_encoder_flops
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
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
from diffusion.models.wrapped_vaes import Layout

WEIGHTS = 'diffusion_pytorch_model.safetensors'
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
    with pytest.raises(UserError, match=r': AutoencoderTiny is not supported; use AutoencoderKL or AutoencoderKLFlux2'):
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
    with pytest.raises(UserError, match='resolution: 24 is not a positive multiple of 16; use 16 or 32'):
        tiny_prx(24, vae=str(small_dc_ae), **PRX)


def stock_flux2_latents(folder: Any, images: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return FLUX.2's autoencoder and its latents, [B, 4C, H/2, W/2], as diffusers' Flux2Pipeline encodes images."""
    vae: Any = AutoencoderKLFlux2.from_pretrained(folder, low_cpu_mem_usage=False).eval().requires_grad_(False)
    z = vae.encode(images.float() / 127.5 - 1).latent_dist.mode()
    batch, channels, height, width = z.shape
    z = z.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    z = z.reshape(batch, channels * 4, height // 2, width // 2)
    mean, var = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
    return vae, (z - mean) / torch.sqrt(var + vae.config.batch_norm_eps)


def test_latents_of_flux2_in_both_layouts_are_those_of_its_pipeline(small_flux2, images):
    stock, grouped = stock_flux2_latents(small_flux2, images)
    decoded = stock.decode(stock.encode(images.float() / 127.5 - 1).latent_dist.mode()).sample / 2 + 0.5
    plain = grouped.reshape(2, 4, 2, 2, 2, 3).permute(0, 1, 4, 2, 5, 3).reshape(2, 4, 4, 6)
    for layout, latents in (('grouped', grouped), ('channels', plain)):
        settings: dict[str, Any] = PRX | {'vae': str(small_flux2), 'vae_layout': layout}
        model = tiny_prx(32, **settings)
        assert (latent_channels(model.vae), downsampling(model.vae)) == (latents.shape[1], 32 // latents.shape[2])
        torch.testing.assert_close(model.latents_of({batch_keys.IMAGE: images}), latents)
        torch.testing.assert_close(model.decode(latents), decoded.clamp(0, 1), rtol=1e-4, atol=1e-5)
        # Half precision does not round the statistics.
        settings['encoder_dtype'] = 'bfloat16'
        half = tiny_prx(32, **settings)
        assert torch.equal(half.latent_std, model.latent_std)
        torch.testing.assert_close(half.vae.exported().bn.state_dict(), stock.bn.state_dict())  # type: ignore[union-attr]


@pytest.mark.parametrize(('layout', 'patch_size'), [('channels', 2), ('grouped', 1)])
def test_transformers_train_and_sample_on_either_layout_of_flux2(small_flux2, images, layout, patch_size):
    mmdit = {'depth': 1, 'dual_attention_blocks': 0, 'text_width': 32, 'text_layers': 1, 't5': False}
    for build, sizes in ((tiny_prx, PRX), (tiny_i1, PRX), (tiny_mmdit, mmdit)):
        model: Any = build(32, vae=str(small_flux2), vae_layout=layout, patch_size=patch_size, seed=3, **sizes)
        captions = {batch_keys.INPUT_IDS: model.empty_ids.expand(2, -1, -1), batch_keys.SAMPLE_ID: torch.arange(2)}
        batches = (
            captions | {batch_keys.IMAGE: images},
            captions | {batch_keys.LATENT_MOMENTS: model.encode(images)},
        )
        losses = [model.loss(model(each), each) for each in batches]
        assert torch.equal(*losses) and losses[0].isfinite()
        assert model.generate(['a'], size=(32, 48), num_inference_steps=1).shape == (1, 3, 32, 48)


def test_mistakes_with_flux2(small_vae, small_flux2, tmp_path):
    with pytest.raises(
        UserError, match=r'vae_layout: grouped, but the latents of .* \(AutoencoderKL with 4 .*\) have one layout'
    ):
        tiny_prx(32, vae=str(small_vae), vae_layout='grouped', **PRX)
    model = tiny_prx(32, vae=str(small_flux2), **PRX)
    with pytest.raises(UserError, match='images of 24x32 px, but the VAE downsamples by 16'):
        moments_of(model.vae, torch.zeros(1, 3, 32, 24))
    with pytest.raises(UserError, match='size: 24x32; use positive multiples of 16 px'):
        model.generate(['a'], size=(24, 32))
    with pytest.raises(UserError, match='resolution: 24 is not a positive multiple of 16; use 16 or 32'):
        tiny_prx(24, vae=str(small_flux2), **PRX)
    with pytest.raises(UserError, match='32 input and 32 output channels.*but the VAE has 4 latent channels'):
        LatentDiffusion(prx_transformer(32, 32, hidden_size=32, num_heads=2, depth=1), model.vae, model.text)
    for size in (None, -8):
        with pytest.raises(UserError, match='latent_size: a PRXTransformer2DModel has no size of its own; give the'):
            LatentDiffusion(model.denoiser, model.vae, model.text, latent_size=size)  # type: ignore[arg-type]
    layouts = [load_vae(str(small_flux2), layout=each) for each in get_args(Layout)]
    names = [manifest_of(each, shape='', posterior='', dtype='').autoencoder for each in layouts]
    assert names == [f'AutoencoderKLFlux2 with {size} px' for size in ('4 channels per 8x8', '16 channels per 16x16')]
    stock = AutoencoderKLFlux2.from_pretrained(small_flux2, low_cpu_mem_usage=False)
    stock.bn.reset_running_stats()
    stock.save_pretrained(tmp_path / 'untrained')
    with pytest.raises(UserError, match=r'untrained: its buffers bn.running_mean and bn.running_var have their init'):
        load_vae(str(tmp_path / 'untrained'))
    shutil.copytree(small_flux2, tmp_path / 'without')
    weights = load_file(tmp_path / 'without' / WEIGHTS)
    save_file({name: each for name, each in weights.items() if 'running' not in name}, tmp_path / 'without' / WEIGHTS)
    with pytest.raises(UserError, match='lack 2 tensors of AutoencoderKLFlux2, such as bn.running_mean'):
        load_vae(str(tmp_path / 'without'))


def test_latents_of_rae_are_its_normalized_features(small_rae, images, caplog):
    images = images[..., :32]
    model = tiny_prx(32, vae=str(small_rae), **PRX)
    stock: Any = AutoencoderRAE.from_pretrained(small_rae, low_cpu_mem_usage=False).eval().requires_grad_(False)
    encoded = stock.encode(images.float() / 255).latent
    assert (downsampling(model.vae), latent_channels(model.vae), has_variance(model.vae)) == (8, 64, False)
    torch.testing.assert_close(model.latents_of({batch_keys.IMAGE: images}), encoded, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.decode(encoded), stock.decode(encoded).sample.clamp(0, 1), rtol=1e-4, atol=1e-5)
    assert model.generate(['a'], num_inference_steps=1).shape == (1, 3, 32, 32)
    assert model.objective.snr_shift == pytest.approx((64 * 4 * 4 / 4096) ** 0.5)
    tiny_prx(32, vae=str(small_rae), objective=Objective(path='flow', prediction_type='velocity'), **PRX)
    assert 'no snr_shift, but latents of AutoencoderRAE have many dimensions; use 0.50' in caplog.text
    assert vae_encoder_flops(model.vae, height=4, width=4) > 10**6


def test_mistakes_with_rae(small_rae, tmp_path, monkeypatch):
    model = tiny_prx(32, vae=str(small_rae), **PRX)
    with pytest.raises(UserError, match='images of 48x32 px, but this AutoencoderRAE encodes and draws 32x32 px only'):
        model.generate(['a'], size=(32, 48))
    with pytest.raises(UserError, match='images of 64x64 px, but this AutoencoderRAE'):
        tiny_prx(64, vae=str(small_rae), **PRX)
    (tmp_path / 'config.json').write_text('{"_class_name": "AutoencoderRAE", "encoder_type": "siglip2"}')
    monkeypatch.setattr(diffusers_versions, 'IS_VERSION_5', True)
    with pytest.raises(UserError, match=r'diffusers 0\.\d+.* cannot build AutoencoderRAE with SigLIP 2 on trans'):
        load_vae(str(tmp_path))


def test_latents_of_pixel_space_are_the_pixels(images):
    settings: dict[str, Any] = PRX | {'encoder_dtype': 'bfloat16'}  # to which pixels are not rounded
    model = tiny_prx(32, vae='pixels', patch_size=8, **settings)
    assert (downsampling(model.vae), latent_channels(model.vae), model.latent_size) == (1, 3, 32)
    latents = model.latents_of({batch_keys.IMAGE: images})
    assert torch.equal(latents, images.float() / 127.5 - 1)
    torch.testing.assert_close(model.decode(latents) * 255, images.float())
    torch.testing.assert_close(model.decode(3 * latents), (1.5 * latents + 0.5).clamp(0, 1))
    assert model.generate(['a'], num_inference_steps=1).shape == (1, 3, 32, 32)
    with pytest.raises(UserError, match='a PRXPixelPipeline samples a flow by x-prediction, but'):
        adapter_of(model.denoiser).pipeline(model)


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
    scaled: Any = AutoencoderKL(block_out_channels=(32,), latents_std=(2.0,) * 4, scaling_factor=1.0)  # type: ignore[arg-type]
    folded: Any = with_folded_statistics(scaled)
    assert torch.equal(folded.post_quant_conv.weight, 2 * scaled.post_quant_conv.weight)
    assert (folded.config['latents_std'], folded.config['scaling_factor']) == (None, 1.0)


def test_stable_diffusion_pipeline_refuses_dc_ae(small_dc_ae):
    model = tiny(32, vae=str(small_dc_ae), block_out_channels=[32], text_width=32, text_layers=1)
    with pytest.raises(UserError, match='StableDiffusionPipeline decodes with an AutoencoderKL, but this model has an'):
        adapter_of(model.denoiser).pipeline(model)
