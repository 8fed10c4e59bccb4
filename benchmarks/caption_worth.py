"""Worth of captions: names against descriptions of the same images, on small models that train for equal CPU seconds.

    python benchmarks/caption_worth.py [seconds [seeds [folder]]]

The quickstart's MMDiT is trained on captioned OpenMoji images of 64 px (`ablation.py` explains model, seconds and
measures) with their names alone, with descriptions alone, or with each image once per caption. A description is the
name, another name if there is one, and the colors, shapes and positions of up to 4 regions of the rendered image,
which a script measures: "green circle: large green circle in the center". The installed packages have no groups and
tags of the emoji.

All models are measured on unseen combinations and unseen drawings (`openmoji_split.py`), with names and with
descriptions as captions. Descriptions need a longer text encoder, which makes a step slower; the first row has the
quickstart's short one, which names fit. The folder keeps the rendered images, descriptions and results, and what is
done is not done again. As many runs are made at once as this process has cores.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from ablation import (
    BATCH,
    DRAWN,
    MEASURED,
    MMDIT,
    QUICKSTART,
    SIDE,
    evenly,
    mean,
    optimizer,
    prepare,
    rows_named,
    samples_for,
)
from composer.algorithms import GradientClipping
from machine import heading
from openmoji_split import load_split
from timed_training import Samples, draw, train_for, validation_loss

from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.prepare.openmoji import Emoji

ndimage: Any = import_module('scipy.ndimage')  # scipy has no types; inferred ones are wrong
PALETTE = {
    **{'red': 'ea5a47', 'dark red': 'd22f27', 'orange': 'e27022', 'light orange': 'f4aa41', 'yellow': 'fcea2b'},
    **{'dark yellow': 'f1b31c', 'green': 'b1cc33', 'dark green': '5c9e31', 'light blue': '92d3f5', 'blue': '61b2e4'},
    **{'dark blue': '1e50a0', 'light purple': 'b399c8', 'purple': '8967aa', 'pink': 'ffa7c0', 'dark pink': 'e67a94'},
    **{'beige': 'fadcbc', 'tan': 'debb90', 'light brown': 'c19a65', 'brown': 'a57939', 'dark brown': '6a462f'},
    **{'white': 'ffffff', 'light gray': 'd0cfce', 'gray': '9b9b9a', 'dark gray': '3f3f3f', 'black': '000000'},
}
"""OpenMoji's colors."""
MAX_REGIONS = 4
MIN_AREA, LARGE_AREA = 0.01, 0.2
"""Fractions of the image: smaller regions are not described; larger ones are called large."""
MAX_TOKENS = 48
"""Tokens of the text encoder for descriptions; few descriptions are longer, and cut off."""
KINDS = ('names', 'descriptions')
HELD_OUT = {'combinations': 'unseen combinations', 'drawings': 'unseen drawings'}


class Row(NamedTuple):
    """Captions that a model is trained with, and the number of tokens that its text encoder reads."""

    key: str
    kinds: Sequence[str]
    max_length: int

    @property
    def name(self) -> str:
        return f'{" and ".join(self.kinds)}, {self.max_length} tokens'


ROWS = [
    Row('short-names', ['names'], MMDIT['max_length']),
    Row('names', ['names'], MAX_TOKENS),
    Row('descriptions', ['descriptions'], MAX_TOKENS),
    Row('both', KINDS, MAX_TOKENS),
]


def main(seconds_text: str = '120', seeds_text: str = '2', folder: str | None = None) -> None:
    """Make the runs that are missing, and print the table."""
    seconds, seeds = float(seconds_text), int(seeds_text)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(folder or temporary)
        prepare(home)
        write_descriptions(home)
        wanted = [(row, 17 + seed, seconds, home) for seed in range(seeds) for row in ROWS]
        # Spawned, since a process that has used PyTorch's threads cannot be forked safely.
        context = multiprocessing.get_context('spawn')
        with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
            results = list(pool.map(run, *zip(*wanted, strict=True)))
    print(f'{heading()}, PyTorch {torch.__version__}')
    print(f'{seconds:g} CPU seconds per run, batches of {BATCH}, seeds: {seeds}')
    columns = [f'{of}, {what}, {kind}' for of in HELD_OUT.values() for what in ('loss', 'retrieval') for kind in KINDS]
    print(f'\n| training captions | samples/s | batches | {" | ".join(columns)} |')
    print('|' + '---|' * (len(columns) + 3))
    for row in ROWS:
        runs = [found for (each, *_), found in zip(wanted, results, strict=True) if each is row]
        speed = [f'{mean([each[key] for each in runs]):.0f}' for key in ('samples_per_second', 'batches')]
        cells = [spread([each[column] for each in runs], 2 if 'retrieval' in column else 3) for column in columns]
        print(f'| {row.name} | {" | ".join(speed + cells)} |')


