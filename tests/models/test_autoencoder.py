"""Training of the autoencoder, and quality of the packaged one."""

import math

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from model_batches import shapes_of
from shards import open_shards

from diffusion.config.image_shapes import square
from diffusion.config.load import load
from diffusion.data.transforms import decode_for_model
from diffusion.models import batch_keys
from diffusion.models.autoencoder import psnr_db, tiny_autoencoder
from diffusion.models.pretrained import TINY_VAE, load_vae
from diffusion.models.vae import decode_latents, posterior_of
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of
from diffusion.tasks.export import export
from diffusion.training.train import train


def test_loss_is_squared_error_plus_weighted_l1_and_kl():
    model = tiny_autoencoder(
        block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4, l1_weight=0.5, kl_weight=0.1
    )
    model.eval()
    batch = {batch_keys.IMAGE: torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)}
    pixels = batch[batch_keys.IMAGE] / 127.5 - 1
    posterior = posterior_of(model.vae, pixels)
    error = decode_latents(model.vae, posterior.mean) - pixels
    standard = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
    kl = torch.distributions.kl_divergence(torch.distributions.Normal(posterior.mean, posterior.std), standard).mean()
    expected = error.square().mean() + 0.5 * error.abs().mean() + 0.1 * kl
    torch.testing.assert_close(model.loss(model(batch), batch), expected)


def test_evaluation_measures_the_psnr_of_counted_images():
    images, black = torch.tensor([0, 0.2, 7]).view(3, 1, 1, 1).expand(3, 3, 16, 16), torch.zeros(3, 3, 16, 16)
    torch.testing.assert_close(psnr_db(images, black), torch.tensor([100, 20, 20 * math.log10(2)]))  # 7 is clipped
    model = tiny_autoencoder(block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4).eval()
    batch = {batch_keys.IMAGE: torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)}
    outputs = model.eval_forward(batch)
    assert model.eval_forward(batch, outputs) is outputs and model.get_metrics(is_train=True) == {}
    (metric,) = model.get_metrics(is_train=False).values()
    model.update_metric(batch | {batch_keys.IS_COUNTED: torch.tensor([False, True])}, outputs, metric)
    torch.testing.assert_close(metric.compute(), psnr_db(outputs.reconstructed, outputs.pixels)[1])


def test_default_architecture_is_that_of_the_packaged_weights():
    ours, packaged = tiny_autoencoder().vae, load_vae(str(TINY_VAE))
    assert shapes_of(ours) == shapes_of(packaged)  # type: ignore[arg-type]
    assert not [key for key, each in ours.config.items() if isinstance(each, int) and each != packaged.config[key]]


def test_latent_statistics_follow_the_latents():
    model = tiny_autoencoder(block_out_channels=[8, 8], norm_num_groups=4, latent_channels=4)
    batch = {batch_keys.IMAGE: torch.randint(0, 256, (16, 3, 16, 16), dtype=torch.uint8)}
    mean, variance = torch.zeros(4), torch.ones(4)
    for latents in torch.randn(3, 16, 4, 8, 8) * 5 + 7:
        model._update_statistics(latents)
        of_channels = latents.transpose(0, 1).flatten(1)
        mean = 0.99 * mean + 0.01 * of_channels.mean(dim=1)
        variance = 0.99 * variance + 0.01 * of_channels.var(dim=1)
    vae = model.finished()
    torch.testing.assert_close(torch.tensor(vae.config['latents_mean']), mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(vae.config['latents_std']), variance.sqrt(), rtol=0, atol=1e-5)
    assert vae.config['latents_std'] == [round(each, 5) for each in vae.config['latents_std']]
    model.eval()
    before = model.latent_mean.clone()
    model(batch)
    assert torch.equal(model.latent_mean, before), 'evaluation does not change them'


def test_trained_autoencoder_is_exported_with_its_statistics(write_recipe, tmp_path):
    model = {'name': 'autoencoder', 'block_out_channels': [8, 8, 8, 8], 'norm_num_groups': 4, 'latent_channels': 4}
    train(load(write_recipe('vae', model=model, algorithms={'ema': {'ema_start': '2ba'}}))).close()
    assert export(tmp_path / 'runs/vae', tmp_path / 'out', dtype='float16') == 'ema'
    vae = AutoencoderKL.from_pretrained(tmp_path / 'out', low_cpu_mem_usage=False, torch_dtype=torch.float16)
    assert vae.dtype == torch.float16
    assert len(vae.config['latents_std']) == 4
    assert vae.config['scaling_factor'] == 1.0


@pytest.mark.slow
def test_packaged_autoencoder_reconstructs_held_out_images(tmp_path):
    """Expect at least 25 dB on the held-out families of OpenMoji, and latents of mean 0 and standard deviation 1."""
    source = {'kind': 'openmoji', 'select': 'all', 'split': 'heldout'}
    prepare(settings_of({'source': source, 'out': str(tmp_path / 'heldout'), 'sizes': [64]}))
    data = open_shards(tmp_path / 'heldout/64px')
    images = [decode_for_model(data[i]['image'], square(64)) for i in range(0, len(data), 4)]
    pixels = torch.stack(images) / 127.5 - 1
    vae = AutoencoderKL.from_pretrained(TINY_VAE, low_cpu_mem_usage=False).float()
    with torch.no_grad():
        means = posterior_of(vae, pixels).mean
        decibels = psnr_db(decode_latents(vae, means), pixels)
    assert len(images) > 50
    assert decibels.mean() > 25
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1) for name in ('latents_mean', 'latents_std'))
    normalized = (means - mean) / std
    assert normalized.std() == pytest.approx(1.0, abs=0.15)
    assert (TINY_VAE / 'diffusion_pytorch_model.safetensors').stat().st_size < 4.2e6
