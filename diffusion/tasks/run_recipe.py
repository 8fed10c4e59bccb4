"""Entry point of `run.py` and `diffusion train`: check the recipe, then import torch and run the recipe's task."""

import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.config.checks import image_streams
from diffusion.config.load import (
    Problem,
    Recipe,
    RecipeError,
    check_devices,
    check_output,
    check_paths,
    hide_environment,
    load,
)
from diffusion.errors import DataError, ExternalError, GaveUp, UserError, exit_status, printable
from diffusion.exit_codes import BAD_HARDWARE, INTERRUPTED, PREEMPTED, USAGE_ERROR, HardwareFault, Preempted
from diffusion.launch.workers import discarding_lost_output, end_process
from diffusion.loggers import status_line
from diffusion.loggers.status_line import PrintableFormatter, WrappingFormatter
from diffusion.runs import heartbeats
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.runs.openmp_spin import describe_spin
from diffusion.runs.stop_signals import StoppedEarly, stopping_early

log = logging.getLogger(__name__)

RANK_ZERO_SECONDS = 5.0
"""Time that the other ranks wait for rank 0 to print the mistakes in a recipe."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `run.py RECIPE [key=value ...]`, and return an exit status of `diffusion.exit_codes`."""
    # When the terminal is closed, SIGHUP makes the run save a checkpoint and stop; its output must not raise an error.
    with discarding_lost_output():
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(arguments: Sequence[str]) -> int:
    rank = int(os.environ.get('RANK', '0'))
    heartbeats.write_stacks_on_signal()
    if not arguments or arguments[0] in ('-h', '--help'):
        print('usage: composer run.py RECIPE [key=value ...]', file=sys.stderr)
        return USAGE_ERROR
    recipe: Recipe | None = None
    try:
        recipe = checked(arguments[0], arguments[1:])
        run_task(recipe)
    except (Preempted, StoppedEarly) as stopped:
        if rank == 0:
            print(stopped, file=sys.stderr)
        return PREEMPTED
    except KeyboardInterrupt:
        if rank == 0:
            print('interrupted', file=sys.stderr)
        return INTERRUPTED
    except HardwareFault as fault:
        print(fault, file=sys.stderr)
        return BAD_HARDWARE
    except (UserError, DataError, ExternalError, GaveUp) as error:
        if os.environ.get('DIFFUSION_TRACEBACK'):
            traceback.print_exc()
        # All ranks find the mistakes in a recipe, so only rank 0 prints them. Other errors, such as a missing shard,
        # may occur on a single rank.
        if rank == 0 or not isinstance(error, RecipeError):
            prefix = f'rank {rank}: ' if rank else ''
            message = str(error) if recipe is None else hide_environment(recipe, str(error))
            print(f'{prefix}error: {printable(message)}', file=sys.stderr)
        else:
            # Composer's launcher ends all processes when one has ended, so wait until rank 0 has printed the mistakes.
            time.sleep(RANK_ZERO_SECONDS)
        return exit_status(error)
    return 0


def checked(path: str, overrides: Sequence[str], devices: int | None = None) -> Recipe:
    """Load a recipe, and check its values, number of devices, paths and output folder without importing torch.

    Args:
        devices: Number of devices, all in this machine (default: WORLD_SIZE and LOCAL_WORLD_SIZE).

    Raises:
        RecipeError: The recipe has mistakes; the error lists all of them.
        UserError: The task needs a checkpoint, but the path is not one.
    """
    recipe = load(path, overrides)
    world_size = devices or int(os.environ.get('WORLD_SIZE', '1'))
    local_world_size = devices or int(os.environ.get('LOCAL_WORLD_SIZE', '0')) or None
    problems = check_devices(recipe, world_size, local_world_size) + check_paths(recipe) + check_output(recipe)
    if problems:
        raise RecipeError([Problem(each.where, hide_environment(recipe, each.what)) for each in problems], path)
    if recipe.task in ('evaluate', 'generate'):
        find_checkpoint(recipe.checkpoint or recipe.run_place)
    return recipe


def run_task(recipe: Recipe) -> None:
    configure_logging()
    if spin := describe_spin():
        log.info(spin)
    if recipe.task == 'train':
        with stopping_early():
            from diffusion.training.train import train

            train(recipe).close()
        if os.environ.get('RANK', '0') == '0':
            print(describe_results(recipe))
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
    """Set log levels: INFO for this package on rank 0, WARNING on other ranks and for other packages.

    On a terminal, rank 0 reserves the last row for the status line; see `diffusion.loggers.status_line`.
    """
    is_main = os.environ.get('RANK', '0') == '0'
    formatter = WrappingFormatter if is_main and status_line.install() else PrintableFormatter
    handler = logging.StreamHandler()
    handler.setFormatter(formatter('%(asctime)s %(levelname)s: %(message)s', datefmt='%H:%M:%S'))
    logging.basicConfig(handlers=[handler])
    logging.getLogger('diffusion').setLevel(logging.INFO if is_main else logging.WARNING)


def describe_results(recipe: Recipe) -> str:
    from diffusion.checkpointing.checkpoint_store import list_checkpoints

    run = recipe.run_dir
    newest = [f'{recipe.run_place}/{path.name}' for path in list_checkpoints(run)[:1]]
    found = [('loss curve', 'loss.png'), ('image grids', 'images'), ('results of evaluations', EVALUATIONS)]
    lines = [('newest checkpoint', name) for name in newest]
    lines += [(label, f'{recipe.run_place}/{name}') for label, name in found if (run / name).exists()]
    lines += [('captions of the data', str(path)) for path in caption_files(recipe)]
    return '\n'.join([f'{recipe.run_place}:', *(f'  {label:26s} {path}' for label, path in lines)])


def caption_files(recipe: Recipe) -> Iterator[Path]:
    """Yield the existing caption lists in the local folders of a recipe's streams and in their parent folders."""
    from diffusion.prepare.report_content import CAPTIONS

    streams = [*recipe.streams.values(), *recipe.eval_streams.values(), *image_streams(recipe).values()]
    locals_ = [Path(stream.local) for stream in streams if stream.local is not None]
    candidates = dict.fromkeys(folder / CAPTIONS for local in locals_ for folder in (local, local.parent))
    yield from (path for path in candidates if path.is_file())


if __name__ == '__main__':
    end_process(main())
