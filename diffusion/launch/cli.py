"""Subcommands `diffusion launch`, with its estimates of time and cost, `preflight`, `status`, `logs` and `cancel`."""

import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from diffusion.config.load import RecipeError
from diffusion.config.options import DIR, Option, Overrides, RecipeFile
from diffusion.errors import ExternalError, UserError, printable
from diffusion.exit_codes import PREEMPTED
from diffusion.launch import node
from diffusion.launch.backends.base import NotValidated, Rendered
from diffusion.launch.job_checks import CheckedSpec, check_jobs, load_job_spec
from diffusion.launch.job_spec import Job
from diffusion.launch.rank_discovery import count_gpus
from diffusion.planning import amounts
from diffusion.planning.count_cache import CountingFailed
from diffusion.planning.gpus import GPU, find_gpu, load_gpus
from diffusion.planning.memory import GIB
from diffusion.planning.plan import Assumptions, PhasePlan, load_phases, make_plan
from diffusion.planning.plan_table import first_line
from diffusion.planning.throughput import Cost
from diffusion.runs import environment
from diffusion.runs.run_status import format_report, inspect_run
from diffusion.storage.atomic import write_atomically
from diffusion.storage.places import is_url


@dataclass(frozen=True)
class LaunchOptions:
    """Options of `diffusion launch`."""

    specs: Annotated[list[str], Option('SPEC', positional=True, trailing=True, files=True)]
    """YAML files of the jobs, followed by KEY=VALUE overrides for all of them, such as nodes=2."""
    dry_run: Annotated[bool, Option(excludes='submission')] = False
    """Check, render and validate the jobs and estimate their cost, without submitting them."""
    render: Annotated[bool, Option(excludes='submission')] = False
    """Print the files that would be submitted, and exit."""
    out: Annotated[Path | None, DIR] = None
    """Folder to which the files are also written (default: none)."""


@dataclass(frozen=True)
class JobOptions:
    """Options of `diffusion logs` and `cancel`."""

    spec: Annotated[str, Option(positional=True, files=True)]
    """YAML file of the job, as passed to `diffusion launch`."""
    overrides: Overrides = field(default_factory=list)
    """Overrides that were passed to `diffusion launch`."""


@dataclass(frozen=True)
class StatusOptions(JobOptions):
    """Options of `diffusion status`."""

    spec: Annotated[str, Option(positional=True, files=True)]
    """YAML file of the job, as passed to `diffusion launch`; or the folder or URL of a run, to print its state
    (running, silent or ended), batch, speed, time left, nodes, newest checkpoint, attempts, goodput."""
    json: bool = False
    """Print the status of a run as JSON, for scripts."""


@dataclass(frozen=True)
class PreflightOptions:
    """Options of `diffusion preflight`."""

    recipe: RecipeFile
    """YAML file of a recipe, whose streams and run folder are checked."""
    overrides: Overrides = field(default_factory=list)
    """Overrides of recipe values, such as global_batch=64."""
    deep: bool = False
    """Also check the links between nodes, and the GPUs under sustained load; takes minutes instead of seconds."""
    gpu: str | None = None
    """Name of the GPU model that every node must have, such as h100-sxm (default: any)."""
    processes: int | None = None
    """Number of processes per node (default: one per GPU)."""


def run_preflight(options: PreflightOptions) -> int:
    """Run `diffusion preflight`: check this machine, or all nodes together under `srun` with one task per node.

    Raises:
        UserError: The recipe or the GPU model is wrong, or the scheduler's environment variables contradict each other.
    """
    kind = 'any' if count_gpus(os.environ) else 'none'
    if options.gpu is not None:
        kind = find_gpu(options.gpu, load_gpus(), or_file=False).name
    settings = {environment.PREFLIGHT: 'deep' if options.deep else 'fast', environment.GPU: kind}
    if options.processes is not None:
        settings[environment.PROCESSES_PER_NODE] = str(options.processes)
    return node.run_node_preflight([options.recipe, *options.overrides], os.environ | settings)


