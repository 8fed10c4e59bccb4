"""The entry point of `run.py`: check the recipe, and only then import torch and run its task."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence

from diffusion.config.load import Recipe, RecipeError, check_devices, check_output, check_paths, load
from diffusion.errors import DataError, ExternalError, UserError
from diffusion.exit_codes import PREEMPTED, USAGE_ERROR, Preempted
from diffusion.launch import heartbeat_file


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe: `run.py RECIPE [key=value ...]`; the exit statuses are in `exit_codes`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ.get('RANK', '0'))
    heartbeat_file.write_stacks_on_signal()
    if not arguments or arguments[0] in ('-h', '--help'):
        print('usage: composer run.py RECIPE [key=value ...]', file=sys.stderr)
        return USAGE_ERROR
    try:
        recipe = checked(arguments[0], arguments[1:])
        run_task(recipe)
    except Preempted as stopped:
        if rank == 0:
            print(stopped, file=sys.stderr)
        return PREEMPTED
    except (UserError, DataError, ExternalError) as error:
        if os.environ.get('DIFFUSION_TRACEBACK'):
            traceback.print_exc()
        # A mistake in a recipe is the same on every rank; other errors may be one rank's own.
        if rank == 0 or not isinstance(error, RecipeError):
            who = f'rank {rank}: ' if rank else ''
            print(f'{who}error: {error}', file=sys.stderr)
        return error.exit_status
    return 0


def checked(path: str, overrides: Sequence[str]) -> Recipe:
    """The recipe, checked as far as it can be without importing torch.

    Raises:
        RecipeError: With every mistake.
    """
    recipe = load(path, overrides)
    world_size = int(os.environ.get('WORLD_SIZE', '1'))
    problems = check_devices(recipe, world_size) + check_paths(recipe) + check_output(recipe)
    if problems:
        raise RecipeError(problems, path)
    return recipe


def run_task(recipe: Recipe) -> None:
    """Import what the task needs, and run it."""
    configure_logging()
    if recipe.task == 'train':
        from diffusion.training.train import train

        train(recipe).close()
    elif recipe.task == 'precompute':
        from diffusion.tasks.precompute import precompute

        precompute(recipe)
    elif recipe.task == 'evaluate':
        from diffusion.tasks.evaluate import evaluate

        evaluate(recipe)
    else:
        from diffusion.tasks.generate import generate

        generate(recipe)


def configure_logging() -> None:
    """Our own messages at INFO on rank zero, everybody else's at WARNING."""
    logging.basicConfig(format='%(asctime)s %(levelname)s: %(message)s', datefmt='%H:%M:%S')
    logging.getLogger('diffusion').setLevel(logging.INFO if os.environ.get('RANK', '0') == '0' else logging.WARNING)
