"""Planned time, cost and memory of jobs, and messages if a job exceeds its time limit or the memory of a GPU."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from diffusion.errors import UserError
from diffusion.exit_codes import PREEMPTED
from diffusion.launch.job_spec import Job
from diffusion.planning import amounts
from diffusion.planning.count_cache import CountingFailed
from diffusion.planning.gpus import GPU, load_gpus
from diffusion.planning.memory import GIB
from diffusion.planning.plan import Assumptions, PhasePlan, load_phases, make_plan
from diffusion.planning.plan_table import first_line
from diffusion.planning.throughput import Cost


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
