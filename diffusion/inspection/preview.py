"""`diffusion data look`: a sheet of what the model sees, after crops, flips and the choice of captions."""

import base64
import html
import inspect
import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.load import Component, Recipe
from diffusion.config.recipe import StreamConfig
from diffusion.data.streams import BucketedDataset
from diffusion.errors import UserError
from diffusion.inspection.stream_selection import select
from diffusion.models import batch_keys
from diffusion.models.builders import TINY_VAE
from diffusion.models.pretrained import decode_latents, load_pretrained
from diffusion.storage.atomic import write_whole
from diffusion.training.components import build_dataset, deterministic

SIDE = 176
"""Of a square picture on a sheet, in pixels; others have its area."""
WIDTH = 1500
"""Of a sheet."""
MARGIN, LINE = 8, 13
CAPTION_LINES = 3
GREY = (110, 110, 110)


@dataclass(frozen=True)
class Seen:
    """A sample as the model sees it."""

    image: Image.Image
    caption: str
    """Made of its tokens: what did not fit is not there."""


@dataclass(frozen=True)
class PreviewRow:
    """Samples of one bucket."""

    title: str
    shape: Shape
    samples: list[Seen]


def look(
    recipe: Recipe, names: Sequence[str], out: Path, *, samples: int = 8, seed: int = 0, decode: bool = False
) -> None:
    """Draw samples of every bucket of a recipe's streams.

    Args:
        recipe: Of training, evaluation and precomputing.
        names: Streams; none for all.
        out: A PNG or HTML file.
        samples: Of each bucket, drawn at random.
        seed: Of which samples these are; crops, flips and captions are those of the first epoch of a run.
        decode: Latents by the model's VAE, even if it has to be downloaded; otherwise only one in a local folder is
            used, and else the first three channels are drawn.

    Raises:
        UserError: The file is of another kind, its folder cannot be written to, or a stream is not there.
    """
    _check_out(out)
    chosen = select(recipe, names)
    rows = [row for section in chosen for row in _rows(recipe, section, chosen[section], samples, seed, decode)]
    content = preview_page(rows).encode('utf-8') if out.suffix == '.html' else png(sheet(rows))
    write_whole(out, content)
    print(f'{out}: {sum(len(row.samples) for row in rows)} samples of {len(rows)} buckets')


def _check_out(out: Path) -> None:
    if out.suffix not in ('.png', '.html'):
        raise UserError(f'--out: {out} ends in {out.suffix or "nothing"!r}; use .png or .html')
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f'--out: {out.parent} is no folder that can be written to; make it, or choose another')


def _rows(
    recipe: Recipe, section: str, streams: Mapping[str, StreamConfig], samples: int, seed: int, decode: bool
) -> Iterator[PreviewRow]:
    dataset: BucketedDataset = build_dataset(
        recipe, streams=streams, component=_component(recipe, section), batch_size=1, shuffle=False
    )
    painter = _Painter(recipe, dataset, decode)
    begin = 0
    for bucket, count in zip(dataset.buckets, dataset.samples_per_stream.tolist(), strict=True):
        chosen = np.random.default_rng(seed).choice(count, min(samples, count), replace=False)
        items = [dataset[begin + int(index)] for index in sorted(chosen)]
        begin += count
        title = f'{section}.{bucket.name}   {bucket.shape} px, {count} samples'
        yield PreviewRow(title, bucket.shape, [painter.seen(item) for item in items])


def _component(recipe: Recipe, section: str) -> Component:
    """How samples are made of a section's streams."""
    if section == 'streams':
        return recipe.dataset
    if section == 'eval_streams':
        return recipe.eval_dataset or deterministic(recipe.dataset)
    crop = {'crop': recipe.precompute.crop, 'min_crop_scale': recipe.precompute.min_crop_scale}
    return Component('image_text', {**crop, 'caption_choice': 'first'})


class _Painter:
    """Draws what a dataset serves."""

    def __init__(self, recipe: Recipe, dataset: Any, decode: bool) -> None:
        self.tokenizers: list[PreTrainedTokenizerBase] = getattr(dataset, 'tokenizers', [])
        manifests = getattr(dataset, 'manifests', None)
        self.channels = len(manifests[0].latent_mean) if manifests else 0
        if manifests:
            self.mean, self.std = (
                torch.tensor(values).view(-1, 1, 1) for values in (manifests[0].latent_mean, manifests[0].latent_std)
            )
        self.vae = _vae(recipe, anywhere=decode) if manifests else None

    def seen(self, item: Mapping[str, Any]) -> Seen:
        pixels = (
            item[batch_keys.IMAGE] if batch_keys.IMAGE in item else self._of_latents(item[batch_keys.LATENT_MOMENTS])
        )
        return Seen(Image.fromarray(pixels.permute(1, 2, 0).numpy()), self._caption(item))

    @torch.no_grad()
    def _of_latents(self, moments: Tensor) -> Tensor:
        """The mean of the posterior, decoded, or its first three channels."""
        mean = moments[: self.channels].float()
        if self.vae is not None:
            pixels = decode_latents(self.vae, mean[None])[0] / 2 + 0.5
        else:
            standard = ((mean - self.mean) / self.std)[:3]
            pixels = (standard / 6 + 0.5).expand(3, -1, -1)
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)

    def _caption(self, item: Mapping[str, Any]) -> str:
        if batch_keys.INPUT_IDS not in item or not self.tokenizers:
            return ''
        ids = item[batch_keys.INPUT_IDS][0].tolist()
        end: Any = self.tokenizers[0].eos_token_id
        return self.tokenizers[0].decode(ids[1 : ids.index(end)] if end in ids else ids[1:]).strip()


