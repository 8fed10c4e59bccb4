"""The `diffusion` command line. Each subcommand's modules are imported only when it is used."""

import argparse
import difflib
import importlib
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TextIO

import diffusion
from diffusion.config.options import DIR, Count, Option, Overrides, RecipeFile, add_command
from diffusion.config.schema import Problem, did_you_mean
from diffusion.errors import DataError, ExternalError, GaveUp, UserError, exit_status, printable
from diffusion.exit_codes import CLOSED_PIPE, CONFIG_ERROR, INTERRUPTED, USAGE_ERROR

if TYPE_CHECKING:
    from diffusion.config.recipe import Recipe


class _Commands(argparse._SubParsersAction):
    """Action for subcommands: a subcommand's `help` in its parent's list is also the first line of its own `--help`."""

    # typeshed declares every argument of ArgumentParser; the override need not repeat them.
    def add_parser(self, name: str, fill: 'Fill', *, help: str, **options: Any) -> Any:  # type: ignore[override]
        """Add a subcommand; the function `fill` is called to add its arguments once they are needed."""
        parser = super().add_parser(name, help=help, **{'description': f'{help[0].upper()}{help[1:]}.', **options})
        parser.fill = fill
        return parser


class CommandParser(argparse.ArgumentParser):
    """Parser that suggests the nearest name for an unknown subcommand, at every level of subcommands."""

    commands: Any = None
    """The object that `add_subparsers` returned; its `choices` are the subcommands."""
    fill: 'Fill | None' = None
    """Function that adds the arguments; None once called. It is called late, since it imports the command's modules."""

    def add_subparsers(self, **options: Any) -> Any:
        """Add subcommands. `dest` is the noun for a subcommand in error messages, such as `source`."""
        self.commands = super().add_subparsers(action=_Commands, **options)
        return self.commands

    # typeshed declares overloads of this method; the override need not repeat them.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse arguments. argparse calls this for each subcommand with the arguments after the subcommand's name."""
        self.add_arguments()
        first = next(iter(args or ()), '-')
        if self.commands is not None and not first.startswith('-') and first not in self.commands.choices:
            hint = did_you_mean(first, self.commands.choices)
            if 'folder' in self.commands.choices and Path(first).is_dir():
                hint = f'for a folder of images, write {self.prog} folder {first}'
            self.error(f'there is no {self.commands.dest} {first!r}; {hint}')
        namespace, rest = super().parse_known_args(args, namespace)
        if self.commands is None and (unknown := [word for word in rest if word.startswith('-')]):
            self.error(f'there is no option {unknown[0]}{self._hint(unknown[0])}')
        return namespace, rest

    def _hint(self, word: str) -> str:
        """Return a hint for the error about an unknown option: the nearest option, the syntax of overrides, or ''."""
        name, equals, _ = word.partition('=')
        options = re.findall(r'--[a-z][\w-]*', self.format_help())
        if near := difflib.get_close_matches(name, options, n=1):
            return f'; did you mean {near[0]}?'
        takes_values = equals and self.get_default('trailing') is not None
        return f'; write values of the recipe without dashes: {word.lstrip("-")}' if takes_values else ''

    def error(self, message: str) -> NoReturn:
        """Print an error in one line, without the usage, and exit."""
        separator = '' if message.endswith('?') else ';'
        self.exit(USAGE_ERROR, f'{self.prog}: error: {message}{separator} see {self.prog} --help\n')

    def add_arguments(self) -> None:
        """Add the arguments if that has not been done yet."""
        fill, self.fill = self.fill, None
        if fill is not None:
            fill(self)

    def tree(self) -> 'Iterator[CommandParser]':
        """Yield this parser and the parsers of all subcommands, with their arguments."""
        self.add_arguments()
        yield self
        for command in () if self.commands is None else self.commands.choices.values():
            yield from command.tree()


