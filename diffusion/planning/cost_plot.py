"""Plot of training days and cost against the number of GPUs, as a PNG."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.config.device_checks import check_devices
from diffusion.planning.plan import Plan
from diffusion.planning.throughput import Assumptions, Cost, planned_speed, training_cost
from diffusion.planning.workload import Phase
from diffusion.storage.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Callable[[float], str]
COLORS = ('#4477aa', '#ee6677', '#228833', '#ccbb44', '#66ccee', '#aa3377')


def counts_around(phases: Sequence[Phase], chosen: int, gpus_per_node: int | None = None) -> list[int]:
    """Return the GPU counts to plot: powers of two, and powers of two times the odd factor of `chosen` (3 for 24).

    Numbers of GPUs or nodes that do not divide a recipe's global batch are left out.
    """
    odd = chosen // (chosen & -chosen)  # chosen & -chosen is the largest power of two that divides chosen
    counts = {chosen, *(factor * 2**power for factor in (1, odd) for power in range(15))}
    lowest, highest = max(1, min(8, chosen // 4)), max(256, 4 * chosen)
    return sorted(
        count
        for count in counts
        if lowest <= count <= highest and not any(check_devices(phase.recipe, count, gpus_per_node) for phase in phases)
    )


def costs_at(phases: Sequence[Phase], given: Assumptions, gpus: int) -> list[Cost]:
    """Return the cost of each training phase on `gpus` GPUs, assuming that measured throughput scales linearly."""
    scaled = replace(given, gpus=gpus)
    if given.images_per_second is not None:
        scaled = replace(scaled, images_per_second=given.images_per_second * gpus / given.gpus)
    return [training_cost(phase, planned_speed(phase, scaled), scaled) for phase in phases]


def draw(plan: Plan, out: Path) -> None:
    """Write a PNG of training days (left) and dollars, or GPU-hours without a price (right), by number of GPUs."""
    # Import these here: a plan without a plot does not need them. Avoid pyplot, which may select a backend that
    # requires a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases, given = [each.phase for each in plan.phases], plan.given
    counts = counts_around(phases, given.gpus, given.gpu.gpus_per_node)
    costs = [costs_at(phases, given, count) for count in counts]
    price = given.price_usd_per_hour
    columns = dict(zip((phase.name for phase in phases), zip(*costs, strict=True), strict=True))
    days, money = {}, {}
    for name, column in columns.items():
        days[name] = [cost.days for cost in column]
        money[name] = [cost.gpu_hours if cost.usd is None else cost.usd for cost in column]
    figure = Figure(figsize=(10, 4.2), layout='constrained')
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _bars(left, days, counts, given, _days)
    _bars(right, money, counts, given, '{:,.0f}'.format if price is None else _money)
    left.set_title('training days', loc='left', fontsize=10)
    title = 'GPU-hours' if price is None else f'dollars at ${price:.2f} per GPU-hour'
    right.set_title(title, loc='left', fontsize=10)
    if len(phases) > 1:
        left.legend(frameon=False)
    with atomic_file(out) as unfinished:
        figure.savefig(unfinished, dpi=150, format='png')


def _bars(
    axes: 'Axes', values: Mapping[str, Sequence[float]], counts: Sequence[int], given: Assumptions, form: Form
) -> None:
    """Draw a stacked bar with its sum for each number of GPUs; the plan's own number of GPUs is in bold."""
    positions, tops = range(len(counts)), [0.0] * len(counts)
    for index, (name, heights) in enumerate(values.items()):
        axes.bar(positions, heights, bottom=tops, color=COLORS[index % len(COLORS)], width=0.7, label=name)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    above: dict[str, Any] = {'xytext': (0, 2), 'textcoords': 'offset points', 'ha': 'center', 'fontsize': 8}
    for position, top in zip(positions, tops, strict=True):
        weight = 'bold' if counts[position] == given.gpus else 'normal'
        axes.annotate(form(top), (position, top), weight=weight, **above)
    axes.set_xticks(list(positions), [str(count) for count in counts])
    axes.get_xticklabels()[counts.index(given.gpus)].set_fontweight('bold')
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value, dollars=form is _money))
    axes.margins(y=0.12)
    axes.set_xlabel(f'number of {given.gpu.name}')
    axes.spines[['top', 'right']].set_visible(False)
    axes.grid(axis='y', alpha=0.3)
    axes.set_axisbelow(True)


def _days(value: float) -> str:
    return f'{value:.0f}' if value >= 100 else f'{value:.1f}' if value >= 1 else f'{value:.2g}'


def _money(value: float) -> str:
    return f'${value / 1000:,.1f}k' if value >= 1000 else f'${value:,.0f}'


def _tick(value: float, *, dollars: bool) -> str:
    return f'${value / 1000:,g}k' if dollars and value >= 1000 else f'${value:,g}' if dollars else f'{value:,g}'
