"""What jobs will cost, by the planner; a launch goes on without an answer, and says why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.launch.spec import Job
from diffusion.planning.gpus import GPU, load_gpus


@dataclass(frozen=True)
class Estimate:
    """Of one job, with saves and failures."""

    hours: float
    gpu_hours: float
    usd: float | None
    """None without a price."""
    warnings: tuple[str, ...] = ()


def estimate(job: Job, gpu: GPU | None) -> Estimate | str:
    """What a job will cost, or why that is not known."""
    if gpu is None:
        return 'runs on CPUs'
    from diffusion.planning.plan import Assumptions, load_phases, make_plan

    try:
        phases = load_phases([job.recipe], job.overrides)
        plan = make_plan(phases, Assumptions(gpu=gpu, gpus=job.world_size), gpus=load_gpus())
    except ValueError as error:
        return str(error).splitlines()[-1].strip()
    cost = plan.expected
    return Estimate(cost.hours, cost.gpu_hours, cost.usd, plan.warnings)


def table(jobs: Sequence[Job], gpu: GPU | None) -> tuple[list[str], list[str]]:
    """Jobs, what they run on, and what they will cost, as aligned lines; and the planner's warnings."""
    rows = [['job', 'nodes', 'GPUs', 'recipe', 'days', 'GPU-hours', 'dollars']]
    warnings: list[str] = []
    estimates = [estimate(job, gpu) for job in jobs]
    for job, found in zip(jobs, estimates, strict=True):
        gpus = f'{job.nodes * job.spec.gpus_per_node} x {job.spec.gpu}' if job.spec.gpu else 'none'
        row = [job.name, str(job.nodes), gpus, job.recipe]
        if isinstance(found, str):
            rows.append([*row, 'no cost', found, ''])
        else:
            rows.append([*row, *_cells(found.hours, found.gpu_hours, found.usd)])
            warnings += found.warnings
    known = [each for each in estimates if isinstance(each, Estimate)]
    if len(jobs) > 1 and len(known) == len(jobs):
        dollars = [each.usd for each in known]
        usd = None if None in dollars else sum(dollar for dollar in dollars if dollar is not None)
        rows.append(['in all', '', '', '', *_cells(sum(e.hours for e in known), sum(e.gpu_hours for e in known), usd)])
    widths = [max(len(row[column]) for row in rows if row[4] != 'no cost' or column < 4) for column in range(7)]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines, warnings


def _cells(hours: float, gpu_hours: float, usd: float | None) -> list[str]:
    return [f'{hours / 24:.2f}', f'{gpu_hours:,.0f}', 'no price' if usd is None else f'${usd:,.0f}']
