"""Throughput, time and cost of a training phase, and the effect of each of the recipe's techniques on throughput."""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.planning import published_runs
from diffusion.planning.checkpoints import RESTART_SECONDS
from diffusion.planning.gpus import GPU
from diffusion.planning.workload import BACKWARD, Encoding, Phase, phase_of
from diffusion.storage.text_tables import json_objects

ASSUMED_MFU = 0.25
"""Default MFU. The published code reached 0.24 at 256 px and 0.28 at 512 px on 8 A100s, and 0.16 and 0.28 on 128."""
TRANSFORMER_MFU = 0.104
"""Default MFU for transformers, from PRX's 24-hour run on 32 H200s and our count of its FLOPs.

The time includes evaluation and saves. tests/planning/test_techniques.py derives the value from that run's recipes.
"""
UNET_LAUNCH_SECONDS = 0.111
"""Host time to launch the kernels of a microbatch of Stable Diffusion 2's compiled U-Net.

Measured by benchmarks/step.py on 2026-11-26 (one H200, Intel Xeon) for 16 images, which take 39 ms of GPU time. Without
compilation: 0.130 s of host time and 52 ms of GPU time. A microbatch of 128 images has about as many kernels: 4,110
instead of 3,910.
"""
UNET_GRAPHS_LAUNCH_SECONDS = 0.058
"""Upper bound on the launch time with `speed.cuda_graphs`: 16 images took 58 ms instead of 134 ms on one H100
(2026-11-26)."""
LARGE_UNET = 5e8
"""Number of parameters above which a U-Net is assumed to have as many kernels as Stable Diffusion 2's (8.7e8)."""
TRANSFORMER_SOURCE = "that of PRX's 24-hour run on 32 H200"
PRECOMPUTE_MFU = 0.141
"""MFU of precomputing, from the published 3,784 A100-hours for 790 M images at 256 px and 300 M at 512 px."""

THROUGHPUT = 'throughput/device/samples_per_sec'
"""Name of the throughput metric in a run's log, the same as in Composer's SpeedMonitor."""


@dataclass(frozen=True)
class Speed:
    images_per_second: float
    mfu: float
    """Model FLOPs utilization: FLOP/s of model and online encoders, without recomputation, over the peak."""
    source: str
    """Description of the source, as printed in the plan."""
    is_measured: bool = False
    """True if a run of this recipe or of a similar recipe has reached this throughput."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Throughput of an earlier run and its FLOPs per image, from which throughputs of other runs are derived."""

    images_per_second_per_device: float
    flops_per_image: float
    source: str


@dataclass(frozen=True)
class Assumptions:
    """A plan's assumptions about cluster and throughput, set by the user; None means the planner's default."""

    gpu: GPU
    gpus: int
    price: float | None = None
    """US dollars per GPU-hour; None takes the GPU's price."""
    mfu: float | None = None
    images_per_second: float | None = None
    """Throughput of all GPUs together."""
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


def planned_speed(phase: Phase, given: Assumptions, encoding: Encoding | None = None) -> Speed:
    """Return the throughput of a phase: given by the user, measured, published for this model and GPU, or assumed."""
    encoding = encoding or phase.encoding
    model_flops = phase.flops(encoding)
    executed_flops = phase.executed_flops(encoding)
    gpu, gpus = given.gpu, given.gpus
    peak = gpus * gpu.peak_flops(phase.autocast)
    if given.images_per_second is not None:
        # Scale by FLOPs per image: the given throughput is for the recipe's encoding, but `encoding` may be another.
        rate, source = given.images_per_second * phase.flops() / model_flops, '--images-per-second'
    elif (measured := given.measured) is not None:
        # Assume the same FLOP/s per device for another recipe and another number of devices.
        rate = gpus * measured.images_per_second_per_device * measured.flops_per_image / model_flops
        source = measured.source
    elif given.mfu is not None:
        # The given MFU is the utilization of the hardware, including recomputation, so recomputing lowers throughput.
        rate, source = given.mfu * peak / executed_flops, f'--mfu {given.mfu:g}'
    elif (found := _published(phase, gpu, gpus, encoding)) is not None:
        rate, source = found
    else:
        assumed, reason = ASSUMED_MFU, 'close to the published code on A100s'
        if phase.model.is_transformer:
            assumed, reason = TRANSFORMER_MFU, TRANSFORMER_SOURCE
        rate = assumed * peak / executed_flops
        source = f'assumed: {100 * assumed:.3g}% of peak, {reason}'
        if rate > (most := _launched_images_per_second(phase, gpus)):
            rate = most
            launch = f'{1000 * _launch_seconds(phase):.0f} ms per microbatch as measured for SD2'
            source = f'assumed: bound by launching kernels, {launch}'
    is_measured = given.images_per_second is not None or given.measured is not None
    return Speed(rate, model_flops * rate / peak, source, is_measured)


