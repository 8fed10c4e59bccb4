"""Command line of `diffusion data`; each subcommand imports its modules only when it runs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `verify`, `look` and `bench` to a parser."""
    commands: Any = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    _add_verify(commands.add_parser('verify', help='check shards: sizes, hashes, every image, caption and latent'))
    _add_look(commands.add_parser('look', help='draw samples of each bucket as the model sees them'))
    _add_bench(commands.add_parser('bench', help='measure loading speed and compare it with the demand of a GPU'))


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument(
        '--sample', type=share, default=1.0, metavar='X', help='fraction of shards to check, in (0, 1] (default: 1)'
    )
    parser.add_argument('--seed', type=int, default=0, help='seed for choosing the shards (default: 0)')
    parser.add_argument(
        '--jobs', type=positive, metavar='N', default=_cores(), help='number of processes (default: one per core)'
    )
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from diffusion.inspection.verify import verify

    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    return verify(recipe, names, sample=args.sample, seed=args.seed, jobs=args.jobs)


def _add_look(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument('--out', type=Path, required=True, metavar='FILE', help='PNG or HTML file to write')
    parser.add_argument('--samples', type=positive, default=8, metavar='N', help='samples per bucket (default: 8)')
    parser.add_argument('--seed', type=int, default=0, help='seed for choosing the samples (default: 0)')
    parser.add_argument(
        '--decode',
        action='store_true',
        help='decode latents to images even if the VAE must be downloaded (default: only if it is local)',
    )
    parser.set_defaults(run=_look)


def _look(args: argparse.Namespace) -> int:
    from diffusion.inspection.preview import look

    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    look(recipe, names, args.out, samples=args.samples, seed=args.seed, decode=args.decode)
    return 0


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument(
        '--workers',
        type=not_negative,
        nargs='+',
        metavar='N',
        help='worker counts to benchmark (default: 0, 1, 2, 4, ... up to the number of cores)',
    )
    parser.add_argument(
        '--batches', type=positive, default=20, metavar='N', help='batches to time for each worker count (default: 20)'
    )
    parser.add_argument(
        '--gpu',
        default='h100-sxm',
        metavar='NAME',
        help='GPU to compare with, using the names of `diffusion plan` (default: h100-sxm)',
    )
    parser.add_argument(
        '--gpus-file', type=Path, metavar='YAML', help='file with more GPUs or other prices, in the format of gpus.yaml'
    )
    parser.add_argument(
        '--mfu', type=share, default=0.4, metavar='X', help='fraction of peak FLOP/s reached in training (default: 0.4)'
    )
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    from diffusion.inspection.bench import bench

    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    gpu = {'gpu': args.gpu, 'gpus_file': args.gpus_file, 'mfu': args.mfu}
    bench(recipe, names, workers=args.workers, batches=args.batches, **gpu)
    return 0


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='YAML file of the recipe')
    # The main command line also appends the arguments that follow an option to `overrides`, as for `check`.
    words = 'stream to use (default: all), or override of a recipe value, such as dataset.crop=random'
    parser.add_argument('overrides', nargs='*', metavar='STREAM|KEY=VALUE', help=words)


def _recipe_and_names(words: Sequence[str], path: str) -> tuple[Any, list[str]]:
    """Return the recipe, loaded with the KEY=VALUE overrides among the arguments, and the names of streams."""
    from diffusion.config.load import load

    recipe = load(path, [word for word in words if '=' in word], allow_missing=True)
    return recipe, [word for word in words if '=' not in word]


def share(text: str) -> float:
    """Parse a fraction in (0, 1]; for the `type` of a command-line option."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f'{text} is not in (0, 1]; use a fraction such as 0.5')
    return value


def not_negative(text: str) -> int:
    """Parse a nonnegative integer; for the `type` of a command-line option."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f'{text} is negative; use 0 or more')
    return value


def positive(text: str) -> int:
    """Parse a positive integer; for the `type` of a command-line option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f'{text} is not positive; use 1 or more')
    return value


def _cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
