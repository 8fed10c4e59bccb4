"""`diffusion data measure-latents`: mean and standard deviation of an autoencoder's latents, for its configuration.

Shapes: B batch, C latent channels, H W latent size.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from diffusion.config.image_shapes import BUCKETS
from diffusion.config.model_checks import PIXELS
from diffusion.config.recipe import Component, Recipe, StreamConfig
from diffusion.data.streams import BucketedDataset
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.pretrained import load_vae
from diffusion.models.vae import Vae, latent_channels, moments_of
from diffusion.storage.places import is_url
from diffusion.training.components import build_dataset


@dataclass(frozen=True)
class LatentMeasurement:
    """Statistics of an autoencoder's unnormalized latents, sampled from the posterior as in training."""

    mean: Tensor
    """Mean per channel, float64 [C]."""
    std: Tensor
    """Standard deviation per channel, float64 [C]."""
    total_std: float
    """Standard deviation of all values around the mean over all channels."""
    images: int


def measure(vae: Vae, batches: Iterable[Tensor]) -> LatentMeasurement:
    """Measure the latents of batches of images, uint8 [B, 3, 8H, 8W]."""
    channels = latent_channels(vae)
    # Sums have at most about 10**8 terms of order 1, so float64 leaves ten digits.
    total, squares, count, images = torch.zeros(channels).double(), torch.zeros(channels).double(), 0, 0
    device = next((parameter.device for parameter in vae.parameters()), torch.device('cpu'))
    for batch in batches:
        with torch.inference_mode():
            moments = moments_of(vae, (batch.to(device).float() / 127.5 - 1).to(vae.dtype)).double().cpu()
        mean, log_variance = moments[:, :channels], moments[:, channels:]
        total += mean.sum(dim=(0, 2, 3))
        squares += mean.square().sum(dim=(0, 2, 3))
        if log_variance.shape[1]:
            # Law of total variance: a sample's variance is the variance of the mean plus the mean of the variance.
            squares += log_variance.clamp(-30.0, 20.0).exp().sum(dim=(0, 2, 3))
        count += mean.numel() // channels
        images += len(batch)
    mean = total / count
    overall = squares.mean() / count - mean.mean() ** 2
    return LatentMeasurement(mean, (squares / count - mean**2).sqrt(), float(overall.sqrt()), images)


def measure_latents(
    source: str, location: str, *, resolution: int, samples: int = 2000, batch_size: int = 16, seed: int = 0
) -> None:
    """Measure latents of `samples` random images, center-cropped to `resolution`; print values for the config.json."""
    if source == PIXELS:
        raise UserError(f'{PIXELS}: pixels are not normalized, so there is nothing to measure; give an autoencoder')
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    vae: Vae = nn.Module.to(load_vae(source).requires_grad_(False).eval(), device)  # type: ignore[assignment]
    dataset = _dataset(location, resolution, batch_size)
    counts = dataset.samples_per_stream.tolist()
    chosen = np.sort(np.random.default_rng(seed).choice(sum(counts), min(samples, sum(counts)), replace=False))
    found = measure(vae, _batches(dataset, chosen, np.cumsum(counts), batch_size))
    print(_report(found, source, location))


def _dataset(location: str, resolution: int, batch_size: int) -> BucketedDataset:
    """Return the dataset at a folder or URL: center-cropped images without captions."""
    remote = is_url(location)
    aspects = not remote and Path(location, BUCKETS).is_file()
    place: Any = {'remote' if remote else 'local': location}
    stream = StreamConfig(resolution, aspects=aspects, **place)
    # Declare a model without text, so that captions are not read.
    recipe = Recipe('measure-latents', batch_size, Component('autoencoder'))
    return build_dataset(
        recipe, streams={'images': stream}, component=Component('image_text'), batch_size=batch_size, shuffle=False
    )


def _batches(dataset: BucketedDataset, chosen: np.ndarray, ends: np.ndarray, batch_size: int) -> Iterable[Tensor]:
    """Yield the images with the ids `chosen` in batches from one stream each, uint8 [B, 3, 8H, 8W].

    `ends` has the id after each stream's last image.
    """
    with tqdm(total=len(chosen), desc='latents', unit='image', disable=None) as progress:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            ids = chosen[(chosen >= start) & (chosen < end)]
            for first in range(0, len(ids), batch_size):
                part = ids[first : first + batch_size]
                yield torch.stack([dataset[int(index)][batch_keys.IMAGE] for index in part])
                progress.update(len(part))


def _report(found: LatentMeasurement, source: str, location: str) -> str:
    values = {
        name: '[' + ', '.join(f'{value:.5f}' for value in each.tolist()) + ']'
        for name, each in (('latents_mean', found.mean), ('latents_std', found.std))
    }
    return '\n'.join(
        [
            f'{source}: latents of {found.images} images of {location}, {len(found.mean)} channels',
            "In the autoencoder's config.json (of a repository: of a local copy, which model.vae then names), set",
            *(f'  "{name}": {text},' for name, text in values.items()),
            '  "scaling_factor": 1.0',
            'or one number for all channels, which every pipeline of diffusers can apply after an export:',
            f'  "scaling_factor": {1 / found.total_std:.5f}',
        ]
    )
