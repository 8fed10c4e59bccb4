"""Command line of `diffusion plan`."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from diffusion.errors import UserError

# A copy of workload.ENCODINGS: the parser of every sub-command is built on each call of `diffusion`, and the planner's
# modules are imported only when a plan is made. tests/planning/test_plan_cli.py checks that the two are equal.
ENCODINGS = ('pictures', 'latents', 'latents+text')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diffusion plan`: recipes, cluster, failures and output format."""
    parser.add_argument(
        'recipes',
        nargs='+',
        metavar='RECIPE',
        help='YAML files of consecutive runs, then KEY=VALUE overrides that apply to all of them',
    )
    parser.add_argument(
        '--gpu', default='h100-sxm', metavar='NAME', help='GPU model, such as a100-80gb (default: %(default)s)'
    )
    parser.add_argument(
        '--torch',
        metavar='VERSION',
        help='version of torch on the cluster, such as 2.9 or 2.7.0+cu128, which must have kernels for the GPU '
        '(default: the installed version)',
    )
    parser.add_argument(
        '--gpus', type=_positive_integer, default=8, metavar='N', help='number of GPUs (default: %(default)s)'
    )
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument(
        '--mfu',
        type=_fraction,
        metavar='X',
        help='model FLOPs utilization to assume, such as 0.4 (default: from published runs, else 0.25)',
    )
    speed.add_argument(
        '--images-per-second', type=_positive, metavar='Y', help='measured throughput of all GPUs together'
    )
    speed.add_argument(
        '--from-run', type=Path, metavar='DIR', help='folder of an earlier run whose logged throughput is used'
    )
    parser.add_argument(
        '--price',
        type=_not_negative,
        metavar='USD',
        help='price per GPU-hour in US dollars (default: the price in gpus.yaml or --gpus-file)',
    )
    parser.add_argument(
        '--gpus-file', type=Path, metavar='FILE', help='file with more GPUs or other prices, in the format of gpus.yaml'
    )
    parser.add_argument(
        '--samples',
        type=_sample_counts,
        metavar='N[,N]',
        help='number of distinct images in the data, one number for all recipes or one per recipe, such as 790e6,300e6',
    )
    parser.add_argument(
        '--stored',
        choices=ENCODINGS,
        help='form in which samples are stored: images, latents, or latents and text embeddings '
        '(default: according to the recipe)',
    )
    parser.add_argument(
        '--mtbf',
        type=_positive,
        metavar='HOURS',
        help='mean time between failures of the whole cluster (default: from the failure rate reported for Llama 3)',
    )
    parser.add_argument(
        '--stall',
        type=_positive,
        metavar='SECONDS',
        help='seconds that each save blocks training (default: checkpoint size divided by 0.2 GB/s per writer)',
    )
    parser.add_argument(
        '--restart',
        type=_not_negative,
        metavar='SECONDS',
        help='seconds from a failure to the next batch (default: 600)',
    )
    parser.add_argument('--json', action='store_true', help='print the plan as JSON instead of tables')
    parser.add_argument(
        '--png',
        type=Path,
        metavar='FILE',
        help='also write a plot of cost and duration in days against the number of GPUs',
    )
    # The top-level parser collects KEY=VALUE words that follow an option here; `recipes` takes the others.
    parser.set_defaults(overrides=[])


def run_plan(args: argparse.Namespace) -> int:
    """Run `diffusion plan`: print the plan, and write the plot if `--png` is given.

    Raises:
        UserError: A recipe or an argument about the cluster is wrong.
    """
    from diffusion.planning.gpus import find_gpu, load_gpus
    from diffusion.planning.plan import Assumptions, load_phases, make_plan, read_measured_speed
    from diffusion.planning.plan_json import plan_to_dict
    from diffusion.planning.plan_table import plan_text
    from diffusion.planning.torch_architectures import missing_kernels
    from diffusion.storage.writable import check_writable

    if args.png is not None:
        check_writable(args.png.parent, '--png')
        if args.png.is_dir():
            raise UserError(f'--png: {args.png} is a folder; give a file name')
    words = [*args.recipes, *args.overrides]
    paths = [word for word in words if '=' not in word]
    overrides = [word for word in words if '=' in word]
    gpus = load_gpus(args.gpus_file)
    gpu = find_gpu(args.gpu, gpus)
    try:
        problem = missing_kernels(gpu, args.torch)
    except UserError as error:
        raise UserError(f'--torch: {error}') from error
    if problem is not None:
        raise UserError(f'--gpu: {problem}, and pass the version of torch on the cluster, such as --torch 2.9')
    given = Assumptions(
        gpu=gpu,
        gpus=args.gpus,
        price=args.price,
        mfu=args.mfu,
        images_per_second=args.images_per_second,
        measured=None if args.from_run is None else read_measured_speed(args.from_run),
        mtbf_hours=args.mtbf,
        stall_seconds=args.stall,
        **({} if args.restart is None else {'restart_seconds': args.restart}),
    )
    if not paths:
        raise UserError('plan: no recipe given; add a YAML file, such as yamls/phase1.yaml')
    if args.images_per_second is not None and len(paths) > 1:
        raise UserError('--images-per-second: applies to one recipe; plan the recipes one by one, or use --mfu')
    phases = load_phases(paths, overrides, samples=args.samples or (), encoding=args.stored)
    plan = make_plan(phases, given, gpus=gpus)
    print(json.dumps(plan_to_dict(plan), indent=2) if args.json else plan_text(plan))
    if args.png is not None:
        from diffusion.planning.cost_plot import draw

        draw(plan, args.png)
    return 0


def _number(text: str, allowed: Callable[[float], bool], expected: str) -> float:
    """Parse a number of a command-line option that must satisfy `allowed`; `expected` completes the error message."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not allowed(value):
        raise argparse.ArgumentTypeError(f'{text!r} is not {expected}')
    return value


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, 'a positive number')


def _not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, 'a non-negative number')


def _fraction(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, 'a fraction of the peak in (0, 1], such as 0.4')


def _positive_integer(text: str) -> int:
    # Not int(text), which rejects 790e6.
    return int(_number(text, lambda value: value >= 1 and value == int(value), 'a positive integer'))


def _sample_counts(text: str) -> list[int]:
    """Parse the comma-separated integers of --samples."""
    return [_positive_integer(part) for part in text.split(',')]
