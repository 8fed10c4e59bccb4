"""Benchmark of muP: training loss of a small PRX by width and learning rate, with and without muP.

    diffusion prepare openmoji --out data/openmoji-1000 --sizes 64 --limit 1000
    python benchmarks/width_transfer.py data/openmoji-1000/64px [WIDTHS [RATES [STEPS]]]

WIDTHS are separated by commas, and the first is the base width; RATES are exponents of 2. The model has 2 blocks with
heads of 32 channels and 16 image tokens; its text encoder is one table of embeddings, trained along. Every run sees the
same batches of 16 with the same noise and timesteps. The learning rate rises linearly for a tenth of the steps, then is
constant. The loss is the mean over the last quarter of the steps. A row ends with its best learning rate, and with the
quotient of its loss at the best rate of the base width, and its best loss.
"""

import math
import sys
import time
from typing import Any

import torch
from machine import heading
from torch import Tensor

from diffusion.config.load import load
from diffusion.models import batch_keys
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.training.components import build_loader, width_groups

Batch = dict[str, Tensor]
HEAD = 32
BATCH = 16
MODEL: dict[str, Any] = {'depth': 2, 'patch_size': 4, 'text_width': 32, 'text_layers': 0, 'max_length': 16}
WIDTHS = '64,128,256,512'
RATES = '-11,-10,-9,-8,-7,-6'
STEPS = 100


def build(width: int, base: int | None = None) -> LatentDiffusion:
    """Return the model of a width, by muP if a base width is given."""
    torch.manual_seed(17)
    return tiny_prx(hidden_size=width, num_heads=width // HEAD, mup_base_width=base, **MODEL)


def latents(folder: str) -> Batch:
    """Return one batch of all samples in a folder of shards, with latents instead of images."""
    keys = [f'streams.openmoji.local={folder}', 'dataset={name: image_text}', f'global_batch={BATCH}']
    recipe = load('benchmarks/first_quickstart.yaml', ['loader.shuffle=false', *keys])
    model = build(HEAD)
    parts = []
    with torch.no_grad():
        for batch in build_loader(recipe):
            moments = model.encode(batch.pop(batch_keys.IMAGE))
            parts.append({name: each for name, each in batch.items() if isinstance(each, Tensor)})
            parts[-1][batch_keys.LATENT_MOMENTS] = moments
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def final_loss(model: LatentDiffusion, data: Batch, *, lr: float, steps: int) -> float:
    """Train a model and return the mean loss of the last quarter of the steps; infinity if it is not finite."""
    groups = width_groups(model, optimizer='adamw', lr=lr, weight_decay=0.0, factors=model.learning_rate_factors)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-15, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (steps / 10)))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        chosen = torch.randint(len(data[batch_keys.INPUT_IDS]), (BATCH,), generator=generator)
        batch = {name: each[chosen] for name, each in data.items()}
        batch[batch_keys.EPOCH] = batch[batch_keys.BATCH_INDEX] = torch.full((BATCH,), step)
        loss = model.loss(model(batch), batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if not math.isfinite(losses[-1]):
            return math.inf
    last = losses[-max(1, steps // 4) :]
    return sum(last) / len(last)


def main(folder: str, widths: str = WIDTHS, rates: str = RATES, steps: str = str(STEPS)) -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)
    sizes, exponents = ([int(word) for word in text.split(',')] for text in (widths, rates))
    started, data = time.process_time(), latents(folder)
    print(
        f'{heading()}, PyTorch {torch.__version__}, one thread; {len(data[batch_keys.INPUT_IDS])} images, {steps} steps'
    )
    print()
    columns = ' | '.join(f'2^{each}' for each in exponents)
    print(f"| width | | {columns} | best | loss at the base width's best / best loss |")
    print('|---' * (len(exponents) + 4) + '|')
    lowest_at_base: dict[str, int] = {}
    for width in sizes:
        for name in ('one rate for all layers', 'muP'):
            if width == sizes[0] and name == 'muP':
                lowest_at_base[name] = lowest_at_base['one rate for all layers']  # the same model
                continue
            base = sizes[0] if name == 'muP' else None
            losses = [final_loss(build(width, base), data, lr=2.0**each, steps=int(steps)) for each in exponents]
            lowest = losses.index(min(losses))
            ratio = losses[lowest_at_base.setdefault(name, lowest)] / losses[lowest]
            cells = [f'**{each:.3f}**' if each == min(losses) else f'{each:.3f}' for each in losses]
            print(f'| {width} | {name} | {" | ".join(cells)} | 2^{exponents[lowest]} | {ratio:.3f} |', flush=True)
    print(f'\n{(time.process_time() - started) / 60:.1f} minutes of processor time')


if __name__ == '__main__':
    main(*sys.argv[1:])
