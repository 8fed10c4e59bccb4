"""`diffusion data measure-latents`: the check, and printed values that normalize the latents."""

import io
import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from commands import output_of, refusal
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from PIL import Image
from shards import draw_image, write_image_shards

from diffusion.models import batch_keys
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.pretrained import TINY_VAE, load_vae


def pixels_of(side: int, count: int, offset: int) -> torch.Tensor:
    """Return the images of `write_image_shards` as uint8 [count, 3, side, side]."""
    images = [Image.open(io.BytesIO(draw_image(index, side))) for index in range(offset, offset + count)]
    return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def printed(text: str) -> list[dict]:
    """Return the printed configurations: per channel, and for all channels."""
    lines = re.findall(r'^  (".*)$', text, flags=re.MULTILINE)
    return [json.loads('{' + ''.join(lines[:3]) + '}'), json.loads('{' + lines[3] + '}')]


@pytest.fixture(scope='module')
def unpublished(tmp_path_factory):
    """Folder of the packaged autoencoder without its latent statistics."""
    folder = tmp_path_factory.mktemp('vae') / 'vae'
    shutil.copytree(TINY_VAE, folder)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'latents_mean': None, 'latents_std': None}))
    return folder


def test_values_are_those_of_posterior_samples(unpublished, pictures, capsys):
    command = ['data', 'measure-latents', unpublished, pictures[64], '--resolution', '64']
    text = output_of(capsys, *command, '--batch-size', '7')
    assert 'latents of 24 images' in text
    channels, single = printed(text)
    vae = AutoencoderKL.from_pretrained(unpublished, low_cpu_mem_usage=False).float()
    encoded: Any = vae.requires_grad_(False).encode(pixels_of(64, 24, 100).float() / 127.5 - 1)
    posterior = encoded.latent_dist
    # 400 samples of the posterior in place of its variance.
    samples = torch.stack([posterior.sample() for _ in range(400)])
    mean, std = samples.mean(dim=(0, 1, 3, 4)), samples.std(dim=(0, 1, 3, 4))
    torch.testing.assert_close(torch.tensor(channels['latents_mean']), mean, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(torch.tensor(channels['latents_std']), std, rtol=2e-3, atol=2e-3)
    assert channels['scaling_factor'] == 1.0
    assert single['scaling_factor'] == pytest.approx(1 / samples.std().item(), rel=2e-3)


@pytest.mark.slow
def test_printed_values_normalize_the_latents_of_a_model(small_dc_ae, tmp_path, capsys):
    data = write_image_shards(tmp_path / 'data', count=10, side=32, offset=7)
    text = output_of(capsys, 'data', 'measure-latents', small_dc_ae, data, '--resolution', '32')
    for number, values in enumerate(printed(text)):
        folder = tmp_path / f'vae{number}'
        shutil.copytree(small_dc_ae, folder)
        config = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps(config | values))
        sizes: Any = {'hidden_size': 32, 'num_heads': 2, 'depth': 1, 'text_width': 32, 'text_layers': 1}
        model = tiny_prx(32, vae=str(folder), encoder_dtype='float32', **sizes)
        latents = model.latents_of({batch_keys.IMAGE: pixels_of(32, 10, 7)})
        assert float(latents.std()) == pytest.approx(1, abs=0.01)
        if number == 0:
            torch.testing.assert_close(latents.mean(dim=(0, 2, 3)), torch.zeros(4), atol=1e-3, rtol=0)
            torch.testing.assert_close(latents.std(dim=(0, 2, 3)), torch.ones(4), atol=0.02, rtol=0)


def test_statistics_of_flux2_are_checked_and_measured_per_position(small_flux2, pictures, tmp_path, capsys):
    command = ['--resolution', '32', '--batch-size', '10']
    text = output_of(capsys, 'data', 'measure-latents', small_flux2, pictures[32], *command)
    assert re.search(r'; \d+ channels are not near 0 and 1, such as \d+ \(mean -?\d\.\d\d, variance \d+\.\d\d\)', text)
    assert 'To fix: replace its statistics by those below before you train or precompute latents' in text
    values = json.loads('{' + ''.join(re.findall(r'^  (".*)$', text, flags=re.MULTILINE)) + '}')
    vae = AutoencoderKLFlux2.from_pretrained(small_flux2, low_cpu_mem_usage=False)
    for name, numbers in values.items():
        vae.bn.register_buffer(name.removeprefix('bn.'), torch.tensor(numbers))
    vae.save_pretrained(tmp_path / 'corrected')
    text = output_of(capsys, 'data', 'measure-latents', tmp_path / 'corrected', pictures[32], *command)
    assert re.search(r'mean -?0.00 to 0.00, variance 1.00 to 1.00; ready for training', text)


def test_aspect_buckets_and_number_of_samples(unpublished, tmp_path, capsys):
    write_image_shards(tmp_path / 'data' / '64x64', count=12, side=64)
    write_image_shards(tmp_path / 'data' / '32x64', count=12, side=64)
    buckets = {'resolution': 64, 'buckets': {'64x64': {'samples': 12}, '32x64': {'samples': 12}}}
    (tmp_path / 'data' / 'buckets.json').write_text(json.dumps(buckets))
    command = ['data', 'measure-latents', unpublished, tmp_path / 'data', '--resolution', '64']
    results = [output_of(capsys, *command, '--samples', '9', '--seed', seed) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    assert 'latents of 9 images' in results[0]


def test_mistakes(tmp_path, capsys, pictures):
    command = ['data', 'measure-latents', '--resolution', '32']
    assert 'pixels are not normalized' in refusal(capsys, *command, 'pixels', pictures[32])
    message = 'is not a folder; give a folder that `diffusion prepare`'
    assert message in refusal(capsys, *command, TINY_VAE, tmp_path / 'no')
    assert '36' in refusal(capsys, *command[:-1], '36', TINY_VAE, pictures[32])
    assert load_vae(str(TINY_VAE)).config['scaling_factor'] == 1.0
