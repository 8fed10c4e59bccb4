"""The `diffusion` command line. A subcommand imports what it needs when it runs."""

import argparse
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import diffusion
from diffusion.config.schema import did_you_mean
from diffusion.errors import DataError, ExternalError, UserError, exit_status, printable
from diffusion.exit_codes import CLOSED_PIPE, CONFIG_ERROR, INTERRUPTED, USAGE_ERROR


class _Commands(argparse._SubParsersAction):
    """Subcommands; the `--help` of each begins with its help text from the list of subcommands."""

    # typeshed declares every keyword of ArgumentParser, which the override need not repeat.
    def add_parser(self, name: str, *, help: str, **options: Any) -> Any:  # type: ignore[override]
        """Add a subcommand; its description is `help` as a sentence by default."""
        return super().add_parser(name, help=help, **{'description': f'{help[0].upper()}{help[1:]}.', **options})


class CommandParser(argparse.ArgumentParser):
    """Parser that suggests the nearest name for an unknown subcommand; parsers of its subcommands do the same."""

    commands: Any = None
    """What `add_subparsers` returned, whose `choices` are the subcommands."""

    def add_subparsers(self, **options: Any) -> Any:
        """Add subcommands; the option `dest` names their kind in the message for an unknown one."""
        self.commands = super().add_subparsers(action=_Commands, **options)
        return self.commands

    # typeshed declares overloads of this method, which the override need not repeat.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments; argparse calls this for each subcommand with the arguments that follow its name."""
        first = next(iter(args or ()), '-')
        if self.commands is not None and not first.startswith('-') and first not in self.commands.choices:
            self.error(f'there is no {self.commands.dest} {first!r}; {did_you_mean(first, self.commands.choices)}')
        return super().parse_known_args(args, namespace)


FILE_ARGUMENTS = {
    *('recipe', 'recipes', 'spec', 'specs', 'checkpoint', 'source', 'location', 'runs'),
    *('out', 'captions', 'from_run', 'gpus_file', 'png', 'lora', 'prompts', 'reference', 'run_place', 'launch'),
    *('a', 'b', 'serve', 'analyze', 'key'),
    *('dataset', 'keys', 'image', 'latents', 'runs_dir', 'work'),
}
"""Arguments that are paths, for which a shell completes file names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, and return the exit status; a user's mistake is one message and status 2 (`exit_codes`)."""
    try:
        try:
            status = _main(argv)
        except SystemExit:  # of argparse
            _flush()
            raise
        _flush()
        return status
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed:  # another pipe broke, such as one to a worker process: a fault
            raise
        for stream in closed:  # otherwise the flush at exit would raise again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return CLOSED_PIPE


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    # `diffusion prepare RECIPE.yaml` is short for `diffusion prepare recipe RECIPE.yaml`.
    if arguments[:1] == ['prepare'] and arguments[1:2] and arguments[1].endswith(('.yaml', '.yml')):
        arguments.insert(1, 'recipe')
    args, rest = parser.parse_known_args(arguments)
    # argparse does not accept further KEY=VALUE once an option has followed the recipe, so add the rest here.
    if rest and (not hasattr(args, 'overrides') or any(word.startswith('-') for word in rest)):
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    if rest:
        args.overrides += rest
    try:
        return args.run(args)
    except (UserError, DataError, ExternalError) as error:
        if os.environ.get('DIFFUSION_TRACEBACK'):
            traceback.print_exc()
        print(f'error: {printable(str(error))}', file=sys.stderr)
        status = exit_status(error)
        return USAGE_ERROR if isinstance(error, UserError) and status == CONFIG_ERROR else status
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return INTERRUPTED


def _flush() -> None:
    # Python flushes at exit too, but reports a closed pipe there as an ignored exception, with status 120.
    sys.stdout.flush()
    sys.stderr.flush()


