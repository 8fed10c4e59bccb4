"""`diffusion data look`: draw samples as the model sees them, with crops, flips and caption choice applied."""

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from diffusion.config import registry
from diffusion.config.load import Component, Recipe
from diffusion.config.model_checks import PIXELS
from diffusion.config.recipe import StreamConfig
from diffusion.data.caption_choice import CAPTION_COLUMNS
from diffusion.data.image_sheet import Figure, Section, draw_sheet, html_figures, html_page, png_bytes
from diffusion.data.latents import LatentManifest, LatentsDataset
from diffusion.data.streams import BucketedDataset
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.pretrained import TINY_VAE, load_vae
from diffusion.models.vae import Vae, decode_latents, repeated
from diffusion.storage.atomic import write_atomically
from diffusion.training.components import build_dataset, evaluation_dataset

SIDE = 176
"""Side in pixels at which a square image is drawn; other shapes are drawn with the same area."""


def look(
    recipe: Recipe,
    chosen: Mapping[str, Mapping[str, StreamConfig]],
    out: Path,
    *,
    samples: int = 8,
    seed: int = 0,
    decode: bool = False,
) -> None:
    """Draw samples from a recipe's streams, grouped by image shape, into one PNG or HTML file.

    Args:
        samples: Number of random samples per bucket.
        seed: Seed for choosing samples; crops, flips and captions are those of a run's first epoch.
        decode: Decode latents even if the model's VAE must be downloaded. If not set, latents are decoded only with a
            local VAE; without one, the first three latent channels are drawn.
    """
    sections = [each for name in chosen for each in _sections(recipe, name, chosen[name], samples, seed, decode)]
    if out.suffix == '.html':
        parts = [f'<h2>{html.escape(each.title)}</h2>{html_figures(each.figures, side=SIDE)}' for each in sections]
        content = html_page('diffusion data look', '\n'.join(parts)).encode()
    else:
        content = png_bytes(draw_sheet(sections, side=SIDE))
    write_atomically(out, content)
    print(f'{out}: {sum(len(section.figures) for section in sections)} samples of {len(sections)} buckets')


def _sections(
    recipe: Recipe, section: str, streams: Mapping[str, StreamConfig], samples: int, seed: int, decode: bool
) -> Iterator[Section]:
    """Yield the drawn samples of each bucket of the streams under one recipe key, such as `eval_streams`."""
    dataset: BucketedDataset = build_dataset(
        recipe, streams=streams, component=_component(recipe, section), batch_size=1, shuffle=False
    )
    manifest = dataset.manifests[0] if isinstance(dataset, LatentsDataset) else None
    vae = None if manifest is None else _vae(recipe.model, download=decode)
    tokenizers = getattr(dataset, 'tokenizers', [])
    begin = 0
    for bucket, count in zip(dataset.buckets, dataset.samples_per_stream.tolist(), strict=True):
        chosen = np.random.default_rng(seed).choice(count, min(samples, count), replace=False)
        ids = [begin + int(index) for index in sorted(chosen)]
        items = [dataset[index] for index in ids]
        begin += count
        title = f'{section}.{bucket.name}   {bucket.shape} px, {count} samples'
        texts = [
            _caption(item, tokenizers) + _table_captions(dataset, index) for index, item in zip(ids, items, strict=True)
        ]
        images = [[_image(item, manifest, vae)] for item in items]
        yield Section(title, [Figure(image, text) for image, text in zip(images, texts, strict=True)])


def _component(recipe: Recipe, section: str) -> Component:
    if section == 'streams':
        return recipe.dataset
    if section == 'eval_streams':
        return evaluation_dataset(recipe)
    crop = {'crop': recipe.precompute.crop, 'min_crop_scale': recipe.precompute.min_crop_scale}
    return Component('image_text', {**crop, 'caption_choice': 'first'})


def _image(item: Mapping[str, Any], manifest: LatentManifest | None, vae: Vae | None) -> Image.Image:
    """Return a sample's image or, for a sample of latents, an image of the posterior's mean."""
    pixels = item[batch_keys.IMAGE] if manifest is None else _pixels(item[batch_keys.LATENT_MOMENTS], manifest, vae)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@torch.no_grad()
def _pixels(moments: Tensor, manifest: LatentManifest, vae: Vae | None) -> Tensor:
    """Return the mean of a posterior as uint8 pixels [3, H, W]: decoded or, if `vae` is None, three latent channels."""
    latent_mean, latent_std = (torch.tensor(values) for values in (manifest.latent_mean, manifest.latent_std))
    mean = moments[: len(latent_mean)].float()
    if vae is not None:
        pixels = decode_latents(vae, mean[None])[0] / 2 + 0.5
    else:
        # The color range covers three standard deviations on each side of the channel's mean.
        shape = len(latent_mean), *(latent_mean.shape[1:] or (1, 1))
        center, scale = (repeated(each.view(shape), mean[None]) for each in (latent_mean, latent_std))
        standard = ((mean - center) / scale)[:3]
        pixels = (standard / 6 + 0.5).expand(3, -1, -1)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _caption(item: Mapping[str, Any], tokenizers: Sequence[PreTrainedTokenizerBase]) -> str:
    """Return a sample's caption, decoded from its tokens to show where they were truncated; empty without tokens."""
    if batch_keys.INPUT_IDS not in item or not tokenizers:
        return ''
    ids = item[batch_keys.INPUT_IDS][0].tolist()
    tokenizer: Any = tokenizers[0]
    end = tokenizer.eos_token_id
    return tokenizer.decode(ids[1 : ids.index(end)] if end in ids else ids[1:]).strip()


def _table_captions(dataset: BucketedDataset, index: int) -> str:
    """Return all captions of a sample, each on a line after its column; empty if none is from `diffusion caption`."""
    stored = dataset.get_item(index)
    sample = dataset.with_table_captions(stored, index)
    if sample is stored:
        return ''
    columns = zip(sample[CAPTION_COLUMNS], sample['captions'], strict=True)
    return ''.join(f'\n{column}: {caption}' for column, caption in columns)


def _vae(model: Component, *, download: bool) -> Vae | None:
    """Return the model's VAE, downloaded if needed; UserError if it has none.

    If `download` is False, return None unless the model has a VAE that is local.
    """
    values = registry.keywords('model', model)
    own_tiny = registry.is_own('model', model.name) and model.name.startswith('tiny')
    bundled = str(TINY_VAE) if own_tiny else None
    sources = [
        (values.get('vae') or bundled, values.get('vae_revision')),
        (values.get('pretrained'), values.get('revision')),
    ]
    for source, revision in sources:
        if isinstance(source, str) and (download or source == PIXELS or Path(source).is_dir()):
            return load_vae(source, revision=revision, layout=values.get('vae_layout', 'channels')).eval()
    if download:
        raise UserError(f'--decode: the model {model.name} has no VAE; set model.vae')
    return None
