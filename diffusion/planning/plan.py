"""The plan of one recipe, or of several in a row, on some number of GPUs."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.checks import check_devices
from diffusion.config.load import RecipeError, load
from diffusion.errors import UserError
from diffusion.planning import published_runs
from diffusion.planning.checkpoint_interval import (
    RESTART_SECONDS,
    Resilience,
    Sizes,
    default_mtbf_hours,
    resilience_of,
    sizes_of,
)
from diffusion.planning.data_volume import Storage, storage_of
from diffusion.planning.gpus import GPU
from diffusion.planning.memory import (
    GIB,
    Memory,
    Setup,
    fits_in_memory,
    largest_microbatch,
    memory_of,
    strategies,
    ways_out,
)
from diffusion.planning.run_cost import Cost, cost_of_hours, precompute_cost, training_cost
from diffusion.planning.throughput import MeasuredSpeed, Speed, planned_speed, read_run
from diffusion.planning.workload import ENCODINGS, Encoding, Phase, phase_of

HOPELESS_GOODPUT = 0.01
"""Below this goodput the plan refuses, instead of printing centuries."""
LAUNCH_SECONDS = 0.02
"""A microbatch that takes less than this waits for kernels to be launched. A rule of thumb."""


@dataclass(frozen=True)
class Assumptions:
    """The user's statements about the cluster; None leaves a choice to the plan."""

    gpu: GPU
    gpus: int
    price: float | None = None
    mfu: float | None = None
    images_per_second: float | None = None
    measured: MeasuredSpeed | None = None
    mtbf_hours: float | None = None
    stall_seconds: float | None = None
    restart_seconds: float = RESTART_SECONDS

    @property
    def price_usd_per_hour(self) -> float | None:
        return self.gpu.price_usd_per_hour if self.price is None else self.price

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpu.gpus_per_node)


@dataclass(frozen=True)
class Fit:
    """Memory of one strategy, and the largest microbatch that fits."""

    setup: Setup
    memory: Memory
    fits: bool
    largest_microbatch: int


@dataclass(frozen=True)
class Alternative:
    """Time, money and storage of one way to run the encoders: online or precomputed."""

    encoding: Encoding
    speed: Speed
    training: Cost
    precompute: Cost
    storage: Storage

    @property
    def total(self) -> Cost:
        return self.training + self.precompute


@dataclass(frozen=True)
class PhasePlan:
    """All about one recipe."""

    phase: Phase
    speed: Speed
    cost: Cost
    fit: tuple[Fit, ...]
    """The recipe's own strategy first."""
    ways_out: tuple[str, ...]
    """Settings that would make it fit, if it does not."""
    alternatives: tuple[Alternative, ...]
    """The recipe's own among them."""
    sizes: Sizes
    resilience: Resilience

    @property
    def expected(self) -> Cost:
        """Cost with saves and failures, at the best save interval."""
        return self.cost * (1 / self.resilience.goodput)


@dataclass(frozen=True)
class Plan:
    """Recipes in a row; each counts its own batches, and they add up."""

    phases: tuple[PhasePlan, ...]
    given: Assumptions
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def total(self) -> Cost:
        return sum((each.cost for each in self.phases[1:]), self.phases[0].cost)

    @property
    def expected(self) -> Cost:
        return sum((each.expected for each in self.phases[1:]), self.phases[0].expected)

    @property
    def flops(self) -> float:
        """FLOPs of training, forward and backward, without the encoders."""
        return sum(each.phase.training_flops * each.phase.images for each in self.phases)


def load_phases(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    samples: Sequence[int | None] = (),
    encoding: Encoding | None = None,
) -> list[Phase]:
    """Read recipes as amounts of work; values about the data alone may be `???`.

    Args:
        paths: The recipes, in the order of the runs.
        overrides: `key=value`, applied to every recipe.
        samples: Number of different images of each recipe's data; one number is that of all.
        encoding: What is stored of them, instead of what the recipes say.

    Raises:
        UserError: A recipe is wrong, or says too little to plan with.
    """
    if len(samples) not in (0, 1, len(paths)):
        raise UserError(f'--samples: {len(samples)} numbers for {len(paths)} recipes; give one, or one a recipe')
    counts = list(samples) * len(paths) if len(samples) == 1 else list(samples) or [None] * len(paths)
    phases = []
    for path, count in zip(paths, counts, strict=True):
        recipe = load(path, overrides, allow_missing=True)
        try:
            phases.append(phase_of(recipe, samples=count, encoding=encoding))
        except UserError as error:
            raise UserError(f'{path}: {error}') from error
    return phases


def make_plan(
    phases: Sequence[Phase], given: Assumptions, *, gpus: dict[str, GPU], today: datetime.date | None = None
) -> Plan:
    """The plan of phases that run one after another on the same GPUs.

    Raises:
        RecipeError: A batch does not divide over the GPUs.
        UserError: The GPU does not compute in a recipe's precision.
    """
    for phase in phases:
        problems = check_devices(phase.recipe, given.gpus)
        if problems:
            raise RecipeError(problems, phase.name)
    plans = tuple(_plan_phase(phase, given, gpus) for phase in phases)
    for each in plans:
        _check_progress(each.resilience)
    return Plan(plans, given, _warnings(plans, given, today or datetime.date.today()), _notes(plans, given))


def measured_in(run: Path) -> MeasuredSpeed:
    """Throughput of an earlier run, and its FLOPs per image by the recipe beside its metrics."""
    recipe = run / 'recipe.yaml'
    if not recipe.is_file():
        raise UserError(f'--from-run: {run} has no recipe.yaml; give the folder of a run, such as runs/phase1')
    return read_run(run, phase_of(load(recipe, allow_missing=True)).flops())


