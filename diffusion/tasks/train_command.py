"""Command `diffusion train`: run the task of a recipe on the devices of this machine, one process per device."""

import os
import sys
from dataclasses import dataclass, field
from typing import Literal

from diffusion.config.options import Count, Overrides, RecipeFile
from diffusion.errors import UserError, exit_status, printable
from diffusion.launch.node import run_on_this_machine
from diffusion.launch.rank_discovery import count_gpus
from diffusion.launch.workers import discarding_lost_output, end_process
from diffusion.tasks import run_recipe


@dataclass
class TrainOptions:
    """Options of `diffusion train`."""

    recipe: RecipeFile
    """YAML file of the recipe, or diffusion:NAME for one that `diffusion recipes` lists."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of recipe values, such as global_batch=64."""
    devices: Count | None = None
    """Number of processes, one per GPU (default: all GPUs that CUDA_VISIBLE_DEVICES leaves visible, or one CPU
    process)."""
    task: Literal['train', 'precompute', 'evaluate', 'generate'] | None = None
    """Task to run (default: the recipe's task, which is train unless it says otherwise)."""


def run_train(options: TrainOptions) -> int:
    """Run `diffusion train`, and end this process with an exit status of `diffusion.exit_codes`, as `run.py` does."""
    words = [options.recipe, *options.overrides, *([f'task={options.task}'] if options.task else [])]
    gpus = count_gpus(os.environ)
    devices = max(1, gpus) if options.devices is None else options.devices
    if gpus and devices > gpus:
        raise UserError(f'--devices: {devices} is more than the {gpus} GPUs of this machine; use at most {gpus}')
    if devices == 1:
        end_process(run_recipe.main(words))
    try:
        recipe = run_recipe.checked(words[0], words[1:], devices)
    except UserError as error:
        print(f'error: {printable(str(error))}', file=sys.stderr)
        return exit_status(error)
    with discarding_lost_output():  # if the terminal is closed, the ranks still save
        return run_on_this_machine(['-m', run_recipe.__name__, *words], recipe, devices)