def _vae(recipe: Recipe, *, anywhere: bool) -> Any:
    """The model's VAE, if it is in a local folder or may be anywhere."""
    parameters = inspect.signature(registry.resolve('model', recipe.model.name)).parameters
    values = {name: parameter.default for name, parameter in parameters.items()} | recipe.model.kwargs
    own = str(TINY_VAE) if recipe.model.name == 'tiny' else None
    for source in (values.get('vae') or own, values.get('pretrained')):
        if isinstance(source, str) and (anywhere or Path(source).is_dir()):
            subfolder = '' if Path(source, 'config.json').is_file() else 'vae'
            return load_pretrained(AutoencoderKL, source, subfolder=subfolder, revision=values.get('revision')).eval()
    if anywhere:
        raise UserError(f'--decode: model.name={recipe.model.name} names no VAE; give model.vae')
    return None


def size_on_sheet(shape: Shape) -> tuple[int, int]:
    """Width and height of a bucket's pictures on a sheet: their own aspect, one area."""
    width = min(WIDTH - 2 * MARGIN, round(SIDE * math.sqrt(shape.aspect)))
    return width, max(1, round(width / shape.aspect))


def sheet(rows: Sequence[PreviewRow]) -> Image.Image:
    """The samples of each bucket under its title, with their captions, as one picture."""
    font, bold = ImageFont.load_default(size=11), ImageFont.load_default(size=15)
    strips = [_strip(row, font, bold) for row in rows]
    whole = Image.new('RGB', (WIDTH, sum(strip.height for strip in strips) + MARGIN), 'white')
    top = 0
    for strip in strips:
        whole.paste(strip, (0, top))
        top += strip.height
    return whole


def _strip(row: PreviewRow, font: Any, bold: Any) -> Image.Image:
    width, height = size_on_sheet(row.shape)
    columns = max(1, (WIDTH - MARGIN) // (width + MARGIN))
    cell = height + CAPTION_LINES * LINE + MARGIN
    title = 2 * LINE + MARGIN
    strip = Image.new('RGB', (WIDTH, title + -(-len(row.samples) // columns) * cell), 'white')
    draw = ImageDraw.Draw(strip)
    draw.text((MARGIN, MARGIN), row.title, fill='black', font=bold)
    for number, sample in enumerate(row.samples):
        left, top = MARGIN + number % columns * (width + MARGIN), title + number // columns * cell
        smooth = sample.image.width > width
        method = Image.Resampling.LANCZOS if smooth else Image.Resampling.NEAREST
        strip.paste(sample.image.resize((width, height), method), (left, top))
        draw.rectangle((left - 1, top - 1, left + width, top + height), outline=(220, 220, 220))
        for line, text in enumerate(wrapped(sample.caption, width, font)):
            draw.text((left, top + height + 2 + line * LINE), text, fill=GREY, font=font)
    return strip


def wrapped(text: str, width: int, font: Any) -> list[str]:
    """The first lines of a text, none wider than so many pixels; three dots where there is more."""
    lines, words = [''], text.split()
    while words:
        joined = f'{lines[-1]} {words[0]}'.strip()
        if font.getlength(joined) <= width or not lines[-1]:
            lines[-1] = joined
            words.pop(0)
        elif len(lines) == CAPTION_LINES:
            break
        else:
            lines.append('')
    if words:
        lines[-1] += ' ...'
    return [_cut(line, width, font) for line in lines]


def _cut(line: str, width: int, font: Any) -> str:
    if font.getlength(line) <= width:
        return line
    stem = line.removesuffix(' ...')
    while stem and font.getlength(f'{stem} ...') > width:
        stem = stem[:-1]
    return f'{stem.rstrip()} ...'


def preview_page(rows: Sequence[PreviewRow]) -> str:
    """The same as HTML in one file, pictures at their own size, captions in full."""
    blocks = []
    for row in rows:
        figures = ''.join(
            f'<figure><img src="data:image/png;base64,{base64.b64encode(png(sample.image)).decode()}" '
            f'width="{size_on_sheet(row.shape)[0]}"><figcaption>{html.escape(sample.caption)}</figcaption></figure>'
            for sample in row.samples
        )
        blocks.append(f'<h2>{html.escape(row.title)}</h2><div>{figures}</div>')
    style = (
        'body{font:14px sans-serif;margin:16px}h2{font-size:16px}div{display:flex;flex-wrap:wrap;gap:12px}'
        'figure{margin:0}figcaption{color:#555;font-size:12px;width:0;min-width:100%}img{border:1px solid #ddd}'
    )
    head = f'<meta charset="utf-8"><title>diffusion data look</title><style>{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(blocks)}</body></html>\n'


def png(image: Image.Image) -> bytes:
    """A picture as a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, 'PNG')
    return buffer.getvalue()