Fill = Callable[[Any], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status. A user's mistake prints one message and returns 2."""
    try:
        try:
            status = _main(argv)
        except SystemExit:  # argparse exits after --help and after errors
            _flush()
            raise
        _flush()
        return status
    except BrokenPipeError:
        closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed:  # an error: another pipe broke, such as one to a worker process
            raise
        for stream in closed:  # redirect it, or the flush at exit would raise BrokenPipeError again
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return CLOSED_PIPE


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    # `diffusion prepare RECIPE.yaml` is short for `diffusion prepare recipe RECIPE.yaml`.
    if arguments[:1] == ['prepare'] and arguments[1:2] and arguments[1].endswith(('.yaml', '.yml')):
        arguments.insert(1, 'recipe')
    args, rest = parser.parse_known_args(arguments)
    # argparse leaves KEY=VALUE arguments after an option in `rest`: add them here.
    if rest and ('trailing' not in args or any(word.startswith('-') for word in rest)):
        parser.error(f'unrecognized arguments: {" ".join(rest)}')
    if rest:
        setattr(args, args.trailing, [*getattr(args, args.trailing, ()), *rest])
    try:
        return args.call(args)
    except (UserError, DataError, ExternalError, GaveUp) as error:
        if os.environ.get('DIFFUSION_TRACEBACK'):
            traceback.print_exc()
        print(f'error: {printable(str(error))}', file=sys.stderr)
        status = exit_status(error)
        return USAGE_ERROR if isinstance(error, UserError) and status == CONFIG_ERROR else status
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return INTERRUPTED


def _flush() -> None:
    # Flush now: at exit, Python would report a closed pipe as an ignored exception and return status 120.
    sys.stdout.flush()
    sys.stderr.flush()


def _is_closed_pipe(stream: TextIO) -> bool:
    """Return True if a stream is a pipe whose reader has closed it, as `head` does after enough lines."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def make_parser() -> CommandParser:
    parser = CommandParser(prog='diffusion', description=diffusion.__doc__)
    parser.add_argument('--version', action='version', version=diffusion.__version__)
    commands: Any = parser.add_subparsers(dest='command', required=True, metavar='COMMAND')
    for name, (command, text) in COMMANDS.items():
        commands.add_parser(name, partial(_add, command=command), help=text)
    return parser


COMMANDS = {
    'train': ('tasks.cli:run_train', 'run the task of a recipe on the devices of this machine'),
    'init': ('tasks.init_command:run_init', 'write a recipe that fits prepared images and the GPUs of this machine'),
    'recipes': ('config.recipes_cli:add_arguments', 'list the recipes of this package, or copy one'),
    'check': ('cli:run_check', 'check a recipe without importing torch, and print it resolved'),
    'plan': ('planning.cli:run_plan', 'estimate time, cost, GPU memory, storage and checkpoints of runs'),
    'profile': ('cli:run_profile', 'measure where the time of a few batches goes, and suggest changes'),
    'prepare': ('prepare.cli:add_arguments', 'convert images and captions to bucketed MDS shards'),
    'caption': ('captioning.cli:run_caption', 'caption prepared images with a vision-language model'),
    'data': ('inspection.cli:add_arguments', 'verify shards, preview samples, benchmark the loader, remove images'),
    'generate': ('tasks.cli:run_generate', 'generate images with a checkpoint or an export'),
    'evaluate': ('tasks.cli:run_evaluate', 'measure FID, CLIP score and other metrics of a checkpoint'),
    'watch': ('tasks.watch_arguments:run_watch', 'evaluate the checkpoints of a run as they appear'),
    'compare': ('tasks.cli:run_compare', 'let people compare two models blindly, and analyze answers'),
    'report': ('report.cli:run_report', 'write or serve an HTML page of a run, or of several runs'),
    'export': ('tasks.cli:run_export', 'export a checkpoint for diffusers or ComfyUI'),
    'launch': ('launch.cli:run_launch', 'submit a job to Slurm, Kubernetes or others, or run it locally'),
    'preflight': ('launch.cli:run_preflight', 'check that machines are fit for training'),
    'status': ('launch.cli:run_status', 'show the state of a job, or the state, attempts and goodput of a run'),
    'logs': ('launch.cli:run_logs', "show the end of a job's log"),
    'cancel': ('launch.cli:run_cancel', 'cancel a job'),
    'completion': ('cli:run_completion', 'print a completion script for a shell'),
}
"""Module, function and help text of each subcommand. A function named `add_arguments` adds further subcommands."""


def _add(parser: CommandParser, command: str) -> None:
    module, _, name = command.partition(':')
    function = getattr(importlib.import_module(f'diffusion.{module}'), name)
    if name == 'add_arguments':
        function(parser)
    else:
        add_command(parser, function)


@dataclass(frozen=True)
class CheckOptions:
    """Options of `diffusion check`."""

    recipe: RecipeFile
    """YAML file of the recipe."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of recipe values, such as trainer.max_duration=20ba."""
    strict: bool = False
    """Fail on values that are still ???, and on local data that does not exist or does not fit (default: list them)."""
    quiet: bool = False
    """Do not print the resolved recipe."""
    gpus: Count | None = None
    """Also check that the recipe can run on this total number of GPUs."""
    gpus_per_node: Count = 8
    """Number of GPUs per node, for --gpus."""
    data: bool = False
    """Also look at the data in object stores: existence of the index, image size and number of images."""
    resume: bool = False
    """Also show which settings have changed since the run's newest checkpoint, and the learning rate with which the run
    would resume; imports torch."""


def run_check(options: CheckOptions) -> int:
    """Run `diffusion check`: print the resolved recipe and the keys that are still ???; return the exit status."""
    from diffusion.config.load import RecipeError, check_devices, load, overlap, to_yaml

    started = time.perf_counter()
    recipe = load(options.recipe, options.overrides, allow_missing=not options.strict)
    gpus = options.gpus
    if gpus is not None and (problems := check_devices(recipe, gpus, min(gpus, options.gpus_per_node))):
        raise RecipeError(problems, options.recipe)
    if not options.quiet:
        print(to_yaml(recipe))
    problems, warnings = _check_data(recipe, in_stores=options.data)
    missing = [each.where for each in recipe.missing]
    absent = [each for each in problems if not any(overlap(each.where, where) for where in missing)]
    if absent and options.strict:
        raise RecipeError(absent, options.recipe)
    for warning in warnings:
        print(f'# warning: {warning}')
    for note in recipe.not_inherited:
        print(f'# note: {note}')
    if recipe.missing or absent:
        print(f'# {options.recipe}: valid, but incomplete; before it can run it needs')
        for problem in [*recipe.missing, *absent]:
            print(f'#   {problem}')
    else:
        print(f'# {options.recipe}: ok, checked in {time.perf_counter() - started:.1f} s')
    if options.resume:
        from diffusion.training.resume import describe_resume

        for line in describe_resume(recipe):
            print(f'# {line}')
    return 0


def _check_data(recipe: 'Recipe', *, in_stores: bool) -> tuple[list[Problem], list[str]]:
    """Return problems of local data (with `in_stores`, also in object stores), and warnings about too few images.

    Raises:
        GaveUp: A store does not respond.
    """
    from diffusion.config.checks import remote_streams
    from diffusion.config.path_checks import check_paths
    from diffusion.planning.workload import local_repetition_warnings

    if not in_stores:
        if remote := remote_streams(recipe):
            print(f'# not looked at: data in object stores ({", ".join(remote)}); add --data')
        return check_paths(recipe), local_repetition_warnings(recipe)
    from diffusion.config.store_checks import copied_streams

    with copied_streams(recipe) as copies:
        return copies.check(), local_repetition_warnings(copies.recipe)


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `diffusion profile`."""

    recipe: RecipeFile
    """YAML file of the recipe."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of recipe values, such as speed.compile=false."""
    batches: Count = 10
    """Number of measured batches."""
    warmup: Count = 5
    """Number of warmup batches before the measured ones."""
    out: Annotated[str | None, DIR] = None
    """Output folder for the trace and the table (default: profiles/NAME)."""
    synthetic: bool = False
    """Use generated images and random encoder weights instead of real ones."""


def run_profile(options: ProfileOptions) -> int:
    from diffusion.profiling import profile
    from diffusion.tasks.run_recipe import configure_logging

    configure_logging()
    profile.run_profile(**vars(options))
    return 0


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `diffusion completion`."""

    shell: Annotated[Literal['bash', 'zsh', 'tcsh'], Option(positional=True)]
    """Shell that will source the script."""


def run_completion(options: CompletionOptions) -> int:
    """Print a static completion script: it completes words without starting Python."""
    import shtab

    parser = make_parser()
    for command in parser.tree():
        for action in command._actions:
            if getattr(action, 'completes_files', False):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, options.shell))
    return 0
