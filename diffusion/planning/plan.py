"""Plan for one recipe, or for several recipes that run one after another, on a given number of GPUs."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.config.device_checks import check_devices
from diffusion.config.load import RecipeError, load
from diffusion.config.model_checks import trains_on_pairs
from diffusion.errors import UserError
from diffusion.planning import checkpoints, published_runs, throughput
from diffusion.planning.checkpoints import Resilience, Sizes
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
from diffusion.planning.strategy_advice import Fit, advice, changed_settings, communication_bytes, faster_phase
from diffusion.planning.throughput import NO_COST, Assumptions, Cost, Speed, Technique, planned_speed, training_cost
from diffusion.planning.workload import ENCODINGS, Encoding, Phase, phase_of, repetition_warnings

HOPELESS_GOODPUT = 0.01
"""Goodput below which planning fails instead of printing a run time of centuries."""
LAUNCH_SECONDS = 0.02
"""Rule of thumb: a microbatch that takes fewer seconds is assumed to be bound by kernel launches."""


@dataclass(frozen=True)
class Alternative:
    """Time, cost and storage for one way to run the frozen encoders, online or precomputed."""

    encoding: Encoding
    speed: Speed
    training: Cost
    precompute: Cost
    storage: Storage

    @property
    def total(self) -> Cost:
        return self.training + self.precompute


@dataclass(frozen=True)
class Faster:
    """Other settings that make a recipe faster, or make it fit in memory, with the cost of training with them."""

    settings: tuple[str, ...]
    """Overrides of the recipe, such as device_train_microbatch_size=128."""
    cost: Cost
    """Cost of the batches alone."""
    expected: Cost
    """Cost including saves and failures."""
    memory: Memory


@dataclass(frozen=True)
class PhasePlan:
    """Plan of one recipe: throughput, cost, memory, storage and checkpoints."""

    phase: Phase
    speed: Speed
    cost: Cost
    """Cost of the batches alone, without evaluation, saves and failures."""
    fit: tuple[Fit, ...]
    """Memory under each parallelism strategy, the recipe's own first."""
    ways_out: tuple[str, ...]
    """Changes that would each make the recipe fit in memory; empty if it fits, or if no change suffices."""
    alternatives: tuple[Alternative, ...]
    """All ways to run the encoders, including the recipe's."""
    sizes: Sizes
    snapshot_bytes: int
    """Bytes of host memory for snapshots and the memory tier on the node that needs the most; 0 without either."""
    resilience: Resilience
    techniques: tuple[Technique, ...]
    """Effect of each training technique in the recipe on throughput."""
    faster: Faster | None

    @property
    def expected(self) -> Cost:
        """Cost of training, including saves and failures at the optimal save interval but not precomputing."""
        return self.cost * (1 / self.resilience.goodput)

    @property
    def microbatch_seconds(self) -> float:
        setup = self.fit[0].setup
        return setup.microbatch * setup.devices / self.speed.images_per_second

    @property
    def is_bound_by_launches(self) -> bool:
        """True if an assumed MFU does not apply, because the GPU runs kernels faster than the host launches them."""
        return not self.speed.is_measured and self.microbatch_seconds < LAUNCH_SECONDS

    @property
    def precompute(self) -> Cost:
        """Cost of encoding the recipe's data to its stored form before training."""
        return next(each.precompute for each in self.alternatives if each.encoding == self.phase.encoding)


@dataclass(frozen=True)
class Plan:
    """Plan for recipes that run one after another. Batches are counted per recipe, and totals are sums over recipes."""

    phases: tuple[PhasePlan, ...]
    given: Assumptions
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def training(self) -> Cost:
        return sum((each.cost for each in self.phases), NO_COST)

    @property
    def precompute(self) -> Cost:
        """Cost of encoding the data of all recipes before training."""
        return sum((each.precompute for each in self.phases), NO_COST)

    @property
    def total(self) -> Cost:
        return self.training + self.precompute

    @property
    def expected(self) -> Cost:
        """Cost including saves, failures and precomputing."""
        return sum((each.expected for each in self.phases), NO_COST) + self.precompute

    @property
    def goodput(self) -> float:
        """Fraction of training time that is not spent on saves, failures and repeated batches."""
        return self.training.hours / (self.expected.hours - self.precompute.hours)

    @property
    def published(self) -> published_runs.PublishedRun | None:
        if len(self.phases) != len({each.phase.largest_shape for each in self.phases}):
            return None
        work = {(each.phase.largest_shape.width, each.phase.images) for each in self.phases}
        return published_runs.published_run(work, self.phases[0].phase.model.trained_parameters)

    @property
    def flops(self) -> float:
        """FLOPs of the trained modules in all forward and backward passes of all recipes."""
        return sum(each.phase.training_flops * each.phase.images for each in self.phases)


