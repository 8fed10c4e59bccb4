"""Diffusion-DPO on the quickstart's model: does a preferred property rise, and does the model keep its images?

    python benchmarks/dpo.py [FOLDER [BATCHES [PAIRED_BATCHES]]]

The quickstart's model is trained for BATCHES batches. It draws 3 images of each of its 200 captions. The reddest image
of a caption is preferred over the least red one: the rule is the mean of R - (G + B) / 2. Diffusion-DPO then trains on
these pairs for PAIRED_BATCHES batches, with two seeds of data order and noise. Redness is measured on a new image of
each caption, with the same seed before and after; the interval is that of the mean change. Retrieval is
the fraction of 100 captions whose generated image is nearest to the caption's own drawing. FOLDER keeps everything, and
a second start continues.
"""

import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import heading

from diffusion import cli
from diffusion.config.load import load
from diffusion.data.image_sheet import to_images
from diffusion.tasks.evaluate import evaluate, trained_model
from diffusion.training.train import train

ROOT = Path(__file__).parents[1]
SEEDS = (17, 18)
DRAWN, MEASURED = 3, 1
"""Images per caption for pairs, and for the measurement."""
FIRST_MEASURED = 10_000
SAMPLING = {'noise_scheduler': 'euler', 'guidance_scale': 3.0, 'num_inference_steps': 15}


def redness(images: torch.Tensor) -> torch.Tensor:
    """Return the mean of R - (G + B) / 2 of each image, [B], for images [B, 3, H, W] from 0 to 1."""
    red, green, blue = images.mean(dim=(2, 3)).unbind(1)
    return red - (green + blue) / 2


def draw(model: Any, captions: list[str], count: int, first: int) -> torch.Tensor:
    """Return `count` images of each caption, [captions, count, 3, H, W]."""
    prompts = [caption for caption in captions for _ in range(count)]
    parts = [
        model.generate(prompts[start : start + 50], seeds=range(first + start, first + start + 50), **SAMPLING)
        for start in range(0, len(prompts), 50)
    ]
    return torch.cat(parts).unflatten(0, (len(captions), count))


def measure(recipe: Path, captions: list[str], *words: str) -> tuple[torch.Tensor, float]:
    """Return the mean redness of each caption's images, and the retrieval score, of a run's newest checkpoint."""
    model, _, _ = trained_model(load(recipe, [*words, 'task=generate']))
    model.eval()
    scores = redness(draw(model, captions, MEASURED, FIRST_MEASURED).flatten(0, 1)).view(len(captions), MEASURED)
    found = evaluate(load(recipe, [*words, 'task=evaluate', 'eval_dataset={name: image_text}']))
    return scores.mean(dim=1), found['retrieval_top1']


def write_pairs(model: Any, captions: list[str], folder: Path) -> None:
    (folder / 'drawn').mkdir(exist_ok=True)
    images = draw(model, captions, DRAWN, 0)
    lines = []
    for number, (caption, own) in enumerate(zip(captions, images, strict=True)):
        scores, files = redness(own), [folder / 'drawn' / f'{number}-{index}.png' for index in range(DRAWN)]
        for image, file in zip(to_images(own), files, strict=True):
            image.save(file)
        best, worst = (files[int(each)] for each in (scores.argmax(), scores.argmin()))
        lines.append({'prompt': caption, 'image': str(best), 'rejected_image': str(worst), 'source': 'redness'})
    (folder / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    assert cli.main(['data', 'pairs', str(folder / 'pairs.jsonl'), '--out', str(folder / 'pairs')]) == 0


def main(folder: Path, batches: int, paired: int) -> None:
    data, runs = folder / 'openmoji', folder / 'runs'
    if not data.exists():
        words = ['openmoji', '--out', str(data), '--sizes', '64', '--limit', '200']
        assert cli.main(['prepare', *words]) == 0
    captions = (data / 'captions.txt').read_text().split('\n')[:200]
    streams = f'{{openmoji: {{local: {data / "64px"}, resolution: 64}}}}'
    common = [f'runs_dir={runs}', f'streams={streams}', f'eval_streams={streams}', 'dataset={name: image_text}']
    common += ['callbacks.image_grid=false', 'trainer.progress_bar=false', 'algorithms.ema=false']
    recipe = ROOT / 'yamls' / 'quickstart.yaml'
    times = [f'trainer.{key}={batches}ba' for key in ('max_duration', 'eval_interval', 'save_interval')]
    base = [*common, *times, 'name=base']
    train(load(recipe, base)).close()
    before, retrieval = measure(recipe, captions, *base)
    if not (folder / 'pairs').exists():
        write_pairs(trained_model(load(recipe, [*base, 'task=generate']))[0].eval(), captions, folder)
    print(heading())
    print(f'| seed | redness before | after {paired} batches | change, 95% interval | captions that rise | retrieval |')
    print('|---|---|---|---|---|---|')
    for seed in SEEDS:
        own = [*common, f'name=dpo-{seed}', f'seed={seed}', f'init_from={runs / "base" / f"ba{batches}"}']
        own += [
            f'streams.pairs={{local: {folder / "pairs"}, resolution: 64}}',
            'streams.openmoji=false',
            'optimizer.lr=1.0e-4',
        ]
        own += ['dataset={name: preference_pairs}', 'algorithms.diffusion_dpo={beta: 500.0}', 'scheduler.t_warmup=10ba']
        own += [f'trainer.{key}={paired}ba' for key in ('max_duration', 'eval_interval', 'save_interval')]
        train(load(recipe, own)).close()
        after, kept = measure(recipe, captions, *own)
        change = (after - before).tolist()
        mean, half = statistics.mean(change), 1.96 * statistics.stdev(change) / math.sqrt(len(change))
        rise = sum(each > 0 for each in change) / len(change)
        row = f'{before.mean():.4f} | {after.mean():.4f} | {mean:+.4f} ± {half:.4f} | {rise:.0%}'
        print(f'| {seed} | {row} | {retrieval:.2f} -> {kept:.2f} |', flush=True)


if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as scratch:
        place, batches, paired = [*sys.argv[1:], *(scratch, '1600', '30')[len(sys.argv) - 1 :]]
        main(Path(place).resolve(), int(batches), int(paired))
