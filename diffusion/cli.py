"""The `diffusion` command; what a sub-command needs is imported when it runs."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import diffusion
from diffusion.config.schema import did_you_mean
from diffusion.errors import DataError, ExternalError, UserError
from diffusion.exit_codes import USAGE_ERROR

COMMANDS = (
    *('check', 'plan', 'profile', 'prepare', 'data', 'generate', 'export'),
    *('launch', 'preflight', 'status', 'logs', 'cancel'),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; a mistake of the user is one message and exit status 2, see `exit_codes`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if arguments and not arguments[0].startswith('-') and arguments[0] not in COMMANDS:
        parser.error(f'there is no command {arguments[0]!r}; {did_you_mean(arguments[0], COMMANDS)}')
    if arguments[:1] == ['prepare'] and arguments[1:2] and arguments[1].endswith(('.yaml', '.yml')):
        arguments.insert(1, 'recipe')
    args, rest = parser.parse_known_args(arguments)
    # argparse takes no KEY=VALUE after an option that follows the recipe.
    if rest and (not hasattr(args, 'overrides') or any(word.startswith('-') for word in rest)):
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    if rest:
        args.overrides += rest
    try:
        return args.run(args)
    except (UserError, DataError, ExternalError) as error:
        if os.environ.get('DIFFUSION_TRACEBACK'):
            traceback.print_exc()
        print(f'error: {error}', file=sys.stderr)
        return USAGE_ERROR if isinstance(error, UserError) else error.exit_status
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='diffusion', description=diffusion.__doc__)
    parser.add_argument('--version', action='version', version=diffusion.__version__)
    commands: Any = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    _add_check(commands.add_parser('check', help='the resolved recipe, or every mistake in it, without torch'))
    _add_plan(commands.add_parser('plan', help='hours, dollars, memory, storage and checkpoints of runs'))
    _add_profile(commands.add_parser('profile', help='where the time of a few batches goes, and what would save it'))
    _add_prepare(commands.add_parser('prepare', help='pictures and captions to bucketed MDS shards'))
    _add_data(commands.add_parser('data', help='whether shards are sound, what the model sees of them, how fast'))
    _add_generate(commands.add_parser('generate', help='draw pictures with a checkpoint or an export'))
    _add_export(commands.add_parser('export', help='a checkpoint to a folder that diffusers loads'))
    _add_launch(commands)
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='a YAML file')
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='such as trainer.max_duration=20ba')
    parser.add_argument('--strict', action='store_true', help='values that are still ??? are mistakes')
    parser.add_argument('--quiet', action='store_true', help='do not print the resolved recipe')
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Print the resolved recipe and what is still to be given."""
    from diffusion.config.load import load, to_yaml

    started = time.perf_counter()
    recipe = load(args.recipe, args.overrides, allow_missing=not args.strict)
    if not args.quiet:
        print(to_yaml(recipe))
    if recipe.missing:
        print(f'# {args.recipe}: valid; before it can run it needs')
        for problem in recipe.missing:
            print(f'#   {problem}')
    else:
        print(f'# {args.recipe}: ok, checked in {time.perf_counter() - started:.1f} s')
    return 0


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from diffusion.planning import cli

    cli.add_arguments(parser)
    parser.set_defaults(run=cli.run_plan)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='a YAML file')
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='such as speed.compile=false')
    parser.add_argument('--batches', type=int, default=10, metavar='N', help='that are measured (default: 10)')
    parser.add_argument('--warmup', type=int, default=5, metavar='N', help='before them (default: 5)')
    parser.add_argument('--out', metavar='DIR', help='folder for the trace and the table (default: profiles/NAME)')
    parser.add_argument('--synthetic', action='store_true', help='made-up pictures and random weights of the encoders')
    parser.set_defaults(run=_profile)


def _profile(args: argparse.Namespace) -> int:
    from diffusion.profiling.profile import run_profile
    from diffusion.tasks.run_recipe import configure_logging

    configure_logging()
    return run_profile(args)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    from diffusion.prepare import cli

    cli.add_arguments(parser)
    parser.set_defaults(run=cli.run_prepare)


def _add_data(parser: argparse.ArgumentParser) -> None:
    from diffusion.inspection import cli

    cli.add_arguments(parser)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', metavar='DIR_OR_CHECKPOINT', help='an export, a checkpoint, or the folder of a run')
    parser.add_argument('prompts', nargs='+', metavar='PROMPT', help='a picture is drawn for each')
    parser.add_argument('--out', metavar='DIR', help='folder for the PNGs (default: generated)')
    parser.add_argument('--seed', type=int, default=0, help='of the first picture; the others count up')
    parser.add_argument('--steps', type=int, metavar='N', help='steps of the scheduler')
    parser.add_argument('--guidance', type=float, metavar='X', help='1 turns guidance off')
    parser.add_argument('--negative', default='', metavar='TEXT', help='negative prompt')
    parser.add_argument('--scheduler', metavar='NAME', help='ddim, dpm++, euler, ... or a class of diffusers')
    parser.add_argument('--weights', choices=('ema', 'training'), help='default: averaged ones where there are any')
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from diffusion.tasks.generate import run_generate

    return run_generate(args)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoint', help='a checkpoint, or the folder of a run')
    parser.add_argument('--out', required=True, metavar='DIR', help='a folder that does not exist or is empty')
    parser.add_argument('--weights', choices=('ema', 'training'), help='default: averaged ones where there are any')
    parser.add_argument('--ema-width', type=float, metavar='X', help='average made of the post_hoc_ema snapshots: 0.1')
    parser.add_argument('--at', type=int, metavar='BATCH', help='of that average (default: the checkpoint)')
    parser.add_argument('--dtype', choices=('float32', 'float16', 'bfloat16'), default='float32', help='of the files')
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from diffusion.tasks.export import run_export

    return run_export(args)


def _add_launch(commands: Any) -> None:
    from diffusion.launch import cli

    cli.add_launch(commands.add_parser('launch', help='submit jobs to Slurm, Kubernetes and others, or run them here'))
    cli.add_preflight(commands.add_parser('preflight', help='whether machines are fit to train on'))
    cli.add_job(commands.add_parser('status', help='what a scheduler says of a job'), 'status')
    cli.add_job(commands.add_parser('logs', help='what a job wrote last'), 'logs')
    cli.add_job(commands.add_parser('cancel', help='stop a job'), 'cancel')