def read_measured_speed(run: Path) -> MeasuredSpeed:
    """Read an earlier run's throughput (the median in its metrics) and the FLOPs per image of its recipe.

    Raises:
        UserError: The folder has no recipe or no logged throughput.
    """
    recipe, path = run / 'recipe.yaml', run / 'metrics.jsonl'
    if not recipe.is_file():
        raise UserError(f'--from-run: {run} has no recipe.yaml; use the folder of a run, such as runs/phase1')
    flops_per_image = phase_of(load(recipe, allow_missing=True)).flops()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(
            f'--from-run: {path} cannot be read ({error.strerror}); use the folder of a run that has '
            'loggers.metrics_file'
        ) from error
    logged = [line.get(THROUGHPUT) for line in json_objects(lines)]
    values = [value for value in logged if isinstance(value, float | int) and math.isfinite(value) and value > 0]
    if not values:
        raise UserError(
            f'--from-run: {path} has no {THROUGHPUT}; it is logged after the first window of callbacks.breakdown or '
            'callbacks.speed_monitor'
        )
    # Use the median, because the first batches and those around evaluations and saves are slower.
    rate = statistics.median(values)
    return MeasuredSpeed(rate, flops_per_image, f'measured: {rate:.1f} images/s per device in {path}')


def _published(phase: Phase, gpu: GPU, gpus: int, encoding: Encoding) -> tuple[float, str] | None:
    """Return the published throughput for this model and GPU with its source, or None if none applies."""
    if not gpu.name.startswith('a100') or phase.autocast == 'fp32' or phase.recomputes or phase.images_per_sample > 1:
        return None
    precomputed = published_runs.images_per_second(list(phase.shapes), gpus, phase.model.published_parameters)
    if precomputed is None:
        return None
    exact = any(gpus in known for known in published_runs.IMAGES_PER_SECOND.values())
    source = f'published for {gpus} A100s' if exact else 'interpolated from figures published for 8 to 128 A100s'
    # The slowdown was published for both encoders together; for the text encoder alone, compute it from FLOPs. Both
    # slowdowns refer to training all weights; training a LoRA needs two thirds of those FLOPs.
    share = phase.passes / (1 + BACKWARD)
    if encoding == 'pictures':
        slowdown, reasons = share + published_runs.ONLINE_SLOWDOWN - 1, ['online encoders']
    else:
        slowdown, reasons = share * phase.flops(encoding) / phase.training_flops, []
        reasons += ['the text encoder'] if encoding == 'latents' else []
    reasons += ['frozen weights'] if share < 1 else []
    return precomputed / slowdown, source + (f', / {slowdown:.3g} for {" and ".join(reasons)}' if reasons else '')


def _launched_images_per_second(phase: Phase, gpus: int) -> float:
    """Return the maximum images per second of all GPUs as limited by kernel launches; infinity if unknown."""
    if phase.model.is_transformer or phase.model.published_parameters < LARGE_UNET:
        return math.inf
    share = phase.recipe.global_batch / gpus
    microbatch = phase.recipe.device_train_microbatch_size
    size = min(microbatch, share) if isinstance(microbatch, int) else share
    return gpus * size / _launch_seconds(phase)


def _launch_seconds(phase: Phase) -> float:
    return UNET_GRAPHS_LAUNCH_SECONDS if phase.speed().cuda_graphs else UNET_LAUNCH_SECONDS


HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """Wall-clock hours, GPU-hours and dollars of a training run or of precomputing."""

    hours: float
    gpu_hours: float
    usd: float | None
    """US dollars; None if the price is unknown."""

    @property
    def days(self) -> float:
        return self.hours / 24

    def __add__(self, other: 'Cost') -> 'Cost':
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        return Cost(self.hours + other.hours, self.gpu_hours + other.gpu_hours, usd)

    def __mul__(self, factor: float) -> 'Cost':
        return Cost(self.hours * factor, self.gpu_hours * factor, None if self.usd is None else self.usd * factor)


NO_COST = Cost(0.0, 0.0, 0.0)


def cost_of_hours(hours: float, given: Assumptions) -> Cost:
    gpu_hours, price = hours * given.gpus, given.price_usd_per_hour
    return Cost(hours, gpu_hours, None if price is None else gpu_hours * price)


def training_cost(phase: Phase, speed: Speed, given: Assumptions) -> Cost:
    """Return the cost of a phase's training batches alone, without evaluation, saves and failures."""
    return cost_of_hours(phase.images / speed.images_per_second / HOUR, given)


def precompute_cost(phase: Phase, encoding: Encoding, given: Assumptions) -> Cost:
    """Return the cost of encoding every distinct image once to the form `encoding` before training."""
    flops = phase.distinct_images * phase.precompute_flops(encoding)
    if not flops:
        return cost_of_hours(0.0, given)
    peak = given.gpus * given.gpu.peak_flops('fp16')
    return cost_of_hours(flops / (PRECOMPUTE_MFU * peak) / HOUR, given)


CONTRASTIVE = 'contrastive_flow_matching'


@dataclass(frozen=True)
class MeasuredEffect:
    """Effect of a technique on throughput, as published by others."""

    conditions: str
    """Conditions of the measurement, and the two throughputs."""
    speedup: float
    """Throughput with the technique divided by throughput without it."""
    images_without: float
    """Number of images that the same budget would pay for without the technique, computed from `speedup`."""


@dataclass(frozen=True)
class Technique:
    """A technique in a recipe, compared with the same recipe without it at equal utilization of the GPUs."""

    name: str
    flops_per_image: float
    """FLOPs per image with the technique minus those without, including the image's share of the optimizer step."""
    speedup: float
    images_without: float
    published: tuple[MeasuredEffect, ...] = ()
    """Measurements that others published; empty if none are known."""


def techniques_of(phase: Phase) -> tuple[Technique, ...]:
    """Return a recipe's techniques, followed by all of them together if there are several; empty for plain training."""
    names = [each.name for each in phase.recipe.algorithms.values()]
    # Each technique is removed while all others stay, so their effects do not add up to the effect of all together.
    without = {
        'TREAD': replace(phase, route=None) if phase.route and not phase.route.fuses else None,
        'SPRINT': replace(phase, route=None) if phase.route and phase.route.fuses else None,
        'REPA': replace(phase, alignment=None) if phase.alignment else None,
        'perceptual losses': replace(phase, perceptual=None) if phase.perceptual else None,
        'contrastive flow matching': phase if CONTRASTIVE in names else None,
        'Muon': replace(phase, optimizer_flops=0) if phase.optimizer_flops else None,
    }
    found = [_compared(name, phase, other) for name, other in without.items() if other is not None]
    if len(found) > 1:
        plain = replace(phase, route=None, alignment=None, perceptual=None, optimizer_flops=0)
        found.append(_compared('all of them', phase, plain))
    return tuple(found)


def _compared(name: str, phase: Phase, other: Phase) -> Technique:
    flops, without = phase.executed_flops(), other.executed_flops()
    published = tuple(
        MeasuredEffect(f'{base} batches/s without, {rate} with, {where}', rate / base, phase.images * base / rate)
        for base, rate, where in published_runs.PRX_BATCHES_PER_SECOND.get(name, ())
    )
    return Technique(name, flops - without, without / flops, phase.images * flops / without, published)