def run_launch(options: LaunchOptions) -> int:
    """Run `diffusion launch`: check all jobs, print their cost and submit them; submit none if any has a mistake.

    Raises:
        UserError: A job spec or its recipe is wrong, the scheduler's command-line tool is missing, or in a dry run, a
            job would exceed its time limit or the memory of a GPU.
        ExternalError: A scheduler refuses a job or does not respond, or a local job failed.
    """
    paths = [word for word in options.specs if '=' not in word]
    overrides = [word for word in options.specs if '=' in word]
    if not paths:
        raise UserError('launch: no job given; pass a YAML file, such as yamls/launch/phase1-slurm.yaml')
    # Prepare all jobs before any is submitted, so that no job is submitted if a later one has a mistake.
    prepared = [(path, *_prepare(path, overrides)) for path in paths]
    warnings, problems = dict[str, None](), list[str]()
    for path, checked, rendered in prepared:
        if options.out is not None:
            _write(rendered.files, options.out)
        if options.render:
            for name, text in rendered.files.items():
                print(f'# {name}\n{text}')
            continue
        print(f'{path}: {checked.spec.backend}')
        estimates = [estimate(job, checked.gpu) for job in checked.jobs]
        for found in estimates:
            if isinstance(found, JobEstimate):
                warnings |= dict.fromkeys(found.warnings)
                problems += found.problems
        if options.dry_run:
            warnings |= dict.fromkeys(checked.data_problems())
        lines = estimates_table(checked.jobs, estimates)
        lines += [f'submit: {" ".join(command)}' for command in rendered.commands]
        lines += [f'note: {note}' for note in rendered.notes]
        lines += [f'required before submission: {problem}' for problem in checked.missing_secrets]
        for line in lines:
            print(f'  {line}')
    if options.render:
        return 0
    # Only a dry run fails on the planner's estimates, so that a wrong one cannot prevent a job.
    for warning in [*warnings, *([] if options.dry_run else problems)]:
        print(f'warning: {warning}')
    if options.dry_run:
        if problems:
            raise UserError('\n  '.join(problems))
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


def run_status(options: StatusOptions) -> int:
    """Run `diffusion status`: print the status of a job, or the progress and attempts of a run.

    Raises:
        UserError: The spec is wrong, or the scheduler's command-line tool is missing.
        ExternalError: The scheduler does not respond.
    """
    spec = options.spec
    if is_url(spec) or Path(spec).is_dir():
        try:
            report = inspect_run(spec if is_url(spec) else Path(spec))
        except OSError as error:
            if not is_url(spec):
                raise
            raise ExternalError(f'status: {error}') from error
        print(json.dumps(asdict(report), indent=2) if options.json else printable(format_report(report)))
        return 0
    if options.json:
        raise UserError(f'status: --json needs a run folder, such as runs/phase1; {spec} is not a folder')
    if not Path(spec).exists():
        raise UserError(f'status: {spec} does not exist; use the folder of a run, such as runs/phase1, or a job YAML')
    checked = _checked(options)
    print(checked.backend.status(checked.jobs))
    return 0


def run_logs(options: JobOptions) -> int:
    """Run `diffusion logs`: print the end of a job's log. Raises the same errors as `run_status`."""
    checked = _checked(options)
    print(checked.backend.logs(checked.jobs))
    return 0


def run_cancel(options: JobOptions) -> int:
    """Run `diffusion cancel`: cancel a job. Raises the same errors as `run_status`."""
    checked = _checked(options)
    print(checked.backend.cancel(checked.jobs))
    return 0


def _checked(options: JobOptions) -> CheckedSpec:
    return check_jobs(load_job_spec(options.spec, options.overrides), options.spec)


def _prepare(path: str, overrides: Sequence[str]) -> tuple[CheckedSpec, Rendered]:
    """Check and render a job spec; return the checked spec and the files, or raise RecipeError with all mistakes."""
    checked = check_jobs(load_job_spec(path, overrides), path)
    rendered = checked.backend.render(checked.jobs)
    try:
        problems = checked.backend.validate(rendered)
    except NotValidated as error:
        return checked, replace(rendered, notes=(*rendered.notes, str(error)))
    if problems:
        raise RecipeError(problems, path)
    return checked, rendered


def _write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        write_atomically(folder / name, text)


class JobEstimate(NamedTuple):
    """Planned cost of one job, including time lost to saves and failures."""

    cost: Cost
    price_usd_per_gpu_hour: float | None
    hint: str | None
    """First line of the plan, which names faster settings; None if the planner found none."""
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    """Reasons why the job cannot finish as planned."""


