"""Command line of `diffusion plan`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from diffusion.config.declarations import AtLeast, Fraction, GreaterThan
from diffusion.config.options import Count, Option
from diffusion.errors import UserError
from diffusion.planning.checkpoints import RESTART_SECONDS, kept_checkpoints
from diffusion.planning.data_volume import reads_per_epoch
from diffusion.planning.goodput_simulation import SimulatedGoodput, simulate_strategies
from diffusion.planning.gpus import find_gpu, load_gpus, missing_kernels
from diffusion.planning.plan import Alternative, Faster, Fit, PhasePlan, Plan, load_phases, make_plan
from diffusion.planning.plan_table import plan_text
from diffusion.planning.throughput import Assumptions, Cost, Technique, read_measured_speed
from diffusion.planning.workload import Encoding, Phase
from diffusion.storage.local_files import check_writable


@dataclass(frozen=True)
class PlanOptions:
    """Options of `diffusion plan`: recipes, cluster, failures and output format."""

    recipes: Annotated[list[str], Option('RECIPE', positional=True, trailing=True, files=True)]
    """YAML files of consecutive runs, followed by KEY=VALUE overrides that apply to all of them."""
    gpu: str = 'h100-sxm'
    """Name of the GPU model, such as a100-80gb."""
    torch: Annotated[str | None, Option('VERSION')] = None
    """Version of torch on the cluster, such as 2.9 or 2.7.0+cu128, which must have kernels for the GPU (default: the
    installed version)."""
    gpus: Count = 8
    """Number of GPUs."""
    mfu: Annotated[float | None, Fraction(), Option(excludes='speed')] = None
    """Model FLOPs utilization to assume, such as 0.4 (default: from published runs, else 0.25)."""
    images_per_second: Annotated[float | None, GreaterThan(0), Option(excludes='speed')] = None
    """Measured throughput of all GPUs together."""
    from_run: Annotated[Path | None, Option('DIR', excludes='speed')] = None
    """Folder of an earlier run, whose logged throughput is used."""
    price: Annotated[float | None, AtLeast(0), Option('USD')] = None
    """Price per GPU-hour in US dollars (default: the price in gpus.yaml or --gpus-file)."""
    gpus_file: Path | None = None
    """File with more GPUs or other prices, in the format of gpus.yaml."""
    samples: Annotated[list[int] | None, AtLeast(1), Option('N[,N]', commas=True)] = None
    """Number of distinct images in the data: one number for all recipes, or one per recipe, such as 790e6,300e6."""
    stored: Encoding | None = None
    """Form in which samples are stored: images, latents, or latents and text embeddings (default: according to the
    recipe)."""
    mtbf: Annotated[float | None, GreaterThan(0), Option('HOURS')] = None
    """Mean time between failures of the whole cluster (default: from the failure rate reported for Llama 3)."""
    stall: Annotated[float | None, GreaterThan(0), Option('SECONDS')] = None
    """Time that each save blocks training (default: checkpoint size divided by 0.2 GB/s per writer)."""
    restart: Annotated[float, AtLeast(0), Option('SECONDS')] = RESTART_SECONDS
    """Time from a failure to the next batch."""
    json: bool = False
    """Print the plan as JSON instead of tables."""
    png: Path | None = None
    """File for a plot of cost and duration in days against the number of GPUs (default: no plot)."""


def run_plan(options: PlanOptions) -> int:
    """Run `diffusion plan`: print the plan, and write the plot if `--png` is given.

    Raises:
        UserError: A recipe or an option about the cluster is wrong.
    """
    if options.png is not None:
        check_writable(options.png.parent, '--png')
        if options.png.is_dir():
            raise UserError(f'--png: {options.png} is a folder; give a file name')
    paths = [word for word in options.recipes if '=' not in word]
    overrides = [word for word in options.recipes if '=' in word]
    gpus = load_gpus(options.gpus_file)
    gpu = find_gpu(options.gpu, gpus)
    try:
        problem = missing_kernels(gpu, options.torch)
    except UserError as error:
        raise UserError(f'--torch: {error}') from error
    if problem is not None:
        raise UserError(f'--gpu: {problem}, and pass the version of torch on the cluster, such as --torch 2.9')
    given = Assumptions(
        gpu=gpu,
        gpus=options.gpus,
        price=options.price,
        mfu=options.mfu,
        images_per_second=options.images_per_second,
        measured=None if options.from_run is None else read_measured_speed(options.from_run),
        mtbf_hours=options.mtbf,
        stall_seconds=options.stall,
        restart_seconds=options.restart,
    )
    if not paths:
        raise UserError('plan: no recipe given; add a YAML file, such as yamls/phase1.yaml')
    if options.images_per_second is not None and len(paths) > 1:
        raise UserError('--images-per-second: applies to one recipe; plan the recipes one by one, or use --mfu')
    phases = load_phases(paths, overrides, samples=options.samples or (), encoding=options.stored)
    plan = make_plan(phases, given, gpus=gpus)
    print(json.dumps(plan_to_dict(plan), indent=2) if options.json else plan_text(plan))
    if options.png is not None:
        from diffusion.planning.cost_plot import draw

        draw(plan, options.png)
    return 0


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as nested dictionaries and lists, for the JSON output of `diffusion plan --json`."""
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
            'representation_alignment': phase.alignment_flops(),
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
        'faster': None if each.faster is None else _faster(each.faster),
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


def _faster(faster: Faster) -> dict[str, Any]:
    costs = {'training': _cost(faster.cost), 'expected': _cost(faster.expected)}
    return {'settings': list(faster.settings), **costs, 'reserved_bytes': faster.memory.reserved}


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
        'published': [asdict(each) | {'batches_without': each.images_without / batch} for each in technique.published],
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
        'store_reads_per_epoch': {
            name: _named(each, 'bytes', 'requests', 'request_usd', 'egress_usd')
            for name, each in (('first', reads.first), ('later', reads.later))
        },
    }


def _named(owner: object, *names: str) -> dict[str, Any]:
    return {name: getattr(owner, name) for name in names}
