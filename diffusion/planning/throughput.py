"""Images per second: measured, published, or at an assumed MFU."""

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import UserError
from diffusion.planning import published_runs
from diffusion.planning.gpus import GPU
from diffusion.planning.workload import Encoding, Phase

ASSUMED_MFU = 0.25
"""The published code reached 0.24 at 256 px and 0.28 at 512 on 8 A100s, 0.16 and 0.28 on 128."""
PRECOMPUTE_MFU = 0.141
"""MFU of the encoders alone: the published 3,784 A100-hours for 790 M images at 256 px and 300 M at 512."""

THROUGHPUT = 'throughput/device/samples_per_sec'
"""The metric of a run's log, by the name that Composer's SpeedMonitor gives it."""


@dataclass(frozen=True)
class Speed:
    """Images per second of a phase, and where the figure comes from."""

    images_per_second: float
    mfu: float
    """Model FLOPs utilization: FLOPs of the images, without recomputation, as a share of the peak."""
    source: str


@dataclass(frozen=True)
class MeasuredSpeed:
    """Throughput in the log of a run."""

    images_per_second_per_device: float
    flops_per_image: float
    source: str


def planned_speed(
    phase: Phase,
    gpu: GPU,
    gpus: int,
    *,
    encoding: Encoding | None = None,
    mfu: float | None = None,
    images_per_second: float | None = None,
    measured: MeasuredSpeed | None = None,
) -> Speed:
    """Speed of a phase: given by the user, measured by a run, published for this model and GPU, or assumed.

    Args:
        phase: The work.
        gpu: The kind of GPU.
        gpus: Number of GPUs.
        encoding: Where the encoders run, instead of where the recipe says.
        mfu: MFU to assume.
        images_per_second: Speed of all GPUs together, with the encoders as in the recipe.
        measured: Speed of another run.
    """
    encoding = encoding or phase.encoding
    asked = phase.flops(encoding)
    done = asked + phase.recomputed_flops
    peak = gpus * gpu.peak_flops(phase.autocast)
    if images_per_second is not None:
        # What was measured as the recipe is, scaled where the encoders run elsewhere.
        rate, source = images_per_second * phase.flops() / asked, '--images-per-second'
    elif measured is not None:
        rate = gpus * measured.images_per_second_per_device * measured.flops_per_image / asked
        source = measured.source
    elif mfu is not None:
        rate, source = mfu * peak / done, f'--mfu {mfu:g}'
    elif (found := _published(phase, gpu, gpus, encoding)) is not None:
        rate, source = found
    else:
        rate = ASSUMED_MFU * peak / done
        source = f'assumed: {ASSUMED_MFU:.0%} of peak, about what the published code reached on A100s'
    return Speed(rate, asked * rate / peak, source)


def read_run(folder: Path, flops_per_image: float) -> MeasuredSpeed:
    """Throughput of a run from its metrics.jsonl: the median of what `breakdown` or `speed_monitor` logged.

    Args:
        folder: The run's folder, such as runs/phase1.
        flops_per_image: FLOPs per image in that run.

    Raises:
        UserError: There is no such file, or no throughput in it.
    """
    path = folder / 'metrics.jsonl'
    values: list[float] = []
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except OSError as error:
        raise UserError(
            f'--from-run: {path} cannot be read ({error.strerror}); give the folder of a run with loggers.metrics_file'
        ) from error
    for line in lines:
        try:
            value = json.loads(line).get(THROUGHPUT)
        except json.JSONDecodeError:
            continue  # a process was killed while it wrote this line
        if value is not None and math.isfinite(value) and value > 0:
            values.append(value)
    if not values:
        raise UserError(
            f'--from-run: {path} has no {THROUGHPUT}; it is there after the first window of callbacks.breakdown, or of '
            'speed_monitor'
        )
    rate = statistics.median(values)
    return MeasuredSpeed(rate, flops_per_image, f'measured: {rate:.1f} images/s a device in {path}')


def _published(phase: Phase, gpu: GPU, gpus: int, encoding: Encoding) -> tuple[float, str] | None:
    if not gpu.name.startswith('a100') or phase.autocast == 'fp32' or phase.recomputes:
        return None
    precomputed = published_runs.images_per_second(list(phase.shapes), gpus, phase.model.trained_parameters)
    if precomputed is None:
        return None
    exact = any(gpus in known for known in published_runs.IMAGES_PER_SECOND.values())
    source = f'published for {gpus} A100' if exact else 'from what was published for 8 to 128 A100'
    if encoding == 'pictures':
        slowdown, why = published_runs.ONLINE_SLOWDOWN, 'encoding online'
    else:
        slowdown, why = phase.flops(encoding) / phase.training_flops, 'the text encoder'
    return precomputed / slowdown, source + (f', / {slowdown:.3g} for {why}' if slowdown > 1 else '')