def _is_closed_pipe(stream: TextIO) -> bool:
    """Return True if a stream is a pipe that its reader has closed, as `head` does when it has enough lines."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def make_parser() -> CommandParser:
    """Return the parser of `diffusion` with all of its subcommands."""
    parser = CommandParser(prog='diffusion', description=diffusion.__doc__)
    parser.add_argument('--version', action='version', version=diffusion.__version__)
    commands: Any = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    _add_check(commands.add_parser('check', help='check a recipe without importing torch, and print it resolved'))
    _add_plan(commands.add_parser('plan', help='estimate time, cost, GPU memory, storage and checkpoints of runs'))
    _add_profile(
        commands.add_parser('profile', help='measure where the time of a few batches goes, and suggest changes')
    )
    _add_prepare(commands.add_parser('prepare', help='convert images and captions to bucketed MDS shards'))
    _add_data(commands.add_parser('data', help='verify shards, preview samples, benchmark the loader, remove images'))
    _add_generate(commands.add_parser('generate', help='generate images with a checkpoint or an export'))
    _add_evaluate(commands.add_parser('evaluate', help='measure FID, CLIP score and other metrics of a checkpoint'))
    _add_watch(commands.add_parser('watch', help='evaluate the checkpoints of a run as they appear'))
    _add_compare(commands.add_parser('compare', help='let people compare two models blindly, and analyze answers'))
    _add_report(commands.add_parser('report', help='write or serve an HTML page of a run, or of several runs'))
    _add_export(commands.add_parser('export', help='export a checkpoint for diffusers or ComfyUI'))
    _add_launch(commands)
    _add_completion(commands.add_parser('completion', help='print a completion script for a shell'))
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='YAML file of the recipe')
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help='override a recipe value, such as trainer.max_duration=20ba'
    )
    parser.add_argument('--strict', action='store_true', help='fail on values that are still ??? (default: list them)')
    parser.add_argument('--quiet', action='store_true', help='do not print the resolved recipe')
    parser.add_argument(
        '--gpus', type=_positive_integer, metavar='N', help='also check that the recipe can run on N GPUs of all nodes'
    )
    parser.add_argument(
        '--gpus-per-node', type=_positive_integer, default=8, metavar='N', help='with --gpus (default: %(default)s)'
    )
    parser.add_argument(
        '--resume',
        action='store_true',
        help='also show which settings have changed since the newest checkpoint of the run, and the learning rate with '
        'which it would resume; imports torch',
    )
    parser.set_defaults(run=run_check)


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} is not a positive integer')
    return int(text)


def run_check(args: argparse.Namespace) -> int:
    """Run `diffusion check`: print the resolved recipe and its values that are still ???; return the exit status."""
    from diffusion.config.load import RecipeError, check_devices, load, to_yaml

    started = time.perf_counter()
    recipe = load(args.recipe, args.overrides, allow_missing=not args.strict)
    if args.gpus is not None and (problems := check_devices(recipe, args.gpus, min(args.gpus, args.gpus_per_node))):
        raise RecipeError(problems, args.recipe)
    if not args.quiet:
        print(to_yaml(recipe))
    if recipe.missing:
        print(f'# {args.recipe}: valid, but incomplete; before it can run it needs')
        for problem in recipe.missing:
            print(f'#   {problem}')
    else:
        print(f'# {args.recipe}: ok, checked in {time.perf_counter() - started:.1f} s')
    if args.resume:
        from diffusion.tasks.resume_check import describe_resume

        for line in describe_resume(recipe):
            print(f'# {line}')
    return 0


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from diffusion.planning import cli

    cli.add_arguments(parser)
    parser.set_defaults(run=cli.run_plan)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('recipe', help='YAML file of the recipe')
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help='override a recipe value, such as speed.compile=false'
    )
    parser.add_argument('--batches', type=int, default=10, metavar='N', help='number of measured batches (default: 10)')
    parser.add_argument(
        '--warmup', type=int, default=5, metavar='N', help='number of batches before the measured ones (default: 5)'
    )
    parser.add_argument(
        '--out', metavar='DIR', help='output folder for the trace and the table (default: profiles/NAME)'
    )
    parser.add_argument(
        '--synthetic', action='store_true', help='use generated images and random encoder weights instead of real ones'
    )
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
    parser.add_argument(
        'source', metavar='DIR_OR_CHECKPOINT', help='exported folder, or the folder or URL of a checkpoint or a run'
    )
    parser.add_argument('prompts', nargs='+', metavar='PROMPT', help='prompt; one image is generated per prompt')
    parser.add_argument('--out', metavar='DIR', help='output folder for the PNG files (default: generated)')
    parser.add_argument(
        '--seed', type=int, default=0, help='seed of the first image; each additional image adds 1 (default: 0)'
    )
    parser.add_argument(
        '--steps', type=int, metavar='N', help="number of sampling steps (default: the recipe's; 50 for an export)"
    )
    parser.add_argument(
        '--guidance',
        type=float,
        metavar='X',
        help="guidance scale; 1 turns guidance off (default: the recipe's; 7.5 for an export)",
    )
    parser.add_argument('--negative', default='', metavar='TEXT', help='negative prompt for all images (default: none)')
    parser.add_argument(
        '--scheduler',
        metavar='NAME',
        help="noise scheduler: ddim, dpm++, euler, ... or a diffusers class name (default: the recipe's or export's)",
    )
    parser.add_argument(
        '--lora', metavar='DIR_OR_FILE', help='exported LoRA to add to an exported pipeline (default: none)'
    )
    parser.add_argument(
        '--weights',
        choices=('ema', 'training'),
        help='weights to generate with: ema (averaged) or training (default: ema if the checkpoint has them)',
    )
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    from diffusion.tasks.argument_checks import check_generate

    check_generate(args)  # before the next import, which takes 15 s
    from diffusion.tasks.generate import run_generate

    return run_generate(args)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoint', help='folder or URL of a checkpoint, or of a run to use its latest checkpoint')
    parser.add_argument(
        'overrides',
        nargs='*',
        metavar='KEY=VALUE',
        help="override a value of the run's recipe, such as global_batch=64",
    )
    _add_evaluation_options(parser)
    parser.set_defaults(run=_evaluate)


def _add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--metrics',
        type=_words,
        metavar='NAMES',
        help='comma-separated: fid, kid, clip_fid, cmmd, dino_mmd, precision, recall, clip_score, pick_score, '
        "efficientnet_distance (default: the evaluators of the run's recipe)",
    )
    parser.add_argument(
        '--guidance',
        type=_numbers,
        metavar='NUMBERS',
        help='comma-separated guidance scales; the first gives the metrics of the checkpoint (default: 7.5)',
    )
    parser.add_argument(
        '--prompts',
        metavar='FILE',
        help='prompts as .txt, .csv, .tsv or .jsonl; "own" for 120 prompts of this package (default: captions of '
        'the evaluation data)',
    )
    parser.add_argument('--prompt-column', metavar='NAME', help='column of the prompts (default: found by its name)')
    parser.add_argument(
        '--images', type=_positive_integer, metavar='N', help='number of images to generate (default: one per prompt)'
    )
    parser.add_argument(
        '--reference', metavar='DIR', help='folder of reference images (default: images of the evaluation data)'
    )
    parser.add_argument('--steps', type=_positive_integer, metavar='N', help='number of sampling steps (default: 50)')
    parser.add_argument(
        '--batch-size', type=_positive_integer, metavar='N', help='images per batch and device (default: 32)'
    )
    parser.add_argument(
        '--network',
        action='append',
        default=[],
        type=_assignment,
        metavar='NAME=SOURCE',
        help='path, or ORG/NAME@COMMIT, of a network: inception, clip_fid, cmmd, dino, clip_score, pick_score; can be '
        'repeated (default: the published ones)',
    )
    parser.add_argument(
        '--layout', metavar='NAME', help='also write the images as the scorer geneval or t2i_compbench reads them'
    )


def _add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('run_place', metavar='RUN', help='folder or URL of a run')
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help="override a value of the run's recipe, or of the job"
    )
    parser.add_argument(
        '--policy',
        choices=('every', 'latest'),
        default='every',
        help='evaluate every checkpoint, oldest first, or only the latest at any time (default: every)',
    )
    parser.add_argument(
        '--checkpoints',
        type=_words,
        default=[],
        metavar='NAMES',
        help='only these, such as ba1000,ba2000 (default: all)',
    )
    parser.add_argument(
        '--keep-best',
        metavar='METRIC[:N]',
        help='pin the N checkpoints with the best values, so that the run keeps them (default: pin none; N: 1)',
    )
    parser.add_argument(
        '--launch', metavar='SPEC', help='job YAML, submitted for each checkpoint (default: evaluate on this machine)'
    )
    parser.add_argument(
        '--max-nodes',
        type=_positive_integer,
        metavar='N',
        help="give each job as many nodes as Slurm or Kubernetes has free, at most N (default: the job YAML's number)",
    )
    parser.add_argument(
        '--processes', type=_positive_integer, default=1, metavar='N', help='processes, one per GPU (default: 1)'
    )
    parser.add_argument(
        '--jobs',
        type=_positive_integer,
        default=1,
        metavar='N',
        help='maximum number of evaluations at once (default: 1)',
    )
    parser.add_argument(
        '--lease',
        metavar='TIME',
        help='time without a sign of life after which an evaluation is done again, such as 6h (default: 10m on this '
        'machine, 12h for jobs, which includes their time in the queue)',
    )
    parser.add_argument(
        '--poll', default='30s', metavar='TIME', help='time between two looks for checkpoints (default: %(default)s)'
    )
    parser.add_argument(
        '--once', action='store_true', help='end when all checkpoints are evaluated (default: wait for new ones)'
    )
    _add_evaluation_options(parser)
    parser.set_defaults(run=_watch)


def _watch(args: argparse.Namespace) -> int:
    from diffusion.tasks.run_recipe import configure_logging
    from diffusion.tasks.watch import Watcher
    from diffusion.tasks.watch_arguments import watch_settings

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    settings = watch_settings(args)
    configure_logging()
    signal.signal(signal.SIGTERM, stop)
    Watcher(settings).run()
    return 0


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(',') if word.strip()]


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is not a comma-separated list of numbers') from None


def _assignment(text: str) -> tuple[str, str]:
    name, separator, value = text.partition('=')
    if not separator or not value:
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=SOURCE')
    return name, value


def _evaluate(args: argparse.Namespace) -> int:
    from diffusion.launch.workers import die_with_parent
    from diffusion.tasks.argument_checks import evaluation_recipe
    from diffusion.tasks.run_recipe import configure_logging
    from diffusion.tasks.watch import WATCHED

    if os.environ.get(WATCHED):
        die_with_parent()
    recipe = evaluation_recipe(args)  # before the next import, which takes 15 s
    configure_logging()
    from diffusion.tasks.evaluate import evaluate

    evaluate(recipe)
    return 0


def _add_compare(parser: argparse.ArgumentParser) -> None:
    from diffusion.tasks import compare_arguments

    compare_arguments.add_arguments(parser)
    parser.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> int:
    from diffusion.tasks import compare_arguments

    compare_arguments.check_use(args)
    analysis = None if args.analyze is None else compare_arguments.analyze_settings(args)
    settings = None if args.a is None else compare_arguments.compare_settings(args)
    host, port = args.host or '127.0.0.1', compare_arguments.DEFAULT_PORT if args.port is None else args.port
    if args.serve is not None:
        compare_arguments.check_address(host, port)
    if args.serve:
        compare_arguments.check_serving(Path(args.serve))
    from diffusion.tasks import compare
    from diffusion.tasks.run_recipe import configure_logging

    configure_logging()
    if analysis is not None:
        compare.analyze(analysis)
    if settings is not None:
        compare.build_page(settings)
    if args.serve is not None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager ends the server as Ctrl-C does
        compare.serve_page(Path(args.serve or args.out), host=host, port=port)
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    from diffusion.report import cli

    cli.add_arguments(parser)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoint', help='folder or URL of a checkpoint, or of a run to use its latest checkpoint')
    parser.add_argument(
        '--out',
        required=True,
        metavar='DIR_OR_FILE',
        help='output folder, which must not exist or must be empty; or a file NAME.safetensors in the layout that '
        'ComfyUI reads',
    )
    parser.add_argument(
        '--weights',
        choices=('ema', 'training'),
        help='weights to export: ema (averaged) or training (default: ema if the checkpoint has them)',
    )
    parser.add_argument(
        '--ema-width',
        type=float,
        metavar='X',
        help='export a post-hoc EMA whose width is this fraction of the training so far, such as 0.1; needs snapshots '
        'of the post_hoc_ema algorithm',
    )
    parser.add_argument(
        '--at',
        type=int,
        metavar='BATCH',
        help='with --ema-width: batch at which to reconstruct the average (default: batch of the last snapshot at or '
        'before the checkpoint)',
    )
    parser.add_argument(
        '--dtype',
        choices=('float32', 'float16', 'bfloat16'),
        default='float32',
        help='dtype of the exported weights (default: float32)',
    )
    parser.add_argument(
        '--merge',
        action='store_true',
        help='of a run with a LoRA: add it to the weights and export the whole pipeline (default: the LoRA alone)',
    )
    parser.add_argument(
        '--push',
        metavar='ORG/NAME',
        help='also upload the export with its model card to this repository on the Hugging Face Hub, created private '
        '(default: no upload)',
    )
    parser.add_argument('--public', action='store_true', help='with --push: create the repository public')
    parser.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from diffusion.tasks.argument_checks import check_export

    check_export(
        args.checkpoint,
        args.out,
        weights=args.weights,
        ema_width=args.ema_width,
        at=args.at,
        merge=args.merge,
        push=args.push,
        public=args.public,
    )
    from diffusion.tasks.export import run_export

    return run_export(args)


def _add_launch(commands: Any) -> None:
    from diffusion.launch import cli

    cli.add_launch(commands.add_parser('launch', help='submit a job to Slurm, Kubernetes or others, or run it locally'))
    cli.add_preflight(commands.add_parser('preflight', help='check that machines are fit for training'))
    cli.add_job(
        commands.add_parser('status', help='show the state of a job, or the state, attempts and goodput of a run'),
        'status',
    )
    cli.add_job(commands.add_parser('logs', help="show the end of a job's log"), 'logs')
    cli.add_job(commands.add_parser('cancel', help='cancel a job'), 'cancel')


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('shell', choices=('bash', 'zsh', 'tcsh'), help='shell that will source the script')
    parser.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> int:
    """Print a static completion script, which does not start Python when a word is completed."""
    import shtab

    parser = make_parser()
    for command in _all_parsers(parser):
        for action in command._actions:
            if action.dest in FILE_ARGUMENTS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _all_parsers(command)