def load_phases(
    paths: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    samples: Sequence[int | None] = (),
    encoding: Encoding | None = None,
) -> list[Phase]:
    """Load recipes, and return the amount of work in each. The location of the data may still be `???`.

    `samples`: Number of distinct images, one for all recipes or one per recipe; None takes it from the recipe.
    """
    if len(samples) not in (0, 1, len(paths)):
        raise UserError(f'--samples: {len(samples)} numbers for {len(paths)} recipes; pass one, or one per recipe')
    counts = list(samples) * len(paths) if len(samples) == 1 else list(samples) or [None] * len(paths)
    phases = []
    for path, count in zip(paths, counts, strict=True):
        recipe = load(path, overrides, allow_missing=True)
        try:
            phases.append(phase_of(recipe, samples=count, encoding=encoding))
        except UserError as error:
            raise UserError(f'{path}: {error}') from error
    return phases


def make_plan(phases: Sequence[Phase], given: Assumptions, *, gpus: dict[str, GPU]) -> Plan:
    """Return the plan of training phases that run one after another on the same GPUs.

    Raises:
        RecipeError: A global batch cannot be divided evenly among the GPUs.
        UserError: The GPU does not support a recipe's precision, or failures leave no time to train.
    """
    for phase in phases:
        problems = check_devices(phase.recipe, given.gpus, given.gpu.gpus_per_node)
        if problems:
            raise RecipeError(problems, phase.name)
    plans = tuple(_plan_phase(phase, given, gpus) for phase in phases)
    for each in plans:
        _check_progress(each.resilience)
    return Plan(plans, given, _warnings(plans, given), _notes(plans, given))


def _check_progress(saving: Resilience) -> None:
    """Raise UserError if failures leave almost no time to train; a run that is short relative to a save is allowed."""
    lost_per_failure = saving.restart_seconds + saving.stall_seconds
    if saving.goodput < HOPELESS_GOODPUT and 3600 * saving.mtbf_hours < 10 * lost_per_failure:
        raise UserError(
            f'--mtbf: with a failure every {3600 * saving.mtbf_hours:.0f} s, a restart of '
            f'{saving.restart_seconds:.0f} s and a save of {saving.stall_seconds:.0f} s, no training progress is made; '
            'check the units: --mtbf is in hours, --restart and --stall in seconds'
        )


def _plan_phase(phase: Phase, given: Assumptions, gpus: dict[str, GPU]) -> PhasePlan:
    speed = planned_speed(phase, given)
    fit = _fits(phase, given)
    return PhasePlan(
        phase=phase,
        speed=speed,
        cost=training_cost(phase, speed, given),
        fit=fit,
        ways_out=() if fit[0].fits else tuple(ways_out(phase, fit[0].setup, given.gpu, gpus)),
        alternatives=_alternatives(phase, given),
        sizes=checkpoints.sizes_of(phase.recipe, phase.model, auxiliary=phase.auxiliary_parameters),
        snapshot_bytes=checkpoints.snapshot_bytes_per_node(phase, fit[0].setup, gpus_per_node=given.gpu.gpus_per_node),
        resilience=_resilience(phase, speed, given),
        techniques=throughput.techniques_of(phase),
        faster=_faster(phase, fit, given),
    )


def _resilience(phase: Phase, speed: Speed, given: Assumptions) -> Resilience:
    return checkpoints.resilience_of(
        phase,
        images_per_second=speed.images_per_second,
        nodes=given.nodes,
        mtbf_hours=checkpoints.default_mtbf_hours(given.gpus) if given.mtbf_hours is None else given.mtbf_hours,
        stall_seconds=given.stall_seconds,
        restart_seconds=given.restart_seconds,
    )


def _faster(phase: Phase, fits: Sequence[Fit], given: Assumptions) -> Faster | None:
    other = faster_phase(phase, fits, given)
    if other is None:
        return None
    speed = planned_speed(other, given)
    cost = training_cost(other, speed, given)
    return Faster(
        settings=changed_settings(phase.recipe, other.recipe),
        cost=cost,
        expected=cost * (1 / _resilience(other, speed, given).goodput),
        memory=memory_of(other, _setup(other, given)),
    )


def _fits(phase: Phase, given: Assumptions) -> tuple[Fit, ...]:
    fits = []
    for setup in strategies(_setup(phase, given), devices_per_node=given.gpu.gpus_per_node):
        memory, largest = memory_of(phase, setup), largest_microbatch(phase, setup, given.gpu)
        fits.append(Fit(setup, memory, fits_in_memory(memory, given.gpu), largest, communication_bytes(phase, setup)))
    return tuple(fits)


