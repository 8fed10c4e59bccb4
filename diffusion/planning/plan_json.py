"""JSON form of a plan; the unit of every number is part of its key."""

from typing import Any

from diffusion.planning.plan import Alternative, Fit, PhasePlan, Plan
from diffusion.planning.run_cost import Cost


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
        'phases': [_phase(each) for each in plan.phases],
        'warnings': list(plan.warnings),
        'notes': list(plan.notes),
    }


def _phase(each: PhasePlan) -> dict[str, Any]:
    phase = each.phase
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
        },
        'images_per_second': each.speed.images_per_second,
        'mfu': each.speed.mfu,
        'speed_source': each.speed.source,
        'training': _cost(each.cost),
        'precompute': _cost(each.precompute),
        'expected': _cost(each.expected),
        'memory': [_fit(fit) for fit in each.fit],
        'ways_out': list(each.ways_out),
        'data': [_alternative(other) for other in each.alternatives],
        'checkpoint_bytes': {
            'weights': each.sizes.weights,
            'with_optimizer': each.sizes.with_optimizer,
            'with_averages': each.sizes.with_averages,
        },
        'saving': dict(vars(each.resilience)),
    }


def _cost(cost: Cost) -> dict[str, float | None]:
    return {'hours': cost.hours, 'days': cost.days, 'gpu_hours': cost.gpu_hours, 'usd': cost.usd}


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        'strategy': fit.setup.label,
        'microbatch': fit.setup.microbatch,
        'bytes': fit.memory.parts(),
        'allocated_bytes': fit.memory.allocated,
        'reserved_bytes': fit.memory.reserved,
        'fits': fit.fits,
        'largest_microbatch': fit.largest_microbatch,
    }


def _alternative(other: Alternative) -> dict[str, Any]:
    storage = other.storage
    return {
        'encoding': other.encoding,
        'training': _cost(other.training),
        'precompute': _cost(other.precompute),
        'bytes_per_sample': storage.bytes_per_sample,
        'stored_bytes': storage.stored_bytes,
        'read_bytes': storage.read_bytes,
        'bytes_per_second': storage.bytes_per_second,
        'bytes_per_second_per_node': storage.bytes_per_second_per_node,
    }
