"""Print what `diffusion plan` computes: costs of the 24-hour run on each GPU and of every recipe, and goodputs.

    python benchmarks/plans.py

The tables of the 24-hour run and of the goodput of save strategies are those of docs/planning.md; the figures of the
recipes are those of their headers. Takes seconds.
"""

from collections.abc import Iterator
from pathlib import Path

from diffusion.planning.checkpoints import LLAMA3_GPUS, LLAMA3_HOURS_BETWEEN_FAILURES
from diffusion.planning.goodput_simulation import save_strategies, simulated_goodput
from diffusion.planning.gpus import GPU, load_gpus
from diffusion.planning.memory import GIB
from diffusion.planning.plan import Plan, load_phases, make_plan
from diffusion.planning.throughput import Assumptions
from diffusion.planning.workload import Phase

YAMLS = Path(__file__).parents[1] / 'yamls'
SPEEDRUN = ('speedrun', 'speedrun_1024')
SAMPLES = 8_700_000
"""Distinct images of the 24-hour run."""
COUNTS = 8, 16, 32
RECIPES: tuple[tuple[tuple[str, ...], str, int, float], ...] = (
    (('phase1', 'phase2'), 'a100-80gb', 128, 2.0),
    (('phase1-latents', 'phase2-latents'), 'a100-80gb', 128, 2.0),
    (('sdxl', 'sdxl_512', 'sdxl_1024'), 'a100-80gb', 128, 2.0),
    (SPEEDRUN, 'h200', 32, 2.0),
    (('prx_256',), 'h200', 8, 4.0),
    (('i1_256',), 'h100-sxm', 8, 2.0),
    (('i1_3b_256', 'i1_3b_512', 'i1_3b_1024'), 'h100-sxm', 64, 2.0),
    (('prxpixel_7b',), 'h200', 64, 4.0),
    (('mmdit',), 'h200', 128, 4.0),
    (('finetune',), 'a100-80gb', 1, 2.0),
    (('lora',), 'a100-80gb', 1, 2.0),
)
"""Recipes that run one after another, with the GPU, the number of GPUs and the price per GPU-hour of their headers."""

MTBF_HOURS = 3, 24, 386
STALL_SECONDS, RESTART_SECONDS = 60.0, 240.0
"""Seconds of a synchronous save and of a restart in the table of goodputs."""


def main() -> None:
    """Print the tables."""
    gpus = load_gpus()
    print('\n'.join([*speedrun_rows(gpus), '', *recipe_rows(gpus), '', *goodput_rows()]))


def speedrun_rows(gpus: dict[str, GPU]) -> Iterator[str]:
    """Yield the lines of a table of the 24-hour run on each GPU that computes in bfloat16."""
    yield (
        '| GPU | price per GPU-hour | ' + ' | '.join(f'hours on {count}' for count in COUNTS) + ' | dollars | memory |'
    )
    yield '|---' * (4 + len(COUNTS)) + '|'
    phases = phases_of(SPEEDRUN)
    for gpu in gpus.values():
        if 'bf16' not in gpu.peak_tflops:
            continue
        plans = [make_plan(phases, Assumptions(gpu, count), gpus=gpus) for count in COUNTS]
        usd = plans[0].training.usd
        cells = [gpu.name, dollars(gpu.price_usd_per_hour, 2)]
        cells += [f'{plan.training.hours:,.1f}' for plan in plans]
        yield f'| {" | ".join([*cells, dollars(usd, 0), memory(plans[0])])} |'


def dollars(amount: float | None, digits: int) -> str:
    return 'unknown' if amount is None else f'${amount:,.{digits}f}'


def memory(plan: Plan) -> str:
    """Return the most memory in GiB of a phase, or the largest microbatch of each that fits if one does not fit."""
    fits = [each.fit[0] for each in plan.phases]
    if all(fit.fits for fit in fits):
        return f'{max(fit.memory.reserved for fit in fits) / GIB:.0f} GiB'
    return 'microbatch ' + ', '.join(str(fit.largest_microbatch or 'none fits') for fit in fits)


def recipe_rows(gpus: dict[str, GPU]) -> Iterator[str]:
    """Yield the lines of a table of all recipes that are made for GPUs."""
    yield '| recipe | GPUs | days | GPU-hours | dollars | assumed |'
    yield '|---|---|---|---|---|---|'
    for names, gpu, count, price in RECIPES:
        plan = make_plan(phases_of(names), Assumptions(gpus[gpu], count, price=price), gpus=gpus)
        for each in plan.phases:
            cost = each.cost
            yield (
                f'| {each.phase.name} | {count} {gpu} at ${price:.2f} | {cost.days:.2f} | {cost.gpu_hours:,.0f} | '
                f'${cost.usd:,.0f} | {each.speed.source} |'
            )


def goodput_rows() -> Iterator[str]:
    """Yield the lines of a table of the simulated goodput of each save strategy."""
    yield '| one failure every | GPUs | synchronous, every 30 min | synchronous | asynchronous | tiers |'
    yield '|---|---|---|---|---|---|'
    for hours in MTBF_HOURS:
        mtbf = 3600.0 * hours
        strategies = save_strategies(stall=STALL_SECONDS, restart=RESTART_SECONDS, mtbf=mtbf, recipe_interval=1800)
        goodputs = [simulated_goodput(each, mtbf=mtbf, restart=RESTART_SECONDS) for each in strategies]
        gpus = float(f'{LLAMA3_GPUS * LLAMA3_HOURS_BETWEEN_FAILURES / hours:.2g}')
        yield f'| {hours} h | {gpus:,.0f} | {" | ".join(f"{each:.3f}" for each in goodputs)} |'


def phases_of(names: tuple[str, ...]) -> list[Phase]:
    """Return the phases of a plan: recipes that run one after another."""
    samples = [SAMPLES] if names == SPEEDRUN else []
    return load_phases([str(YAMLS / f'{name}.yaml') for name in names], samples=samples)


if __name__ == '__main__':
    main()
