"""`diffusion launch`, `run_preflight`, `status`, `logs` and `cancel`."""

import argparse
import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.errors import UserError
from diffusion.storage.atomic import write_whole

if TYPE_CHECKING:
    from diffusion.launch.backends.base import Rendered
    from diffusion.launch.job_checks import Checked

_ASKED = dict.fromkeys(('logs', 'cancel'), "the job's YAML, as it was launched") | {
    'status': "the job's YAML, as it was launched; or the folder of a run, for its attempts and goodput"
}


def add_launch(parser: argparse.ArgumentParser) -> None:
    """The arguments of `diffusion launch`."""
    parser.add_argument(
        'specs', nargs='+', metavar='SPEC', help="jobs' YAML files, then KEY=VALUE for all, such as nodes=2"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument('--dry-run', action='store_true', help='check, render, validate and cost; submit nothing')
    what.add_argument('--render', action='store_true', help='print the files that would be submitted')
    parser.add_argument('--out', type=Path, metavar='DIR', help='write the files there too')
    parser.set_defaults(run=run_launch, overrides=[])


def add_job(parser: argparse.ArgumentParser, action: str) -> None:
    """The arguments of `diffusion status`, `logs` and `cancel`."""
    parser.add_argument('spec', metavar='SPEC', help=_ASKED[action])
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='as they were given to launch')
    parser.set_defaults(run=ask, action=action)


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """The arguments of `diffusion preflight`."""
    parser.add_argument('recipe', help='a YAML file: its streams and its folder of checkpoints are tried')
    parser.add_argument('overrides', nargs='*', metavar='KEY=VALUE', help='as for run.py')
    parser.add_argument('--deep', action='store_true', help='minutes instead of seconds: heat, and links between nodes')
    parser.add_argument(
        '--gpu', metavar='KIND', help='that must be there, such as h100-sxm (default: whatever there is)'
    )
    parser.add_argument('--processes', type=int, metavar='N', help='of a node (default: one a GPU)')
    parser.set_defaults(run=run_preflight)


def run_preflight(args: argparse.Namespace) -> int:
    """Check this machine; under `srun`, with one task a node, all of them together.

    Raises:
        UserError: The recipe or the kind of GPU is wrong, or a scheduler's variables contradict each other.
    """
    from diffusion.launch import environment, node
    from diffusion.launch.rank_discovery import count_gpus
    from diffusion.planning.gpus import find_gpu, load_gpus

    kind = 'any' if count_gpus(os.environ) else 'none'
    if args.gpu is not None:
        kind = find_gpu(args.gpu, load_gpus(), or_file=False).name
    said = {environment.PREFLIGHT: 'deep' if args.deep else 'fast', environment.GPU: kind}
    if args.processes is not None:
        said[environment.PROCESSES_PER_NODE] = str(args.processes)
    return node.run_node_preflight([args.recipe, *args.overrides], os.environ | said)


def run_launch(args: argparse.Namespace) -> int:
    """Check, render, validate and cost every job, and then submit them; nothing is submitted where one is wrong.

    Raises:
        UserError: A spec, or a recipe in it, is wrong; or a scheduler refuses.
    """
    from diffusion.launch.job_cost import cost_table

    paths, overrides = _split([*args.specs, *args.overrides])
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
        for problem in checked.absent:
            print(f'  before it can be submitted: {problem}')
    if args.render:
        return 0
    for warning in warnings:
        print(f'warning: {warning}')
    if args.dry_run:
        print('ok; nothing was submitted')
        return 0
    absent = [problem for _, checked, _ in prepared for problem in checked.absent]
    if absent:
        raise UserError('nothing was submitted:\n  ' + '\n  '.join(str(problem) for problem in absent))
    for _, checked, rendered in prepared:
        with tempfile.TemporaryDirectory(prefix='diffusion-launch-') as folder:
            _write(rendered.files, Path(folder))
            print(checked.backend.submit(checked.jobs, rendered, Path(folder)))
    return 0


def ask(args: argparse.Namespace) -> int:
    """Ask the scheduler of a job about it, or to stop it.

    Raises:
        UserError: The spec is wrong, or the scheduler does not answer.
    """
    from diffusion.launch.job_checks import check_jobs, load_job_spec

    if args.action == 'status' and Path(args.spec).is_dir():
        print(importlib.import_module('diffusion.launch.attempts').report(Path(args.spec)))
        return 0
    if args.action == 'status' and not Path(args.spec).exists():
        raise UserError(f"status: {args.spec} is not there; give a run's folder, such as runs/phase1, or a job's YAML")
    checked = check_jobs(load_job_spec(args.spec, args.overrides), args.spec)
    print(getattr(checked.backend, args.action)(checked.jobs))
    return 0


def _prepare(path: str, overrides: Sequence[str]) -> 'tuple[Checked, Rendered]':
    """The checked spec and what it renders to.

    Raises:
        RecipeError: With every mistake, of the spec, its recipes, or what is rendered.
    """
    from diffusion.config.load import RecipeError
    from diffusion.launch.job_checks import check_jobs, load_job_spec

    checked = check_jobs(load_job_spec(path, overrides), path)
    rendered = checked.backend.render(checked.jobs)
    problems = checked.backend.validate(rendered)
    if problems:
        raise RecipeError(problems, path)
    return checked, rendered


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    paths = [word for word in words if '=' not in word]
    if not paths:
        raise UserError('launch: no job is given; name a YAML file, such as yamls/launch/phase1-slurm.yaml')
    return paths, [word for word in words if '=' in word]


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        write_whole(folder / name, text)


def _print_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        print(f'# {name}')
        print(text)
