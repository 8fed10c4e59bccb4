"""Cost estimates of jobs from the planner. A job without an estimate can still be launched."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.errors import UserError
from diffusion.launch.job_spec import Job
from diffusion.planning.count_cache import CountingFailed
from diffusion.planning.gpus import GPU, load_gpus
from diffusion.planning.plan import Assumptions, load_phases, make_plan
from diffusion.planning.throughput import Cost


@dataclass(frozen=True)
class Estimate:
    """Cost estimate of one job."""

    cost: Cost
    """Expected cost, including the time of saves and failures."""
    price_usd_per_gpu_hour: float | None
    warnings: tuple[str, ...]


def estimate(job: Job, gpu: GPU | None) -> Estimate | str:
    """Return the cost estimate of a job, or a text with the reason why the cost cannot be estimated."""
    if gpu is None:
        return 'runs on CPUs'
    try:
        phases = load_phases([job.recipe], job.overrides)
        given = Assumptions(gpu=gpu, gpus=job.world_size, price=job.spec.price_usd_per_gpu_hour)
        plan = make_plan(phases, given, gpus=load_gpus())
    except (UserError, CountingFailed) as error:
        return str(error).splitlines()[-1].strip()
    # The planner warns in terms of the options of `diffusion plan`; a job spec has a key instead.
    warnings = tuple(re.sub(r'pass --price.*', 'set price_usd_per_gpu_hour', warning) for warning in plan.warnings)
    # The job only trains; the latents that it may read are encoded by another.
    return Estimate(plan.phases[0].expected, given.price_usd_per_hour, warnings)


def cost_table(jobs: Sequence[Job], gpu: GPU | None) -> tuple[list[str], list[str]]:
    """Return the lines of a table of jobs with their machines and costs, and the warnings of the planner."""
    rows = [['job', 'nodes', 'GPUs', 'recipe', 'days', 'GPU-hours', 'dollars']]
    warnings: list[str] = []
    estimates = [estimate(job, gpu) for job in jobs]
    for job, found in zip(jobs, estimates, strict=True):
        gpus = f'{job.nodes * job.spec.gpus_per_node} x {job.spec.gpu}' if job.spec.gpu else 'none'
        row = [job.name, str(job.nodes), gpus, job.recipe]
        if isinstance(found, str):
            rows.append([*row, 'no cost', found, ''])
        else:
            rows.append([*row, *_cells(found.cost)])
            warnings += found.warnings
    known = [each.cost for each in estimates if isinstance(each, Estimate)]
    if len(jobs) > 1 and len(known) == len(jobs):
        rows.append(['total', '', '', '', *_cells(sum(known[1:], known[0]))])
    # A reason why there is no estimate may be long; it must not widen the column of days.
    widths = [max(len(row[column]) for row in rows if row[4] != 'no cost' or column < 4) for column in range(7)]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    prices = {each.price_usd_per_gpu_hour for each in estimates if isinstance(each, Estimate)} - {None}
    lines += [f'at ${price:,.2f} per GPU-hour, including the time of saves and failures' for price in prices]
    return lines, warnings


def _cells(cost: Cost) -> list[str]:
    """Return the table cells of a cost: days, GPU-hours and dollars."""
    return [f'{cost.days:.2f}', f'{cost.gpu_hours:,.0f}', 'no price' if cost.usd is None else f'${cost.usd:,.0f}']
