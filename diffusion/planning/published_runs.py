"""Published throughputs, image counts and GPU-hours, on which the estimates of `diffusion plan` are based.

The sources for Stable Diffusion 2 are MosaicML, "Training Stable Diffusion from Scratch for <$50k", part 2 (2023), and
its code. The sources for PRX are Photoroom, "Training Design for Text-to-Image Models: Lessons from Ablations" ("PRX
Part 2") and "PRX Part 3 - Training a Text-to-Image Model in 24h!" (2026), and its code.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from diffusion.config.image_shapes import Shape

SD2_PARAMETERS = 865_910_724
IMAGES_PER_SECOND: dict[int, dict[int, float]] = {
    256: {8: 1100, 16: 2180, 32: 4080, 64: 8530, 128: 11600},
    512: {8: 290, 16: 585, 32: 1195, 64: 2340, 128: 4590},
}
"""Images per second of Stable Diffusion 2 by resolution and number of A100s, with both encoders precomputed."""
ONLINE_SLOWDOWN = 1.4
"""Slowdown of training by encoders that run in it, as a factor; FLOPs alone predict 1.59 (256 px) and 1.48 (512 px)."""
SAMPLES = {(256, 550_000 * 2048): 790_000_000, (512, 850_000 * 2048): 300_000_000}
"""Number of distinct images per phase of Stable Diffusion 2, by resolution and number of images trained on."""
TRAINING_HOURS, PRECOMPUTE_HOURS = 20_051, 3_784
"""A100-hours of training both phases, and of precomputing both encoders' outputs for their images and captions."""

PRX_BATCHES_PER_SECOND: dict[str, tuple[tuple[float, float, str], ...]] = {
    'TREAD': ((1.33, 1.64, 'on 1024 px'), (3.95, 4.11, 'in latents of 256 px')),
    'REPA': ((3.95, 3.46, 'with DINOv3 ViT-L'), (3.95, 3.66, 'with DINOv2 ViT-L')),
    'contrastive flow matching': ((3.95, 3.75, 'in latents of 256 px'),),
}
"""Batches of 256 images per second without and with a technique, and the conditions (PRX Part 2; REPA: 256 px latents).

The GPUs are not named, so utilization cannot be computed; 3.95 batches/s would be 34% of the peak of 8 H200s. No
throughput was published for Muon and perceptual losses; perceptual losses "add only a small overhead" (Part 3).
"""


@dataclass(frozen=True)
class PublishedRun:
    """A published training run with several stages, its duration and its cost."""

    source: str
    parameters: int
    stages: frozenset[tuple[int, int]]
    """Side of the images in pixels and number of images trained on, for each stage."""
    hours: float
    gpus: int
    gpu: str
    """Name of the GPU in gpus.yaml."""
    usd_per_gpu_hour: float

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus

    @property
    def usd(self) -> float:
        return self.gpu_hours * self.usd_per_gpu_hour


PRX_IN_24_HOURS = PublishedRun(
    source='PRX Part 3',
    parameters=1_177_215_744,
    stages=frozenset({(512, 100_000 * 1024), (1024, 20_000 * 512)}),
    hours=24,
    gpus=32,
    gpu='h200',
    usd_per_gpu_hour=2.0,
)
"""PRX on pixels with TREAD, REPA (only at 512 px), LPIPS, patch features and Muon; published cost: about $1,500."""


I1_QUICK_START = PublishedRun(
    source='i1 quick start',
    parameters=1_034_264_432,
    stages=frozenset({(256, 500_000 * 512)}),
    hours=129.6,
    gpus=8,
    gpu='h100-sxm',
    usd_per_gpu_hour=2.0,
)
"""i1 XL (Zeng et al. 2026), 5.4 days in the README of its repository; no price was published, so $2 is assumed."""


def published_run(work: Collection[tuple[int, int]], parameters: int) -> PublishedRun | None:
    """Return the published run of a model of this size that includes all stages in `work` (side, images), or None."""
    runs = (PRX_IN_24_HOURS, I1_QUICK_START)
    return next((run for run in runs if parameters == run.parameters and work and run.stages.issuperset(work)), None)


def throughput_hours(gpus: int = 128) -> float:
    """Return the A100-hours of both phases at the published throughput: 16,937 on 128 GPUs, but 20,051 were reported.

    The reported hours are 18% higher because they include evaluation, saves and interruptions.
    """
    return sum(images / IMAGES_PER_SECOND[side][gpus] for side, images in SAMPLES) * gpus / 3600


def published_samples(shapes: list[Shape], images: int, parameters: int) -> int | None:
    """Return the number of distinct images if this is a published phase of Stable Diffusion 2, else None."""
    if parameters != SD2_PARAMETERS or len(shapes) != 1 or not shapes[0].is_square:
        return None
    return SAMPLES.get((shapes[0].width, images))


def images_per_second(shapes: list[Shape], gpus: int, parameters: int) -> float | None:
    """Return SD2's throughput on `gpus` A100s, published or interpolated; None for another model or shape."""
    known = IMAGES_PER_SECOND.get(shapes[0].width) if len(shapes) == 1 and shapes[0].is_square else None
    return None if known is None or parameters != SD2_PARAMETERS else interpolate(known, gpus)


def interpolate(known: dict[int, float], gpus: int) -> float:
    """Interpolate throughput by a power law between known numbers of GPUs; scale linearly outside this range."""
    if gpus in known:
        return known[gpus]
    if not min(known) < gpus < max(known):
        end = min(known) if gpus < min(known) else max(known)
        return known[end] * gpus / end
    below = max(count for count in known if count < gpus)
    above = min(count for count in known if count > gpus)
    position = math.log(gpus / below) / math.log(above / below)
    return known[below] * (known[above] / known[below]) ** position
