"""The arguments of `diffusion plan`; the plan itself is imported when it is made."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

from diffusion.errors import UserError

ENCODINGS = ('pictures', 'latents', 'latents+text')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for recipes, the cluster and the output format."""
    parser.add_argument(
        'recipes', nargs='+', metavar='RECIPE', help='YAML files of runs that follow each other, then KEY=VALUE for all'
    )
    parser.add_argument('--gpu', default='h100-sxm', metavar='NAME', help='such as a100-80gb (default: %(default)s)')
    parser.add_argument('--gpus', type=_whole, default=8, metavar='N', help='number of GPUs (default: %(default)s)')
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument('--mfu', type=_share, metavar='X', help='model FLOPs utilization to assume, such as 0.4')
    speed.add_argument('--images-per-second', type=_positive, metavar='Y', help='measured speed of all GPUs together')
    speed.add_argument(
        '--from-run', type=Path, metavar='DIR', help='folder of an earlier run, whose logged throughput is used'
    )
    parser.add_argument('--price', type=_not_negative, metavar='USD', help='price per GPU-hour')
    parser.add_argument(
        '--gpus-file', type=Path, metavar='YAML', help='more GPUs and other prices, in the form of gpus.yaml'
    )
    parser.add_argument(
        '--samples', type=_counts, metavar='N[,N]', help='number of different images of each recipe: 790e6,300e6'
    )
    parser.add_argument(
        '--stored', choices=ENCODINGS, help='form in which samples are stored, instead of what the recipes say'
    )
    parser.add_argument(
        '--mtbf',
        type=_positive,
        metavar='HOURS',
        help='mean time between failures of the whole cluster (default: the rate of Llama 3)',
    )
    parser.add_argument('--stall', type=_positive, metavar='SECONDS', help='time that a save stops training')
    parser.add_argument(
        '--restart', type=_not_negative, metavar='SECONDS', help='time from a failure to the next batch'
    )
    parser.add_argument('--json', action='store_true', help='print JSON')
    parser.add_argument('--png', type=Path, metavar='FILE', help='plot cost and days against the number of GPUs')
    parser.set_defaults(overrides=[])


def run_plan(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        UserError: A recipe, or what is said of the cluster, is wrong.
    """
    from diffusion.planning.gpus import find_gpu, load_gpus
    from diffusion.planning.plan import Assumptions, load_phases, make_plan, measured_in
    from diffusion.planning.plan_json import as_values
    from diffusion.planning.plan_table import plan_text

    words = [*args.recipes, *args.overrides]
    paths = [word for word in words if '=' not in word]
    overrides = [word for word in words if '=' in word]
    gpus = load_gpus(args.gpus_file)
    given = Assumptions(
        gpu=find_gpu(args.gpu, gpus),
        gpus=args.gpus,
        price=args.price,
        mfu=args.mfu,
        images_per_second=args.images_per_second,
        measured=None if args.from_run is None else measured_in(args.from_run),
        mtbf_hours=args.mtbf,
        stall_seconds=args.stall,
        **({} if args.restart is None else {'restart_seconds': args.restart}),
    )
    if not paths:
        raise UserError('plan: no recipe is given; name a YAML file, such as yamls/phase1.yaml')
    if args.images_per_second is not None and len(paths) > 1:
        raise UserError(
            '--images-per-second: it is the speed of one recipe; plan the others on their own, or use --mfu'
        )
    phases = load_phases(paths, overrides, samples=args.samples or (), encoding=args.stored)
    plan = make_plan(phases, given, gpus=gpus)
    print(json.dumps(as_values(plan), indent=2) if args.json else plan_text(plan))
    if args.png is not None:
        from diffusion.planning.cost_plot import draw

        draw(plan, args.png)
    return 0


def _number(text: str, allowed: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not allowed(value):
        raise argparse.ArgumentTypeError(f'{text!r} is not {what}')
    return value


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, 'a positive number')


def _not_negative(text: str) -> float:
    return _number(text, lambda value: value >= 0, 'a number from 0 up')


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, 'a share of the peak in (0, 1], such as 0.4')


def _whole(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value == int(value), 'a whole number from 1 up'))


def _counts(text: str) -> list[int]:
    return [_whole(part) for part in text.split(',')]