def run(row: Row, seed: int, seconds: float, home: Path) -> dict[str, float]:
    """Train a model with a row's captions, measure it on the held-out images with both kinds, and keep the result."""
    done = home / f'{row.key}-{seed}-{seconds:g}.json'
    if done.exists():
        return json.loads(done.read_text())
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = MMDIT | {'max_length': row.max_length}
    model = tiny_mmdit(SIDE, objective=QUICKSTART, seed=seed, **sizes)

    def samples(split: str, kind: str) -> Samples:
        stored = torch.load(home / f'{split}.pt', weights_only=True)
        if kind == 'descriptions':
            stored['captions'] = json.loads((home / f'{split}.json').read_text())
        return samples_for(model, **stored)

    given = joined([samples('train', kind) for kind in row.kinds])
    clipping = GradientClipping('norm', 1.0)
    adamw = optimizer(rows_named('mmdit')[0], model)
    budget = train_for(seconds, model, given, adamw, batch=BATCH, seed=seed, algorithms=[clipping])
    found = {'batches': budget.batches, 'samples_per_second': budget.batches * BATCH / budget.spent}
    for split, name in HELD_OUT.items():
        for kind in KINDS:
            held_out = samples(split, kind)
            found[f'{name}, loss, {kind}'] = validation_loss(model, evenly(held_out, MEASURED))
            found[f'{name}, retrieval, {kind}'] = draw(model, evenly(held_out, DRAWN), steps=20).retrieval
    print(row.key, seed, found, file=sys.stderr, flush=True)
    done.write_text(json.dumps(found))
    return found


def joined(parts: Sequence[Samples]) -> Samples:
    """Return the samples of several sets, on latents, one after another."""
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ('images', 'tokens', 'moments')
    }
    return Samples([caption for part in parts for caption in part.captions], **tensors)


def write_descriptions(home: Path) -> None:
    """Write the descriptions of each split's images, in their order, unless the folder has them."""
    for split, emojis in load_split().items():
        if not (home / f'{split}.json').exists():
            images = torch.load(home / f'{split}.pt', weights_only=True)['images'].permute(0, 2, 3, 1).numpy()
            texts = [describe(emoji, image) for emoji, image in zip(emojis, images, strict=True)]
            (home / f'{split}.json').write_text(json.dumps(texts))


def describe(emoji: Emoji, image: np.ndarray) -> str:
    """Return a description of an emoji: its names, and the largest regions of its image, uint8 [H, W, 3]."""
    return f'{", ".join(emoji.names[:2])}: {", ".join(regions(image)) or "black lines"}'


def regions(image: np.ndarray) -> list[str]:
    """Return color, shape and position of the regions of one color in an image on white, the largest first."""
    colors = np.array([list(bytes.fromhex(code)) for code in PALETTE.values()])
    nearest = ((image[:, :, None].astype(int) - colors) ** 2).sum(-1).argmin(-1)
    found = []
    for index in np.unique(nearest):
        labels, count = ndimage.label(nearest == index)
        for number in range(1, count + 1):
            region = labels == number
            # Outlines are two pixels wide, and so are the mixed colors at edges.
            if region.mean() < MIN_AREA or not ndimage.binary_erosion(region, iterations=2).any() or region[0, 0]:
                continue
            filled = ndimage.binary_fill_holes(region)
            found.append((filled.mean(), f'{list(PALETTE)[index]} {shape_and_position(filled)}'))
    found.sort(reverse=True)
    return [f'{"large " if area > LARGE_AREA else ""}{text}' for area, text in found[:MAX_REGIONS]]


def shape_and_position(region: np.ndarray) -> str:
    """Return words for a region, bool [H, W], by its bounding box: "circle at the top left"."""
    rows, columns = np.nonzero(region)
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    filled, ratio = region.sum() / (height * width), width / height
    if 0.85 < ratio < 1.18 and filled > 0.7:
        shape = 'square' if filled > 0.88 else 'circle'
    else:
        shape = f'{"wide " if ratio > 1.5 else "tall " if ratio < 0.67 else ""}{"bar" if filled > 0.88 else "shape"}'
    thirds = [
        int(3 * (low + extent / 2) / side)
        for low, extent, side in zip((rows.min(), columns.min()), (height, width), region.shape, strict=True)
    ]
    words = [('top', '', 'bottom')[thirds[0]], ('left', '', 'right')[thirds[1]]]
    return f'{shape} at the {" ".join(filter(None, words))}' if any(words) else f'{shape} in the center'


def spread(values: Sequence[float], digits: int) -> str:
    """Return the mean of some values and half of their range."""
    half = f' ± {(max(values) - min(values)) / 2:.{digits}f}' if len(values) > 1 else ''
    return f'{mean(values):.{digits}f}{half}'


if __name__ == '__main__':
    main(*sys.argv[1:])
