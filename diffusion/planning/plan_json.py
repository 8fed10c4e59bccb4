"""JSON form of a plan; the unit of every number is part of its key."""

from dataclasses import asdict
from typing import Any

from diffusion.planning.checkpoints import kept_checkpoints
from diffusion.planning.data_volume import StoreReads, reads_per_epoch
from diffusion.planning.goodput_simulation import SimulatedGoodput, simulate_strategies
from diffusion.planning.plan import Alternative, Fit, PhasePlan, Plan
from diffusion.planning.throughput import Cost, Technique
from diffusion.planning.workload import Phase


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as nested dictionaries and lists for json.dumps, as printed by `diffusion plan --json`."""
    given = plan.given
    return {
        'gpu': given.gpu.name,
        'gpus': given.gpus,
        'nodes': given.nodes,
        'price_usd_per_gpu_hour': given.price_usd_per_hour,
        'training': _cost(plan.training),
        'precompute': _cost(plan.precompute),
        'total': _cost(plan.total) | {'training_flop': plan.flops},
        'expected': _cost(plan.expected),
        'published': _published(plan),
        'phases': [_phase(each) for each in plan.phases],
        'warnings': list(plan.warnings),
        'notes': list(plan.notes),
    }


def _phase(each: PhasePlan) -> dict[str, Any]:
    phase = each.phase
    kept = kept_checkpoints(phase, each.resilience, each.sizes)
    return {
        'name': phase.name,
        'batches': phase.batches,
        'global_batch': phase.recipe.global_batch,
        'images': phase.images,
        'shapes': {str(shape): share for shape, share in phase.shapes.items()},
        'encoding': phase.encoding,
        'trained_parameters': phase.model.trained_parameters,
        'frozen_parameters': phase.model.frozen_parameters,
        'flop_per_image': {
            'forward': phase.forward_flops,
            'training': phase.training_flops,
            'image_encoder': phase.image_encoder_flops,
            'text_encoder': phase.text_encoder_flops,
            'representation_alignment': phase.alignment_flops,
            'perceptual_losses': phase.perceptual_flops,
            'total': phase.flops(),
        },
        'optimizer_flop_per_batch': phase.optimizer_flops,
        'images_per_second': each.speed.images_per_second,
        'mfu': each.speed.mfu,
        'speed_source': each.speed.source,
        'training': _cost(each.cost),
        'precompute': _cost(each.precompute),
        'expected': _cost(each.expected),
        'techniques': [_technique(technique, phase.recipe.global_batch) for technique in each.techniques],
        'memory': [_fit(fit) for fit in each.fit],
        'ways_out': list(each.ways_out),
        'data': [_alternative(other, each.phase) for other in each.alternatives],
        'checkpoint_bytes': asdict(each.sizes),
        'kept_checkpoints': None if kept is None else asdict(kept),
        'snapshot_bytes_per_node': each.snapshot_bytes,
        'saving': asdict(each.resilience),
        'save_strategies': [_strategy(simulated) for simulated in simulate_strategies(each.resilience)],
    }


def _strategy(simulated: SimulatedGoodput) -> dict[str, Any]:
    strategy = simulated.strategy
    return {
        'name': strategy.name,
        'interval_seconds': strategy.interval,
        'stall_seconds': strategy.stall,
        'lag_seconds': {tier.name: tier.lag for tier in strategy.tiers},
        'goodput': simulated.goodput,
    }


def _published(plan: Plan) -> dict[str, Any] | None:
    run = plan.published
    if run is None:
        return None
    return _named(run, 'source', 'gpu', 'gpus') | {'stages': len(run.stages)} | _named(run, 'hours', 'gpu_hours', 'usd')


def _technique(technique: Technique, batch: int) -> dict[str, Any]:
    return {
        'name': technique.name,
        'flop_per_image': technique.flops_per_image,
        'speedup_at_equal_mfu': technique.speedup,
        'images_without': technique.images_without,
        'batches_without': technique.images_without / batch,
        'published': [
            asdict(effect) | {'batches_without': effect.images_without / batch} for effect in technique.published
        ],
    }


def _cost(cost: Cost) -> dict[str, float | None]:
    return _named(cost, 'hours', 'days', 'gpu_hours', 'usd')


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        'strategy': fit.setup.label,
        'microbatch': fit.setup.microbatch,
        'bytes': fit.memory.parts(),
        'allocated_bytes': fit.memory.allocated,
        'reserved_bytes': fit.memory.reserved,
        'fits': fit.fits,
        'largest_microbatch': fit.largest_microbatch,
        'communication_bytes_per_batch': fit.communication_bytes,
    }


def _alternative(other: Alternative, phase: Phase) -> dict[str, Any]:
    storage = other.storage
    reads = reads_per_epoch(phase.recipe, storage.stored_bytes, nodes=storage.nodes)
    return {
        'encoding': other.encoding,
        'training': _cost(other.training),
        'precompute': _cost(other.precompute),
        **_named(storage, 'bytes_per_sample', 'stored_bytes', 'read_bytes'),
        **_named(storage, 'bytes_per_second', 'bytes_per_second_per_node'),
        'store_reads_per_epoch': {'first': _store_reads(reads.first), 'later': _store_reads(reads.later)},
    }


def _store_reads(reads: StoreReads) -> dict[str, float]:
    return _named(reads, 'bytes', 'requests', 'request_usd', 'egress_usd')


def _named(owner: object, *names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names}
