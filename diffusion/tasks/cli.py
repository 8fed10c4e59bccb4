"""Commands `diffusion train`, `generate`, `evaluate`, `compare` and `export`; torch is imported after all checks."""

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from diffusion.config.options import Count, Overrides, RecipeFile
from diffusion.errors import UserError, exit_status, printable
from diffusion.launch.node import run_on_this_machine
from diffusion.launch.rank_discovery import count_gpus
from diffusion.launch.workers import die_with_parent, discarding_lost_output, end_process
from diffusion.tasks import argument_checks, compare_arguments, run_recipe
from diffusion.tasks.argument_checks import CheckpointOptions, EvaluationOptions, ExportOptions, GenerateOptions
from diffusion.tasks.compare_arguments import AnalyzeOptions, BuildOptions, ServeOptions
from diffusion.tasks.run_recipe import configure_logging
from diffusion.tasks.watch import WATCHED


def run_generate(options: GenerateOptions) -> int:
    argument_checks.check_generate(options)
    from diffusion.tasks import generate

    generate.run_generate(options)
    return 0


def run_evaluate(options: CheckpointOptions, evaluation: EvaluationOptions) -> int:
    if os.environ.get(WATCHED):
        die_with_parent()
    recipe = argument_checks.evaluation_recipe(options, evaluation)
    configure_logging()
    from diffusion.tasks.evaluate import evaluate

    evaluate(recipe)
    return 0


def run_export(options: ExportOptions) -> int:
    argument_checks.check_export(options)
    from diffusion.tasks import export

    export.run_export(options)
    return 0


def run_compare(build: BuildOptions, serve: ServeOptions, analyze: AnalyzeOptions) -> int:
    compare_arguments.check_use(build, serve, analyze)
    analysis = None if analyze.analyze is None else compare_arguments.analyze_settings(analyze)
    settings = None if build.a is None else compare_arguments.compare_settings(build)
    host, port = serve.host or '127.0.0.1', 8765 if serve.port is None else serve.port
    if serve.serve is not None:
        compare_arguments.check_address(host, port)
    if serve.serve:
        compare_arguments.check_serving(Path(serve.serve))
    from diffusion.tasks import compare

    configure_logging()
    if analysis is not None:
        compare.analyze(analysis)
    if settings is not None:
        compare.build_page(settings)
    if serve.serve is not None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # handle a service manager's SIGTERM like Ctrl-C
        compare.serve_page(Path(serve.serve or str(build.out)), host=host, port=port)
    return 0


@dataclass(frozen=True)
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