def estimate(job: Job, gpu: GPU | None) -> JobEstimate | str:
    """Return the planned cost of a job, or the reason why it cannot be planned."""
    if gpu is None:
        return 'runs on CPUs'
    if job.task != 'train':
        return f'only training is planned, not {job.task}'
    try:
        phases = load_phases([job.recipe], job.overrides)
        given = Assumptions(gpu=gpu, gpus=job.world_size, price=job.spec.price_usd_per_gpu_hour)
        plan = make_plan(phases, given, gpus=load_gpus())
    except (UserError, CountingFailed) as error:
        return str(error).splitlines()[-1].strip()
    # Count only the training phase: latents are encoded by another job.
    (planned,) = plan.phases
    hint = None if planned.faster is None else first_line(planned, gpu, name=job.name, expected=True)
    # The planner's warnings name options of `diffusion plan`; name the corresponding keys of the job spec instead.
    warnings = [re.sub(r'pass --price.*', 'set price_usd_per_gpu_hour', text) for text in plan.warnings]
    warnings = [text.replace('--gpu ', 'gpu: ') for text in warnings]
    problems = []
    if planned.fit[0].memory.allocated > gpu.memory_gib * GIB:
        problems = [text for text in warnings if text.startswith(f'{planned.phase.name} does not fit')]
    over, can_end = _over_time_limit(job, planned)
    (warnings if can_end else problems).extend(over)
    warnings = tuple(text for text in warnings if text not in problems)
    return JobEstimate(planned.expected, given.price_usd_per_hour, hint, warnings, tuple(problems))


def requeues(job: Job) -> bool:
    """Return True if the scheduler restarts this job after the job has saved at its time limit."""
    restart = job.spec.restart
    retries = restart.max_restarts > 0 and restart.actions()[PREEMPTED] != 'stop'
    return retries and job.spec.backend in ('slurm', 'kubernetes')


def _over_time_limit(job: Job, planned: PhasePlan) -> tuple[list[str], bool]:
    """Return a message if a job is planned to exceed its time limit, and True if it can finish despite the limit."""
    hours, limit = planned.expected.hours, job.time_limit_seconds
    if limit is None or hours <= limit / 3600:
        return [], True
    text = f'{job.name}: {amounts.run_time(hours)} planned, but its time_limit is {amounts.run_time(limit / 3600)}'
    if not requeues(job):
        return [f'{text}, at which {job.spec.backend} ends it for good; raise time_limit, or train faster'], False
    times = math.ceil(hours * 3600 / limit) - 1
    return [f'{text}; it requeues itself {times:,} time{"s" * (times > 1)} and resumes'], True


def estimates_table(jobs: Sequence[Job], estimates: Sequence[JobEstimate | str]) -> list[str]:
    """Return the lines of a table with one row per job, followed by the price and by faster settings, if any."""
    rows = [['job', 'nodes', 'GPUs', 'recipe', 'time', 'GPU-hours', 'dollars']]
    for job, found in zip(jobs, estimates, strict=True):
        gpus = f'{job.nodes * job.spec.gpus_per_node} x {job.spec.gpu}' if job.spec.gpu else 'none'
        row = [job.name, str(job.nodes), gpus, job.recipe]
        rows.append([*row, 'no cost', found, ''] if isinstance(found, str) else [*row, *_cells(found.cost)])
    known = [each for each in estimates if isinstance(each, JobEstimate)]
    if len(jobs) > 1 and len(known) == len(jobs):
        rows.append(['total', '', '', '', *_cells(sum((each.cost for each in known[1:]), known[0].cost))])
    # Ignore rows without a cost here: they contain the reason, which may be long, in the column of GPU-hours.
    widths = [max(len(row[column]) for row in rows if row[4] != 'no cost' or column < 4) for column in range(7)]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    prices = {each.price_usd_per_gpu_hour for each in known} - {None}
    lines += [f'at ${price:,.2f} per GPU-hour, including the time of saves and failures' for price in prices]
    return lines + [each.hint for each in known if each.hint is not None]


def _cells(cost: Cost) -> list[str]:
    return [amounts.run_time(cost.hours), amounts.gpu_hours(cost), amounts.dollars(cost) or 'no price']
