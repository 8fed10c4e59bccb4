"""References for the step benchmark's figures: a GPU's peak, the planner's memory, and the published utilization."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.config.load import load
from diffusion.config.recipe import ParallelismConfig
from diffusion.planning.gpus import find_gpu, load_gpus
from diffusion.planning.memory import GIB, Setup, memory_of
from diffusion.planning.published_runs import IMAGES_PER_SECOND
from diffusion.planning.throughput import Assumptions, planned_speed
from diffusion.planning.workload import phase_of

RECIPES = {
    pixels: Path(__file__).parents[1] / 'yamls' / name for pixels, name in ((256, 'phase1.yaml'), (512, 'phase2.yaml'))
}
"""Recipes of Stable Diffusion 2, by resolution."""
PUBLISHED_GPUS = 8
DDP = ('parallelism.strategy=ddp', 'parallelism.checkpoints=whole')


def peak_flops_of(name: str) -> float | None:
    """Return the peak FLOP/s in bfloat16 of a GPU by the name that its driver reports; None if it is unknown."""
    words = set(name.lower().replace('-', ' ').split())
    found = []
    for key, gpu in load_gpus().items():
        family, *kind = key.split('-')
        # The driver's names: NVIDIA A100-SXM4-80GB, NVIDIA H100 80GB HBM3 (SXM), NVIDIA H100 PCIe.
        if family in words and ('pcie' in kind) == ('pcie' in words and f'{family}-pcie' in load_gpus()):
            found.append(gpu.peak_tflops.get('bf16'))
    peaks = [1e12 * peak for peak in found if peak]
    return max(peaks) if peaks else None


def planned_gib(pixels: int, settings: Mapping[str, Any], microbatch: int, batch: int) -> float | None:
    """Return the memory in GiB that `diffusion plan` expects to be allocated in a step of the benchmark on one GPU.

    Args:
        pixels: Side of the images; the result is None if `RECIPES` has no recipe for it.
        settings: Settings of `speed` by name.
        microbatch: Samples per microbatch.
        batch: Samples per step.
    """
    if pixels not in RECIPES:
        return None
    on = [f'speed.{name}={str(value).lower()}' for name, value in settings.items() if isinstance(value, bool)]
    overrides = ['speed.preset=none', *DDP, f'global_batch={batch}', *on]
    overrides.append(f'device_train_microbatch_size={microbatch}')
    # The benchmark keeps no average of the weights.
    phase = phase_of(load(RECIPES[pixels], overrides, allow_missing=True), encoding='latents+text')
    memory = memory_of(phase, Setup(1, microbatch, ParallelismConfig(strategy='ddp')))
    return (memory.allocated - memory.averages - memory.encoders) / GIB


def published_utilization(pixels: int) -> tuple[float, float] | None:
    """Return the published images/s per GPU on 8 A100s, and the MFU there; None if `RECIPES` has no such resolution."""
    if pixels not in RECIPES:
        return None
    rate = IMAGES_PER_SECOND[pixels][PUBLISHED_GPUS]
    phase = phase_of(load(RECIPES[pixels], allow_missing=True), encoding='latents+text')
    speed = planned_speed(phase, Assumptions(find_gpu('a100-80gb', load_gpus()), PUBLISHED_GPUS))
    return rate / PUBLISHED_GPUS, speed.mfu
