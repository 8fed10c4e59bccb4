"""Train for some batches with `run.py` on drawn images, and write the breakdown of the step's time as JSON.

    python benchmarks/gpu_check_training.py FOLDER JSON [--strategy NAME] [--gpus N] [--memory-gib N] [--help]

With GPUs, the model is Stable Diffusion 2 with random weights, with the recipes' speed settings, online encoders and
asynchronous checkpoints; else it is a tiny model. Imports no PyTorch itself.
"""

import argparse
import io
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from diffusion.config.load import load
from diffusion.config.recipe import ParallelismConfig
from diffusion.planning.memory import GIB, Setup, memory_of
from diffusion.planning.workload import phase_of
from diffusion.storage.mds import write_dataset

ROOT = Path(__file__).parents[1]
COLUMNS = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
TINY = {'side': 64, 'images': 32, 'per_device': 4, 'microbatch': 2, 'batches': 6, 'window': 2, 'save': 4}
MICROBATCHES = (32, 16, 8, 4)
FULL = {'side': 256, 'images': 2048, 'per_device': 128, 'microbatch': 32, 'batches': 40, 'window': 10, 'save': 25}
"""Side of the images in pixels, number of images, samples per device and per microbatch, batches, and the batches
between two reports of the breakdown and between two saves."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the training and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='folder of the images and the run')
    parser.add_argument('json', type=Path, help='file to write the figures to')
    parser.add_argument('--strategy', default='ddp', help='parallelism strategy (default: %(default)s)')
    parser.add_argument('--gpus', type=int, default=0, help='number of GPUs; 0 trains on the CPU (default)')
    parser.add_argument('--memory-gib', type=float, default=79.1, help="each GPU's memory (default: %(default)s)")
    args = parser.parse_args(argv)
    size = FULL | {'microbatch': fitting_microbatch(args.memory_gib)} if args.gpus else TINY
    images = args.folder / f'images-{size["side"]}px'
    if not (images / 'index.json').exists():
        write_dataset(images, draw_samples(size['images'], size['side']), COLUMNS)
    run = args.folder / 'runs' / args.strategy
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted check
    path = args.folder / f'{args.strategy}.yaml'
    recipe = make_recipe(args.folder, images, size, args.strategy, args.gpus)
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding='utf-8')
    command = [str(ROOT / 'run.py'), str(path)]
    # fsdp2 needs a process group, which the launcher's variables create, also for one process.
    launcher = ['-m', 'composer.cli.launcher', '-n', str(max(1, args.gpus))]
    alone = args.strategy == 'ddp' and args.gpus <= 1
    try:
        subprocess.run([sys.executable, *([] if alone else launcher), *command], cwd=ROOT, check=True)
        figures = read_figures(run / 'metrics.jsonl')
    except subprocess.CalledProcessError as error:
        sys.exit(f'the run ended with status {error.returncode}; its output is above')
    finally:
        shutil.rmtree(run, ignore_errors=True)  # its checkpoint has 10 GB
    args.json.write_text(json.dumps(figures | {'strategy': args.strategy, 'devices': max(1, args.gpus)}), 'utf-8')


def fitting_microbatch(memory_gib: float) -> int:
    """Return the largest of `MICROBATCHES` with which, by the planner, Stable Diffusion 2 fits; else the smallest."""
    # Use two GPUs, where ddp has buckets of gradients beside the gradients.
    overrides = [f'global_batch={2 * FULL["per_device"]}']
    phase = phase_of(load(ROOT / 'yamls' / 'phase1.yaml', overrides, allow_missing=True))
    for microbatch in MICROBATCHES:
        memory = memory_of(phase, Setup(2, microbatch, ParallelismConfig(strategy='ddp')))
        if memory.reserved <= memory_gib * GIB:
            return microbatch
    return MICROBATCHES[-1]


def draw_samples(count: int, side: int) -> Iterator[dict[str, Any]]:
    """Yield samples with JPEG images of smooth noise, about as large as photographs of the size."""
    random = np.random.default_rng(17)
    for index in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (side // 4, side // 4, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(buffer, 'JPEG', quality=90)
        captions = [f'image {index} of random colors']
        yield {'image': buffer.getvalue(), 'captions': captions, 'width': side, 'height': side, 'key': f'{index}'}


def make_recipe(folder: Path, images: Path, size: Mapping[str, int], strategy: str, gpus: int) -> dict[str, Any]:
    """Return the recipe of the run."""
    devices = max(1, gpus)
    model: dict[str, Any] = {'name': 'sd2', 'resolution': size['side'], 'pretrained': None}
    recipe: dict[str, Any] = {
        'name': strategy,
        'runs_dir': str(folder / 'runs'),
        'seed': 17,
        'global_batch': size['per_device'] * devices,
        'device_train_microbatch_size': size['microbatch'],
        'model': model if gpus else {'name': 'tiny', 'resolution': size['side'], 'block_out_channels': [32, 32]},
        'dataset': {'name': 'image_text'},
        'streams': {'drawn': {'local': str(images), 'resolution': size['side']}},
        'loader': {'num_workers': 8 if gpus else 0},
        'optimizer': {'name': 'adamw', 'lr': 1.0e-4, 'weight_decay': 0.01},
        'callbacks': {'breakdown': {'window': size['window'], 'skip': 2}, 'loss_guard': None},
        'loggers': {'metrics_file': None},
        'checkpointing': {'keep': {'last': 1}},
        'trainer': {
            'max_duration': f'{size["batches"]}ba',
            'save_interval': f'{size["save"]}ba',
            'progress_bar': False,
            'device': 'gpu' if gpus else 'cpu',
        },
    }
    if gpus:
        recipe['trainer']['precision'] = 'amp_bf16'
    if strategy != 'ddp':
        recipe['parallelism'] = {'strategy': strategy, 'reshard_after_forward': False}
    return recipe


def read_figures(path: Path) -> dict[str, Any]:
    """Return the medians over windows of the breakdown's metrics, the checkpoint's times, and the losses."""
    values: dict[str, list[float]] = {}
    for line in path.read_text(encoding='utf-8').splitlines():
        for name, value in json.loads(line).items():
            values.setdefault(name, []).append(value)
    groups = ('throughput/', 'time_share/', 'memory/', 'checkpoint/')
    medians = {name: statistics.median(each) for name, each in values.items() if name.startswith(groups)}
    if 'throughput/step_seconds' not in medians:
        raise SystemExit('the run logged no breakdown of its time')
    return {'metrics': medians, 'losses': values['loss/train/total']}


if __name__ == '__main__':
    main()
