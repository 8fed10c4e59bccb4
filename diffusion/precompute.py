"""`task: precompute`: the VAE's posterior of every picture of a dataset, into MDS shards with a manifest.

Each of `precompute.streams` becomes a folder of the same name under `precompute.out`. Pictures are centre-cropped; what
is stored is what the VAE's encoder says, unscaled, so that the same latents serve any normalisation and posterior
sampling stays random; nothing of caption dropout is in it.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist, get_device
from streaming import MDSWriter
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

from diffusion import building
from diffusion.config import Component, Recipe
from diffusion.data import keys
from diffusion.data.captions import captions_of
from diffusion.data.image_text import ImageTextDataset
from diffusion.data.latents import manifest_of
from diffusion.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)


def precompute(recipe: Recipe) -> None:
    """Encode every stream of a recipe.

    Raises:
        ValueError: The recipe asks for more than one device, its model has no VAE, or the latents are there already.
    """
    if dist.get_world_size() != 1:
        raise ValueError(f'task: precompute runs on one device for now, not on {dist.get_world_size()}')
    model = building.build_model(recipe)
    if not isinstance(model, LatentDiffusion):
        raise ValueError(f'model.name: {recipe.model.name} has no frozen VAE; latents need a latent diffusion model')
    out = Path(recipe.precompute.out)
    done = [name for name in recipe.precompute.streams if (out / name).exists()]
    if done:
        raise ValueError(f'precompute.out: {out / done[0]} exists; remove it or give another folder')
    device = get_device(recipe.trainer.get('device'))
    model = device.module_to_device(model)
    for name in recipe.precompute.streams:
        unfinished = out / f'.{name}.unfinished-{os.getpid()}'
        try:
            _encode_stream(recipe, name, model, unfinished)
            os.replace(unfinished, out / name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _encode_stream(recipe: Recipe, name: str, model: LatentDiffusion, folder: Path) -> None:
    settings = recipe.precompute
    stream = settings.streams[name]
    dataset: ImageTextDataset = building.build_dataset(
        recipe,
        streams={name: stream},
        component=Component('image_text', {'crop': 'center', 'caption_choice': 'first'}),
        batch_size=settings.batch_size,
        shuffle=False,
    )
    count = int(dataset.size)
    columns = {'captions': 'json', 'key': 'str', keys.LATENT_MOMENTS: _encoding(model, stream.resolution, settings)}
    writer = MDSWriter(out=str(folder), columns=columns, hashes=['sha1'], size_limit='256mb')
    # A plain DataLoader over indices: order is that of the dataset, and nothing is padded or dropped.
    loader = DataLoader(Subset(dataset, range(count)), batch_size=settings.batch_size, num_workers=0)
    for batch in tqdm(loader, desc=f'latents {name}', unit='batch', disable=None):
        moments = model.encode(batch[keys.IMAGE].to(model.device))
        if settings.posterior == 'mean':
            moments = moments[:, : model.vae.config['latent_channels']]
        for index, sample in zip(batch[keys.SAMPLE_ID].tolist(), moments.cpu(), strict=True):
            writer.write(_row(dataset, index, sample, settings.dtype))
    writer.finish()
    manifest = manifest_of(
        model.vae, shape=f'{stream.resolution}x{stream.resolution}', posterior=settings.posterior, dtype=settings.dtype
    )
    manifest.write(folder)
    log.info('streams.%s: %d pictures of %d px encoded', name, count, stream.resolution)


def _row(dataset: ImageTextDataset, index: int, moments: torch.Tensor, dtype: str) -> dict[str, Any]:
    sample = dataset.get_item(index)
    array = moments.numpy().astype(dtype)
    if not torch.isfinite(torch.from_numpy(array)).all():
        raise ValueError(f'{dataset.where(index)}: its latents are not finite in {dtype}; use precompute.dtype=float32')
    captions = captions_of(sample, dataset.where(index))
    return {'captions': captions, 'key': str(sample.get('key', index)), keys.LATENT_MOMENTS: array}


def _encoding(model: LatentDiffusion, resolution: int, settings: Any) -> str:
    channels = model.vae.config['latent_channels'] * (1 if settings.posterior == 'mean' else 2)
    _, height, width = model._latent_shape((resolution, resolution))
    return f'ndarray:{settings.dtype}:{channels},{height},{width}'
