"""Command line of `diffusion data`; a subcommand imports torch only after its arguments have been checked."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

LOOK_NEEDS = {
    'streams': ('dataset',),
    'eval_streams': ('dataset', 'eval_dataset'),
    'precompute.streams': ('precompute.crop', 'precompute.min_crop_scale'),
}
"""Paths of a recipe that the samples of a section's streams depend on, besides those of all sections."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `verify`, `look`, `bench`, `measure-latents` and `remove` to a parser."""
    commands: Any = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    _add_verify(commands.add_parser('verify', help='check shards: sizes, hashes, every image, caption and latent'))
    _add_look(commands.add_parser('look', help='draw samples of each bucket as the model sees them'))
    _add_bench(commands.add_parser('bench', help='measure loading speed and compare it with the demand of a GPU'))
    _add_measure(commands.add_parser('measure-latents', help="measure mean and deviation of an autoencoder's latents"))
    _add_remove(commands.add_parser('remove', help='remove images from a dataset, by key or by their pixels'))


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument(
        '--sample', type=share, default=1.0, metavar='X', help='fraction of shards to check, in (0, 1] (default: 1)'
    )
    parser.add_argument('--seed', type=not_negative, default=0, help='seed for choosing the shards (default: 0)')
    parser.add_argument(
        '--jobs', type=positive, metavar='N', default=_cores(), help='number of processes (default: one per core)'
    )
    parser.set_defaults(run=_verify)


def _verify(args: argparse.Namespace) -> int:
    from diffusion.inspection.stream_selection import select

    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    sections = select(recipe, names, unused=('resolution', 'shape', 'repeat', 'choose', 'validate_hash'))
    from diffusion.inspection.verify import verify

    return verify(sections, sample=args.sample, seed=args.seed, jobs=args.jobs)


def _add_look(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument('--out', type=Path, required=True, metavar='FILE', help='PNG or HTML file to write')
    parser.add_argument('--samples', type=positive, default=8, metavar='N', help='samples per bucket (default: 8)')
    parser.add_argument('--seed', type=not_negative, default=0, help='seed for choosing the samples (default: 0)')
    parser.add_argument(
        '--decode',
        action='store_true',
        help='decode latents to images even if the VAE must be downloaded (default: only if it is local)',
    )
    parser.set_defaults(run=_look)


def _look(args: argparse.Namespace) -> int:
    from diffusion.inspection.stream_selection import check_complete, select

    _check_sheet_file(args.out)
    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    chosen = select(recipe, names)
    check_complete(recipe, ('model', 'loader', 'seed', *(path for section in chosen for path in LOOK_NEEDS[section])))
    _check_folders(chosen, args.recipe)
    from diffusion.inspection.preview import look

    look(recipe, chosen, args.out, samples=args.samples, seed=args.seed, decode=args.decode)
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
    from diffusion.inspection.stream_selection import check_complete, select
    from diffusion.planning.gpus import find_gpu, load_gpus

    gpu = find_gpu(args.gpu, load_gpus(args.gpus_file))
    recipe, names = _recipe_and_names(args.overrides, args.recipe)
    chosen = select(recipe, names, sections=['streams'])
    check_complete(recipe, ('model', 'loader', 'seed', 'dataset', 'global_batch', 'name', 'runs_dir'))
    _check_folders(chosen, args.recipe)
    from diffusion.inspection.bench import bench

    bench(replace(recipe, streams=chosen['streams']), gpu=gpu, workers=args.workers, batches=args.batches, mfu=args.mfu)
    return 0


def _add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('vae', metavar='VAE', help='folder or Hub repository of an autoencoder, as for model.vae')
    parser.add_argument('dataset', metavar='DATASET', help='folder or URL of a dataset that `diffusion prepare` wrote')
    parser.add_argument('--resolution', type=positive, required=True, metavar='PX', help='side of the images in pixels')
    parser.add_argument(
        '--samples', type=positive, default=2000, metavar='N', help='number of random images (default: 2000)'
    )
    parser.add_argument('--batch-size', type=positive, default=16, metavar='N', help='images per batch (default: 16)')
    parser.add_argument('--seed', type=not_negative, default=0, help='seed for choosing the images (default: 0)')
    parser.set_defaults(run=_measure)


def _measure(args: argparse.Namespace) -> int:
    from diffusion.errors import UserError

    if '://' not in args.dataset and not Path(args.dataset).is_dir():
        raise UserError(f'DATASET: {args.dataset} is not a folder; give a folder that `diffusion prepare` has written')
    from diffusion.inspection.latent_measurement import measure_latents

    settings = {'resolution': args.resolution, 'samples': args.samples, 'seed': args.seed}
    measure_latents(args.vae, args.dataset, batch_size=args.batch_size, **settings)
    return 0


def _add_remove(parser: argparse.ArgumentParser) -> None:
    from diffusion.prepare import remove_cli

    remove_cli.add_arguments(parser)


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


def _check_folders(sections: Mapping[str, Mapping[str, Any]], path: str) -> None:
    """Raise RecipeError if a local folder of the streams is missing or has no samples."""
    from diffusion.config.load import RecipeError
    from diffusion.config.path_checks import check_stream_folders

    problems = [problem for name, streams in sections.items() for problem in check_stream_folders(name, streams)]
    if problems:
        raise RecipeError(problems, path)


def _check_sheet_file(out: Path) -> None:
    """Raise UserError if the output of `data look` has the wrong type or cannot be written."""
    from diffusion.errors import UserError

    if out.suffix not in ('.png', '.html'):
        raise UserError(f'--out: {out} has the extension {out.suffix or "none"!r}; use .png or .html')
    if out.is_dir():
        raise UserError(f'--out: {out} is a folder; choose another name')
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f'--out: {out.parent} is not a writable folder; create it, or choose another one')


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
