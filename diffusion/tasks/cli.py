"""Commands `diffusion generate`, `evaluate`, `compare` and `export`. Options are checked before torch is imported."""

import os
import signal
from pathlib import Path

from diffusion.launch.workers import die_with_parent
from diffusion.tasks import argument_checks, compare_arguments
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
