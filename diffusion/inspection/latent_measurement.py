"""`diffusion data measure-latents`: check that an autoencoder's stored statistics normalize the latents of a dataset.

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
from diffusion.models.vae import Vae, check_sides, latent_channels, latent_statistics, moments_of
from diffusion.models.wrapped_vaes import Flux2Vae, RepresentationVae
from diffusion.storage.places import is_url
from diffusion.training.components import build_dataset

MAX_MEAN, MIN_VARIANCE, MAX_VARIANCE = 0.5, 0.5, 2.0
"""Bounds for a normalized latent channel; they are wide, since published statistics are those of other images."""


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
    source: str,
    location: str,
    *,
    resolution: int,
    revision: str | None = None,
    samples: int = 2000,
    batch_size: int = 16,
    seed: int = 0,
) -> None:
    """Measure latents of `samples` random images, center-cropped to `resolution`; print the check and new statistics.

    FLUX.2 has statistics for each position in a group of 2x2 latents, so these positions are measured as channels.
    """
    if source == PIXELS:
        raise UserError(f'{PIXELS}: pixels are not normalized, so there is nothing to measure; give an autoencoder')
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    loaded = load_vae(source, revision=revision)
    if isinstance(loaded, Flux2Vae):
        loaded = Flux2Vae(loaded.autoencoder, 'grouped')
    vae: Vae = nn.Module.to(loaded.requires_grad_(False).eval(), device)  # type: ignore[assignment]
    check_sides(vae, resolution, resolution)
    dataset = _dataset(location, resolution, batch_size)
    counts = dataset.samples_per_stream.tolist()
    chosen = np.sort(np.random.default_rng(seed).choice(sum(counts), min(samples, sum(counts)), replace=False))
    found = measure(vae, _batches(dataset, chosen, np.cumsum(counts), batch_size))
    title = f'{source}: latents of {found.images} images of {location}, {len(found.mean)} channels'
    print('\n'.join([title, normalization(found, vae), *_new_statistics(found, vae)]))


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
    """Yield the images with the dataset indices `chosen`, uint8 [B, 3, 8H, 8W]; a batch has images of one stream.

    `ends` has the index after each stream's last image.
    """
    with tqdm(total=len(chosen), desc='latents', unit='image', disable=None) as progress:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            ids = chosen[(chosen >= start) & (chosen < end)]
            for first in range(0, len(ids), batch_size):
                part = ids[first : first + batch_size]
                yield torch.stack([dataset[int(index)][batch_keys.IMAGE] for index in part])
                progress.update(len(part))


def normalization(found: LatentMeasurement, vae: Vae) -> str:
    """Return a line that says whether the autoencoder's own statistics give each channel mean 0 and variance 1."""
    own_mean, own_std = (values.double() for values in latent_statistics(vae))
    mean, variance = (found.mean - own_mean) / own_std, (found.std / own_std).square()
    ranges = f'mean {mean.min():.2f} to {mean.max():.2f}, variance {variance.min():.2f} to {variance.max():.2f}'
    wrong = (mean.abs() > MAX_MEAN) | (variance < MIN_VARIANCE) | (variance > MAX_VARIANCE)
    if not wrong.any():
        return f'normalized by its own statistics: {ranges}; ready for training'
    first = int(wrong.nonzero()[0])
    return (
        f'normalized by its own statistics: {ranges}; {int(wrong.sum())} channels are not near 0 and 1, such as '
        f'{first} (mean {mean[first]:.2f}, variance {variance[first]:.2f})\n'
        'To fix: replace its statistics by those below before you train or precompute latents'
    )


def _new_statistics(found: LatentMeasurement, vae: Vae) -> list[str]:
    """Return lines with the measured statistics, in the form in which the autoencoder stores its own."""
    if isinstance(vae, Flux2Vae):
        variance = found.std.square() - vae.autoencoder.config['batch_norm_eps']
        return [
            'In a local copy of the autoencoder, which model.vae then names, set these buffers of its weights:',
            f'  "bn.running_mean": {_numbers(found.mean)},',
            f'  "bn.running_var": {_numbers(variance)}',
        ]
    if isinstance(vae, RepresentationVae):
        return [
            'In a local copy of the autoencoder (config.json and weights), add latents_std times the mean to '
            'latents_mean, then multiply latents_std by the deviation:',
            f'  "mean": {_numbers(found.mean)},',
            f'  "deviation": {_numbers(found.std)}',
        ]
    return [
        "In the autoencoder's config.json (of a repository: of a local copy, which model.vae then names), set",
        f'  "latents_mean": {_numbers(found.mean)},',
        f'  "latents_std": {_numbers(found.std)},',
        '  "scaling_factor": 1.0',
        'or one number for all channels, which every pipeline of diffusers can apply after an export:',
        f'  "scaling_factor": {1 / found.total_std:.5f}',
    ]


def _numbers(values: Tensor) -> str:
    return '[' + ', '.join(f'{value:.5f}' for value in values.tolist()) + ']'
