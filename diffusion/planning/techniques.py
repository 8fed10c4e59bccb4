"""Effect of the techniques in a recipe on throughput, and the images that the same money would buy without each."""

from dataclasses import dataclass, replace

from diffusion.planning.published_runs import PRX_BATCHES_PER_SECOND
from diffusion.planning.workload import Phase

CONTRASTIVE = 'contrastive_flow_matching'


@dataclass(frozen=True)
class MeasuredEffect:
    """Effect of a technique on throughput as measured and published by others."""

    speedup: float
    """Throughput with the technique over that without it."""
    images_without: float
    """Number of images that the money of this run buys without the technique, by that ratio."""
    conditions: str
    """Conditions of the measurement, and the two throughputs."""


@dataclass(frozen=True)
class Technique:
    """A technique in a recipe, compared with the same recipe without it at equal utilization of the GPUs."""

    name: str
    flops_per_image: float
    """Change of the FLOPs that devices execute per image; that of an optimizer step is divided among its images."""
    speedup: float
    """Throughput with the technique over that without it."""
    images_without: float
    """Number of images that the money of this run buys without the technique."""
    published: tuple[MeasuredEffect, ...] = ()
    """Measurements that others published; empty if there are none."""


def techniques_of(phase: Phase) -> tuple[Technique, ...]:
    """Return the techniques of a recipe, and all of them together if there are several; none for plain training."""
    # Each technique is removed while all others stay, so the changes do not add up to that of all techniques.
    without = {
        'TREAD': replace(phase, route=None),
        'REPA': replace(phase, alignment=None),
        'perceptual losses': replace(phase, perceptual=None),
        'contrastive flow matching': phase,
        'Muon': replace(phase, optimizer_flops=0),
    }
    used = {
        'TREAD': phase.route is not None,
        'REPA': phase.alignment is not None,
        'perceptual losses': phase.perceptual is not None,
        'contrastive flow matching': any(each.name == CONTRASTIVE for each in phase.recipe.algorithms.values()),
        'Muon': bool(phase.optimizer_flops),
    }
    found = [_compared(name, phase, without[name]) for name in used if used[name]]
    if len(found) > 1:
        plain = replace(phase, route=None, alignment=None, perceptual=None, optimizer_flops=0)
        found.append(_compared('all of them', phase, plain))
    return tuple(found)


def _compared(name: str, phase: Phase, other: Phase) -> Technique:
    """Return the effect of a technique that `phase` has and `other` lacks."""
    flops, without = phase.executed_flops(), other.executed_flops()
    published = tuple(
        MeasuredEffect(rate / base, phase.images * base / rate, f'{base} batches/s without, {rate} with, {where}')
        for base, rate, where in PRX_BATCHES_PER_SECOND.get(name, ())
    )
    return Technique(name, flops - without, without / flops, phase.images * flops / without, published)
