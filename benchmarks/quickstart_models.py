"""Benchmark of the quickstart's recipe against the quickstart's first model, that of commit 3c46e16.

    python benchmarks/quickstart_models.py [folder [KEY=VALUE ...]]

Trains benchmarks/first_quickstart.yaml and yamls/quickstart.yaml on the same 200 images, both at once, each in a
process with one thread. Prints a Markdown table with the ratios. Training seconds are CPU seconds of the process from
the start to the end of each batch, because other programs on a machine make wall time longer. The validation loss is
the mean squared error of v = sqrt(a) eps - sqrt(1 - a) x at the 8 noise levels of the quickstart's own validation loss,
on the 200 images, with the averaged weights. Retrieval and the error of the mean color are those of images generated
from all 200 captions. The folder keeps data and runs, and what is done is not done again. Keys and values change the
second recipe, to try another one.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from machine import heading
from timed_training import CpuBudget, Samples, draw, validation_loss

from diffusion.algorithms.ema import averaged_weights
from diffusion.config.load import load
from diffusion.data.caption_choice import captions_of
from diffusion.data.streams import BucketedDataset
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.training.components import build_loader
from diffusion.training.train import build_trainer, fit

ROOT = Path(__file__).parents[1]
RECIPES = {
    'first': ROOT / 'benchmarks' / 'first_quickstart.yaml',
    'today': ROOT / 'yamls' / 'quickstart.yaml',
}
NAMES = {'first': 'first model (3c46e16)', 'today': 'yamls/quickstart.yaml'}
# Neither side evaluates or draws while it trains.
OVERRIDES = ['trainer.eval_interval=1000000ba', 'callbacks=null']


def main(folder: str | None = None, *changes: str) -> None:
    """Run the benchmark and print its table."""
    with contextlib.ExitStack() as stack:
        home = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        prepare(home)
        words: dict[str, Sequence[str]] = {'first': [], 'today': changes}
        running = {name: start(name, home, words[name]) for name in RECIPES if not (home / f'{name}.json').exists()}
        for name, process in running.items():
            if process.wait():
                raise SystemExit(f'{name}: the run failed; see above')
        found = {name: json.loads((home / f'{name}.json').read_text()) for name in RECIPES}
    print(heading())
    print()
    print('| | batches | training, CPU seconds | validation loss | retrieval top-1 | error of the mean color |')
    print('|---|---|---|---|---|---|')
    for name, row in found.items():
        loss = f'{row["loss"]:.4f} | {row["retrieval"]:.3f} | {row["color_error"]:.4f}'
        print(f'| {NAMES[name]} | {row["batches"]} | {row["seconds"]:.0f} | {loss} |')
    ratios = [found['today'][key] / found['first'][key] for key in ('batches', 'seconds', 'loss', 'color_error')]
    print('| ratio | {:.2f} | {:.2f} | {:.2f} | | {:.2f} |'.format(*ratios))


def prepare(home: Path) -> None:
    """Render the 200 images and encode them into latents, as `make quickstart` does."""
    code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
    words = ['prepare', 'openmoji', '--out', 'data/openmoji', '--sizes', '64', '--limit', '200']
    encode = [str(ROOT / 'run.py'), str(RECIPES['today']), 'task=precompute']
    for output, command in (('data/openmoji', ['-c', code, *words]), ('data/openmoji-latents/openmoji', encode)):
        if not (home / output).exists():
            subprocess.run([sys.executable, *command], cwd=home, env=environment(), check=True, stdout=sys.stderr)


def start(name: str, home: Path, changes: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the training of a recipe in a process of its own."""
    command = [sys.executable, str(Path(__file__).absolute()), 'train', name, *changes]
    return subprocess.Popen(command, cwd=home, env=environment(), stdout=sys.stderr)


def environment() -> dict[str, str]:
    """Return the environment of a process with one thread, without GPU."""
    return os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}


def train(name: str, *changes: str) -> None:
    """Train a recipe with changed values in the working directory, and write its measures to NAME.json."""
    torch.set_num_threads(1)
    recipe = load(RECIPES[name], [*OVERRIDES, f'name={name}', *changes])
    trainer, counter = build_trainer(recipe), CpuBudget(float('inf'))
    trainer.state.callbacks.append(counter)
    fit(trainer)
    model = trainer.state.model
    assert isinstance(model, LatentDiffusion)
    samples = everything(build_loader(recipe, 'eval').dataset)
    with averaged_weights(trainer.state):
        loss, drawn = validation_loss(model, samples), draw(model, samples)
    row = {'batches': counter.batches, 'seconds': counter.spent, 'loss': loss, **asdict(drawn)}
    Path(f'{name}.json').write_text(json.dumps(row))
    trainer.close()


def everything(dataset: BucketedDataset) -> Samples:
    """Return all samples of a dataset of images."""
    items = [dataset[index] for index in range(int(dataset.size))]
    captions = [captions_of(dataset.get_item(index), dataset.where(index))[0] for index in range(int(dataset.size))]
    images, tokens = (torch.stack([item[key] for item in items]) for key in (batch_keys.IMAGE, batch_keys.INPUT_IDS))
    return Samples(captions, images, tokens)


if __name__ == '__main__':
    if sys.argv[1:2] == ['train']:
        train(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
