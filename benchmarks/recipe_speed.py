"""Speed of whole recipes on this machine's GPUs, with random weights and drawn images instead of published ones.

    python benchmarks/recipe_speed.py RECIPE ... [--share-of N] [--batches N] [--folder FOLDER] [--json FILE] [--help]
                                      [KEY=VALUE ...]

Each recipe is trained by `run.py` for some batches: with its loader, online encoders, losses of other networks,
algorithms, compilation, optimizer and checkpoints. Each GPU has the batch that it has on N GPUs, so what is missing is
the exchange of gradients between that many GPUs. Further arguments change the recipes, such as speed.compile=false. No
network is used: weights that the recipe would download are random ones of the same sizes, and a caption has as many
tokens as the recipe pads it to. Prints a row per recipe; `diffusion plan RECIPE --from-run FOLDER/runs/RECIPE` plans
with its throughput.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from gpu_check_training import COLUMNS, ROOT, draw_samples
from machine import heading
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torchvision.models import vgg16
from transformers import Dinov2Config, Dinov2Model
from transformers.models.t5gemma.configuration_t5gemma import T5GemmaConfig
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from diffusion.compatibility.transformers_versions import fast_tokenizer
from diffusion.config.load import load
from diffusion.config.recipe import Recipe
from diffusion.errors import UserError
from diffusion.models.families.prx import builder as prx_builder
from diffusion.storage.mds import write_dataset

IMAGES = 1024
"""Number of images that are drawn for each resolution."""
WINDOW = 10
"""Batches per window, of which the breakdown of the time is logged."""
METRICS = {
    'ms per step': ('throughput/step_seconds', 1000.0),
    'images/s per GPU': ('throughput/device/samples_per_sec', 1.0),
    'MFU, %': ('throughput/device/mfu', 100.0),
    'peak, GiB': ('memory/peak_gib', 1.0),
    'stall of the first save, s': ('first save/stall_seconds', 1.0),
    'of the second, s': ('second save/stall_seconds', 1.0),
    'first save, s': ('first save/save_seconds', 1.0),
}
"""Metric and factor of each column."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train the recipes and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('arguments', nargs='+', metavar='RECIPE or KEY=VALUE', help='recipes, and changes of them')
    parser.add_argument('--share-of', type=int, default=32, help='number of GPUs of the real run (default: 32)')
    parser.add_argument('--batches', type=int, default=90, help='batches to train (default: %(default)s)')
    parser.add_argument('--folder', type=Path, default=Path('recipe-speed'), help='default: %(default)s')
    parser.add_argument('--json', type=Path, help='file for all figures')
    args = parser.parse_intermixed_args(argv)
    changes = [each for each in args.arguments if '=' in each]
    print(heading(), gpu_name(), f'PyTorch {torch.__version__}', sep=', ', flush=True)
    found = {}
    for path in (Path(each).absolute() for each in args.arguments if '=' not in each):
        began = time.monotonic()
        found[path.stem] = train(path, args.folder.absolute(), changes, share_of=args.share_of, batches=args.batches)
        found[path.stem]['seconds'] = time.monotonic() - began
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1), 'utf-8')
    print_table(found)


def gpu_name() -> str:
    """Return number and name of the GPUs."""
    count = torch.cuda.device_count()
    return f'{count} {torch.cuda.get_device_name()}' if count else 'no GPU'


def train(path: Path, folder: Path, changes: Sequence[str], *, share_of: int, batches: int) -> dict[str, Any]:
    """Train a recipe for some batches, and return medians of its metrics and the stages' shares of the time."""
    recipe, devices = load(path, changes, allow_missing=True), max(1, torch.cuda.device_count())
    overrides = [*changes, *offline(recipe, folder)]
    per_device, microbatch = recipe.global_batch // share_of, recipe.device_train_microbatch_size
    overrides += [
        f'global_batch={per_device * devices}',
        f'device_train_microbatch_size={min(per_device, microbatch) if isinstance(microbatch, int) else per_device}',
        f'runs_dir={folder / "runs"}',
        'trainer.progress_bar=false',
        f'trainer.max_duration={batches}ba',
        f'trainer.save_interval={batches // 3}ba',
        'trainer.eval_interval=0',
        f'callbacks.breakdown={{window: {min(WINDOW, batches // 3)}}}',
        'checkpointing.keep={last: 1}',
    ]
    run = folder / 'runs' / recipe.name
    shutil.rmtree(run, ignore_errors=True)
    # Strategies such as fsdp2 need a process group, which the launcher's variables create, also for one process.
    launcher = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(devices)]
    ended = subprocess.run([*launcher, str(ROOT / 'run.py'), str(path), *overrides], cwd=ROOT)
    if ended.returncode:
        sys.exit(f'{path}: the run ended with status {ended.returncode}; its output is above')
    return read_metrics(run)