def _setup(phase: Phase, given: Assumptions) -> Setup:
    microbatch = phase.recipe.device_train_microbatch_size
    size = microbatch if isinstance(microbatch, int) else phase.recipe.global_batch // given.gpus
    return Setup(given.gpus, size, phase.recipe.parallelism)


def _alternatives(phase: Phase, given: Assumptions) -> tuple[Alternative, ...]:
    is_on_latents = phase.model.is_latent_diffusion and not phase.model.is_on_pixels
    if not is_on_latents or phase.alignment is not None or trains_on_pairs(phase.recipe):
        encodings: tuple[Encoding, ...] = ('pictures',)
    else:
        # If the text encoder is trained, its output changes and cannot be stored.
        encodings = ENCODINGS[:2] if phase.model.trains_text else ENCODINGS
    speeds: dict[Encoding, Speed] = {encoding: planned_speed(phase, given, encoding) for encoding in encodings}
    return tuple(
        Alternative(
            encoding=encoding,
            speed=speed,
            training=training_cost(phase, speed, given),
            precompute=throughput.precompute_cost(phase, encoding, given),
            storage=storage_of(phase, encoding, images_per_second=speed.images_per_second, nodes=given.nodes),
        )
        for encoding, speed in speeds.items()
    )


def _warnings(plans: Sequence[PhasePlan], given: Assumptions) -> tuple[str, ...]:
    warnings = []
    if given.price is None and (stale := given.gpu.stale(datetime.date.today())):
        warnings.append(stale)
    if given.price_usd_per_hour is None:
        warnings.append(f'the price of the {given.gpu.name} is unknown, so no cost is shown; pass --price')
    for each in plans:
        warnings += repetition_warnings(each.phase.recipe, each.phase.batches, each.phase.samples)
        recipe_fit = each.fit[0]
        if not recipe_fit.fits:
            need, have = recipe_fit.memory.reserved / GIB, given.gpu.memory_gib
            way_out = ', or '.join(each.ways_out) or 'a smaller model'
            warnings.append(
                f'{each.phase.name} does not fit: needs {need:.1f} GiB of {have:.1f} GiB at microbatch '
                f'{recipe_fit.setup.microbatch}; use {way_out}'
            )
        if each.is_bound_by_launches:
            warnings.append(
                f'{each.phase.name}: {recipe_fit.setup.microbatch} images per GPU in '
                f'{1000 * each.microbatch_seconds:.2g} ms is faster than kernels can be launched, so training will be '
                'slower than planned; measure a run and pass it with --from-run'
            )
        if each.speed.mfu > 1:
            warnings.append(f'{each.phase.name}: {each.speed.mfu:.0%} of the peak is not possible; check the speed')
    return tuple(warnings)


def _notes(plans: Sequence[PhasePlan], given: Assumptions) -> tuple[str, ...]:
    notes = [f'{each.phase.name}: {note}' for each in plans for note in each.phase.notes]
    for each in plans:
        # Recommend a strategy only if no faster settings were found: these include the best strategy.
        if each.faster is None and (found := advice(each.fit, given.gpu)):
            notes.append(f'{each.phase.name}: {found}')
    unknown = [each.phase.name for each in plans if each.phase.samples is None]
    if unknown:
        notes.append(
            f'{", ".join(unknown)}: the number of distinct images is unknown; storage and precomputing assume that '
            'every image is seen once; pass --samples'
        )
    work = {(each.phase.largest_shape.width, each.phase.images) for each in plans}
    if work == published_runs.SAMPLES.keys() and given.gpu.name.startswith('a100') and len(plans) == len(work):
        hours = published_runs.TRAINING_HOURS + published_runs.PRECOMPUTE_HOURS
        excess = published_runs.TRAINING_HOURS / published_runs.throughput_hours() - 1
        notes.append(
            f'MosaicML reported {published_runs.TRAINING_HOURS:,} A100-hours for training and '
            f'{published_runs.PRECOMPUTE_HOURS:,} for precomputing: {hours:,} in total, ${2 * hours:,} at $2 per hour; '
            f'its training took {excess:.0%} longer than its throughput, from which this plan is made, predicts'
        )
    if any(throughput.TRANSFORMER_SOURCE in each.speed.source for each in plans):
        run = published_runs.PRX_IN_24_HOURS
        notes.append(
            f'assumed {100 * throughput.TRANSFORMER_MFU:.3g}% of peak: {run.source} (Photoroom 2026) trained on '
            f'102.4 M images of 512 px and 10.2 M of 1024 px in {run.hours:.0f} hours on {run.gpus} H200, evaluation '
            'and saves included, which is this fraction of the peak by the FLOPs of yamls/speedrun.yaml and '
            'yamls/speedrun_1024.yaml; '
            'measure a run and pass it with --from-run, or use --mfu'
        )
    return tuple(notes)