def _check_progress(saving: Resilience) -> None:
    if saving.goodput < HOPELESS_GOODPUT:
        raise UserError(
            f'--mtbf: a failure every {3600 * saving.mtbf_hours:.0f} s leaves nothing of a run that restarts in '
            f'{saving.restart_seconds:.0f} s and saves in {saving.stall_seconds:.0f} s; are all three in their units?'
        )


def _plan_phase(phase: Phase, given: Assumptions, gpus: dict[str, GPU]) -> PhasePlan:
    speed = speed_under(phase, given)
    fit = _fits(phase, given)
    mtbf = default_mtbf_hours(given.gpus) if given.mtbf_hours is None else given.mtbf_hours
    return PhasePlan(
        phase=phase,
        speed=speed,
        cost=training_cost(phase, speed, gpus=given.gpus, price=given.price_usd_per_hour),
        fit=fit,
        ways_out=() if fit[0].fits else tuple(ways_out(phase, fit[0].setup, given.gpu, gpus)),
        alternatives=_alternatives(phase, given),
        sizes=sizes_of(phase.recipe, phase.model),
        resilience=resilience_of(
            phase,
            images_per_second=speed.images_per_second,
            nodes=given.nodes,
            mtbf_hours=mtbf,
            stall_seconds=given.stall_seconds,
            restart_seconds=given.restart_seconds,
        ),
    )


def speed_under(phase: Phase, given: Assumptions, encoding: Encoding | None = None) -> Speed:
    """Images per second of a phase, as given by the user or found by the plan."""
    return planned_speed(
        phase,
        given.gpu,
        given.gpus,
        encoding=encoding,
        mfu=given.mfu,
        images_per_second=given.images_per_second,
        measured=given.measured,
    )


def _fits(phase: Phase, given: Assumptions) -> tuple[Fit, ...]:
    share = phase.recipe.global_batch // given.gpus
    microbatch = phase.recipe.device_train_microbatch_size
    size = microbatch if isinstance(microbatch, int) else share
    found = []
    for setup in strategies(Setup(given.gpus, size, phase.recipe.parallelism)):
        memory = memory_of(phase, setup)
        largest = largest_microbatch(phase, setup, given.gpu)
        found.append(Fit(setup, memory, fits_in_memory(memory, given.gpu), largest))
    return tuple(found)


def _alternatives(phase: Phase, given: Assumptions) -> tuple[Alternative, ...]:
    if not phase.model.is_latent_diffusion:
        encodings: tuple[Encoding, ...] = ('pictures',)
    else:
        encodings = ENCODINGS[:2] if phase.model.trains_text else ENCODINGS
    price, found = given.price_usd_per_hour, []
    for encoding in encodings:
        speed = speed_under(phase, given, encoding)
        precompute = cost_of_hours(0.0, gpus=given.gpus, price=price)
        if encoding != 'pictures':
            precompute = precompute_cost(phase, encoding, given.gpu, gpus=given.gpus, price=price)
        found.append(
            Alternative(
                encoding=encoding,
                speed=speed,
                training=training_cost(phase, speed, gpus=given.gpus, price=price),
                precompute=precompute,
                storage=storage_of(phase, encoding, images_per_second=speed.images_per_second, nodes=given.nodes),
            )
        )
    return tuple(found)


def _warnings(plans: Sequence[PhasePlan], given: Assumptions, today: datetime.date) -> tuple[str, ...]:
    found = []
    stale = given.gpu.stale(today) if given.price is None else None
    if stale is not None:
        found.append(stale)
    if given.price_usd_per_hour is None:
        found.append(f'no price of a {given.gpu.name} is known, so there are no dollars; give --price')
    for each in plans:
        if not each.fit[0].fits:
            own = each.fit[0]
            need, have = own.memory.reserved / GIB, given.gpu.memory_gib
            way_out = ', or '.join(each.ways_out) or 'a smaller model'
            found.append(
                f'{each.phase.name} does not fit: {need:.1f} GiB of {have:.1f} at a microbatch of '
                f'{own.setup.microbatch}; use {way_out}'
            )
        microbatch = each.fit[0].setup.microbatch
        seconds = microbatch * given.gpus / each.speed.images_per_second
        if seconds < LAUNCH_SECONDS and given.images_per_second is None and given.measured is None:
            found.append(
                f'{each.phase.name}: {microbatch} pictures on a GPU in {1000 * seconds:.2g} ms is faster than kernels '
                'are launched; it will be slower: measure it, and say --from-run'
            )
        if each.speed.mfu > 1:
            found.append(f'{each.phase.name}: {each.speed.mfu:.0%} of the peak is not possible; is the speed right?')
    return tuple(found)


def _notes(plans: Sequence[PhasePlan], given: Assumptions) -> tuple[str, ...]:
    found = [f'{each.phase.name}: {note}' for each in plans for note in each.phase.notes]
    unknown = [each.phase.name for each in plans if each.phase.samples is None]
    if unknown:
        found.append(
            f'{", ".join(unknown)}: how many different pictures there are is not known here, so storage and '
            'precomputing count as many as are seen; give --samples'
        )
    work = {(each.phase.largest_shape.width, each.phase.images) for each in plans}
    if work == published_runs.SAMPLES.keys() and given.gpu.name.startswith('a100') and len(plans) == len(work):
        hours = published_runs.TRAINING_HOURS + published_runs.PRECOMPUTE_HOURS
        found.append(
            f'MosaicML took {published_runs.TRAINING_HOURS:,} A100-hours to train and '
            f'{published_runs.PRECOMPUTE_HOURS:,} to precompute: {hours:,}, ${2 * hours:,} at $2 an hour'
        )
    return tuple(found)