def offline(recipe: Recipe, folder: Path) -> list[str]:
    """Return changes that give a recipe drawn images and random weights, which are written into an absolute folder."""
    changes: list[str] = []
    for section, streams in (('streams', recipe.streams), ('eval_streams', recipe.eval_streams)):
        for name, stream in streams.items():
            images = folder / f'images-{stream.resolution}px'
            if not (images / 'index.json').exists():
                write_dataset(images, draw_samples(IMAGES, stream.resolution), COLUMNS)
            changes += [f'{section}.{name}.local={images}', f'{section}.{name}.remote=null']
    settings = recipe.model.kwargs
    if recipe.model.name == 'prx':
        changes += [f'model.pretrained={prx_folder(folder)}', 'model.revision=null']
    elif 'pretrained' in settings or recipe.model.name == 'sd2':
        changes += ['model.pretrained=null', 'model.revision=null']
    for part in ('representation_alignment', 'perceptual_losses'):
        if part in settings:
            changes += [f'model.{part}.encoder={dinov2_base(folder)}', f'model.{part}.revision=null']
    if 'perceptual_losses' in settings:
        changes.append(f'model.perceptual_losses.lpips_backbone={vgg(folder)}')
    return changes


def prx_folder(folder: Path) -> Path:
    """Return a folder with the frozen parts of PRX: FLUX.1's VAE, T5-Gemma 2B's encoder, and a small tokenizer."""
    path = folder / 'prx'
    if not path.exists():
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
        with torch.device('meta'):
            config: Any = T5GemmaConfig().encoder
            encoder: Any = T5GemmaEncoder(config)
        encoder = encoder.to(torch.bfloat16)
        encoder.to_empty(device=device)
        with torch.no_grad():
            for weight in encoder.parameters():
                weight.normal_(std=0.02)
        encoder.cpu().save_pretrained(path / 'text_encoder')
        AutoencoderKL(**prx_builder.VAE).save_pretrained(path / 'vae')
        words = Tokenizer(models.BPE(byte_fallback=True))
        words.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ['<pad>', '<eos>', '<bos>', '<unk>']
        words.train_from_iterator(['image of random colors'], trainers.BpeTrainer(special_tokens=special))
        fast_tokenizer('Gemma')(tokenizer_object=words, pad_token='<pad>').save_pretrained(path / 'tokenizer')
    return path


def dinov2_base(folder: Path) -> Path:
    """Return a folder with DINOv2 base, an image encoder of 86.6 M parameters, with random weights."""
    path = folder / 'dinov2-base'
    if not path.exists():
        Dinov2Model(Dinov2Config(image_size=518)).save_pretrained(path)
    return path


def vgg(folder: Path) -> Path:
    """Return a file with random weights of torchvision's VGG-16."""
    path = folder / 'vgg16.pth'
    if not path.exists():
        torch.save(vgg16().state_dict(), path)
    return path


def read_metrics(run: Path) -> dict[str, Any]:
    """Return the times of two saves, and medians over the windows without a save, except the first window."""
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()]
    windows = [line for line in lines if 'throughput/step_seconds' in line]
    quiet = [line for line in windows[1:] if line['time_share/checkpoint'] < 0.01] or windows
    saves = [line for line in lines if 'checkpoint/stall_seconds' in line]
    times = {
        f'{which} save/{name}': line[f'checkpoint/{name}']
        for which, line in zip(('first', 'second'), saves, strict=False)
        for name in ('stall_seconds', 'save_seconds')
    }
    names = [name for name in quiet[0] if name.startswith(('throughput/', 'memory/', 'time_share/'))]
    return times | {name: statistics.median(line[name] for line in quiet) for name in names}


def print_table(found: dict[str, dict[str, Any]]) -> None:
    """Print a row per recipe, and the stages that take most of its time."""
    print('\n| recipe | ' + ' | '.join(METRICS) + ' |')
    print('|---' * (1 + len(METRICS)) + '|')
    for recipe, figures in found.items():
        cells = [f'{figures[name] * factor:.4g}' if name in figures else '' for name, factor in METRICS.values()]
        print(f'| {recipe} | ' + ' | '.join(cells) + ' |')
    for recipe, figures in found.items():
        shares = {name.partition('/')[2]: value for name, value in figures.items() if name.startswith('time_share/')}
        largest = sorted(shares.items(), key=lambda each: -each[1])
        print(f'\n{recipe}: ' + ', '.join(f'{name} {100 * share:.1f}%' for name, share in largest if share > 0.001))


if __name__ == '__main__':
    try:
        main()
    except UserError as error:
        sys.exit(f'error: {error}')
