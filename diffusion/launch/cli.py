"""Subcommands `diffusion launch`, `preflight`, `status`, `logs` and `cancel`."""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.errors import ExternalError, UserError, printable
from diffusion.storage.atomic import write_atomically
from diffusion.storage.places import is_url

if TYPE_CHECKING:
    from diffusion.launch.backends.base import Rendered
    from diffusion.launch.job_checks import CheckedSpec

_SPEC_HELP = dict.fromkeys(('logs', 'cancel'), 'YAML file of the job, as passed to `diffusion launch`') | {
    'status': 'YAML file of the job, as passed to `diffusion launch`; or the folder or URL of a run, for its state '
    '(running, silent or ended), batch, speed, time left, last batch of each node, newest checkpoint, attempts and '
    'goodput'
}


def add_launch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diffusion launch`."""
    parser.add_argument(
        'specs',
        nargs='+',
        metavar='SPEC',
        help='YAML files of the jobs, followed by KEY=VALUE overrides for all of them, such as nodes=2',
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        '--dry-run',
        action='store_true',
        help='check, render and validate the jobs and estimate their cost, without submitting them',
    )
    mode.add_argument('--render', action='store_true', help='print the files that would be submitted, and exit')
    parser.add_argument('--out', type=Path, metavar='DIR', help='write the files to this folder as well')
    parser.set_defaults(run=run_launch, overrides=[])


def add_job(parser: argparse.ArgumentParser, action: str) -> None:
    """Add the arguments of `diffusion status`, `logs` or `cancel`."""
    parser.add_argument('spec', metavar='SPEC', help=_SPEC_HELP[action])
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help='the overrides that were passed to `diffusion launch`'
    )
    if action == 'status':
        parser.add_argument('--json', action='store_true', help='print the status of a run as JSON, for scripts')
    parser.set_defaults(run=run_job_action, action=action)


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diffusion preflight`."""
    parser.add_argument('recipe', help='YAML file of a recipe, whose streams and run folder are checked')
    parser.add_argument(
        'overrides', nargs='*', metavar='KEY=VALUE', help='override a recipe value, such as global_batch=64'
    )
    parser.add_argument(
        '--deep',
        action='store_true',
        help='also check the GPUs under sustained load and the links between nodes; takes minutes instead of seconds',
    )
    parser.add_argument(
        '--gpu', metavar='NAME', help='GPU model that every node must have, such as h100-sxm (default: any)'
    )
    parser.add_argument(
        '--processes', type=int, metavar='N', help='number of processes per node (default: one per GPU)'
    )
    parser.set_defaults(run=run_preflight)


def run_preflight(args: argparse.Namespace) -> int:
    """Run `diffusion preflight`: check this machine, or all nodes together under `srun` with one task per node.

    Raises:
        UserError: The recipe or the GPU model is wrong, or the variables of the scheduler contradict each other.
    """
    from diffusion.launch import environment, node
    from diffusion.launch.rank_discovery import count_gpus
    from diffusion.planning.gpus import find_gpu, load_gpus

    kind = 'any' if count_gpus(os.environ) else 'none'
    if args.gpu is not None:
        kind = find_gpu(args.gpu, load_gpus(), or_file=False).name
    settings = {environment.PREFLIGHT: 'deep' if args.deep else 'fast', environment.GPU: kind}
    if args.processes is not None:
        settings[environment.PROCESSES_PER_NODE] = str(args.processes)
    return node.run_node_preflight([args.recipe, *args.overrides], os.environ | settings)


def run_launch(args: argparse.Namespace) -> int:
    """Run `diffusion launch`: check all jobs, print their cost and submit them; with a mistake in any job, submit none.

    Raises:
        UserError: A job spec or its recipe is wrong, or the scheduler's command-line tool is missing.
        ExternalError: A scheduler refuses a job or does not respond, or a local job failed.
    """
    from diffusion.launch.job_cost import cost_table

    paths, overrides = _split_overrides([*args.specs, *args.overrides])
    # All jobs are prepared before any is submitted, so that a mistake in the last one submits none.
    prepared = [(path, *_prepare(path, overrides)) for path in paths]
    warnings: dict[str, None] = {}
    for path, checked, rendered in prepared:
        if args.out is not None:
            _write(rendered.files, args.out)
        if args.render:
            _print_files(rendered.files)
            continue
        print(f'{path}: {checked.spec.backend}')
        lines, found = cost_table(checked.jobs, checked.gpu)
        warnings |= dict.fromkeys(found)
        for line in lines:
            print(f'  {line}')
        for command in rendered.commands:
            print(f'  submit: {" ".join(command)}')
        for note in rendered.notes:
            print(f'  note: {note}')
        for problem in checked.missing_secrets:
            print(f'  required before submission: {problem}')
    if args.render:
        return 0
    for warning in warnings:
        print(f'warning: {warning}')
    if args.dry_run:
        print('ok; nothing was submitted')
        return 0
    missing = [problem for _, checked, _ in prepared for problem in checked.missing_secrets]
    if missing:
        raise UserError('nothing was submitted:\n  ' + '\n  '.join(map(str, missing)))
    for _, checked, rendered in prepared:
        with tempfile.TemporaryDirectory(prefix='diffusion-launch-') as folder:
            _write(rendered.files, Path(folder))
            print(checked.backend.submit(checked.jobs, rendered, Path(folder)))
    return 0


def run_job_action(args: argparse.Namespace) -> int:
    """Print the status or logs of a job, or cancel it; or print the progress and attempts of a run.

    Raises:
        UserError: The spec is wrong, or the scheduler's command-line tool is missing.
        ExternalError: The scheduler does not respond.
    """
    from diffusion.launch import run_status
    from diffusion.launch.job_checks import check_jobs, load_job_spec

    if args.action == 'status' and (is_url(args.spec) or Path(args.spec).is_dir()):
        try:
            report = run_status.inspect_run(args.spec if is_url(args.spec) else Path(args.spec))
        except OSError as error:
            if not is_url(args.spec):
                raise
            raise ExternalError(f'status: {error}') from error
        text = json.dumps(asdict(report), indent=2) if args.json else printable(run_status.format_report(report))
        print(text)
        return 0
    if args.action == 'status' and args.json:
        raise UserError(f'status: --json needs a run folder, such as runs/phase1; {args.spec} is not a folder')
    if args.action == 'status' and not Path(args.spec).exists():
        raise UserError(
            f'status: {args.spec} does not exist; use the folder of a run, such as runs/phase1, or a job YAML'
        )
    checked = check_jobs(load_job_spec(args.spec, args.overrides), args.spec)
    print(getattr(checked.backend, args.action)(checked.jobs))
    return 0


def _prepare(path: str, overrides: Sequence[str]) -> 'tuple[CheckedSpec, Rendered]':
    """Check a job spec and its recipes, and render the jobs to files; return the checked spec and the files.

    Raises:
        RecipeError: The spec, its recipes or the rendered files have mistakes; the message lists them.
    """
    from diffusion.config.load import RecipeError
    from diffusion.launch.backends.base import NotValidated
    from diffusion.launch.job_checks import check_jobs, load_job_spec

    checked = check_jobs(load_job_spec(path, overrides), path)
    rendered = checked.backend.render(checked.jobs)
    try:
        problems = checked.backend.validate(rendered)
    except NotValidated as error:
        return checked, replace(rendered, notes=(*rendered.notes, str(error)))
    if problems:
        raise RecipeError(problems, path)
    return checked, rendered


def _split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into paths of job specs and KEY=VALUE overrides."""
    paths = [argument for argument in arguments if '=' not in argument]
    if not paths:
        raise UserError('launch: no job given; pass a YAML file, such as yamls/launch/phase1-slurm.yaml')
    return paths, [argument for argument in arguments if '=' in argument]


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        write_atomically(folder / name, text)


def _print_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        print(f'# {name}')
        print(text)
