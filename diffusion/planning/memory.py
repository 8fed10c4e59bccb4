"""Memory of one device, part by part, and the largest microbatch that fits.

Weights, optimizer states and averages are counted; gradients are what torch allocates for them. Activations are the
tensors that autograd keeps, as counted on the model itself by models/activation_memory.py: to the byte what torch keeps
under autocast, and within 3 % where blocks are compiled. What cuDNN and NCCL take for themselves, and fragments, are an
allowance.
"""

from dataclasses import asdict, dataclass, replace

from diffusion.config.recipe import ParallelismConfig, Recipe
from diffusion.planning.gpus import GPU
from diffusion.planning.model_costs import FLOAT32, HALF, ActivationCounts
from diffusion.planning.workload import Phase

GIB = 2**30
CONTEXT_BYTES = 1.5 * GIB
"""CUDA's context, libraries and NCCL's buffers; outside of what torch counts as allocated. An assumption."""
FRAGMENTS = 0.05
"""Share of what is allocated, for cuDNN's workspaces and gaps between tensors. An assumption."""
ADAM_STATES = 2
"""Numbers per parameter that Adam keeps; amsgrad keeps one more."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. The peak is all that is resident, and the largest of what comes and goes."""

    weights: int
    optimizer: int
    averages: int
    encoders: int
    """Frozen VAE and text encoder."""
    gradients: int
    buckets: int
    """Whole gradients to be reduced: DDP's buckets, or those that FSDP2 keeps where it reduces once a batch."""
    compute_weights: int
    """Weights in the precision of autocast: its cache, or what FSDP has gathered."""
    activations: int
    """Tensors of one microbatch that are kept for the backward pass."""
    working: int
    """Tensors that come and go during the backward pass."""
    encoding: int
    """Tensors of the frozen encoders, before the denoiser's."""
    step: int
    """Temporaries of the optimizer's step; a fused one has none."""
    batch: int
    """The device's share of the batch, as it comes from the loader."""
    accumulates: bool
    """True if gradients of an earlier microbatch exist during the forward pass."""

    @property
    def resident(self) -> int:
        """Bytes that are there all the time."""
        return self.weights + self.optimizer + self.averages + self.encoders + self.buckets + self.batch

    @property
    def allocated(self) -> int:
        """The peak, as torch.cuda.max_memory_allocated counts it."""
        earlier = self.gradients if self.accumulates else 0
        backward = earlier + self.compute_weights + self.activations + self.working
        end_of_backward = self.gradients + self.compute_weights
        return self.resident + max(backward, end_of_backward, self.gradients + self.step, earlier + self.encoding)

    @property
    def reserved(self) -> int:
        """The peak with allowances: the memory that the GPU must have."""
        return round(self.allocated * (1 + FRAGMENTS) + CONTEXT_BYTES)

    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {name: value for name, value in asdict(self).items() if name != 'accumulates'}


@dataclass(frozen=True)
class Setup:
    """Parallelism and microbatch of a run."""

    devices: int
    microbatch: int
    parallelism: ParallelismConfig

    @property
    def shards(self) -> int:
        """Number of devices that weights, gradients and optimizer states are divided over."""
        return 1 if self.parallelism.strategy == 'ddp' else max(1, self.devices // self.parallelism.replicas)

    @property
    def label(self) -> str:
        settings = self.parallelism
        if settings.strategy == 'ddp':
            return 'ddp'
        kind = 'FULL_SHARD' if settings.reshard_after_forward else 'SHARD_GRAD_OP'
        replicas = f' x {settings.replicas}' if settings.replicas > 1 else ''
        return f'{settings.strategy} {kind}{replicas}'


def memory_of(phase: Phase, setup: Setup) -> Memory:
    """Bytes on one device under a set-up."""
    settings, shards = setup.parallelism, setup.shards
    parts = phase.speed(settings.strategy)
    activations = phase.model.activations(phase.largest_shape, phase.precision(settings.strategy))
    trained = phase.model.trained_parameters
    share = max(setup.microbatch, phase.recipe.global_batch // setup.devices)
    accumulates = share > setup.microbatch
    reduces_once = accumulates and shards > 1 and bool(parts.reduce_once)
    whole_gradients = reduces_once or (settings.strategy == 'ddp' and setup.devices > 1)
    fused = phase.recipe.optimizer.name == 'adamw' and parts.fused_optimizer
    kept = activations.kept_recomputing if settings.activation_checkpointing else activations.kept
    encodes = phase.encoding == 'pictures' and phase.model.is_latent_diffusion
    states = ADAM_STATES + bool(phase.recipe.optimizer.kwargs.get('amsgrad'))
    return Memory(
        weights=_divided(FLOAT32 * trained, shards),
        optimizer=_divided(FLOAT32 * states * trained, shards),
        averages=_divided(FLOAT32 * averages_of(phase.recipe) * trained, shards),
        encoders=encoder_width(phase) * phase.model.frozen_parameters,
        gradients=_divided(FLOAT32 * trained, shards),
        buckets=FLOAT32 * trained if whole_gradients else 0,
        compute_weights=_compute_weights(phase, activations, settings, keeps_gathered=reduces_once),
        activations=kept * setup.microbatch,
        working=activations.largest * setup.microbatch + _in_flight(phase, setup),
        encoding=_encoding_bytes(phase, activations, setup.microbatch) if encodes else 0,
        step=0 if fused else _divided(FLOAT32 * trained, shards),
        batch=share * _sample_bytes(phase),
        accumulates=accumulates,
    )


def averages_of(recipe: Recipe) -> int:
    """Number of averaged copies of the weights that a run holds at its end."""
    algorithms = recipe.algorithms.values()
    widths = [
        algorithm.kwargs.get('widths', (0.05, 0.10)) for algorithm in algorithms if algorithm.name == 'post_hoc_ema'
    ]
    return sum(algorithm.name == 'ema' for algorithm in algorithms) + sum(len(found) for found in widths)


def encoder_width(phase: Phase) -> int:
    """Bytes per parameter of frozen parts; `auto` is float16 on a GPU."""
    return FLOAT32 if phase.recipe.model.kwargs.get('encoder_dtype') == 'float32' else HALF


def largest_microbatch(phase: Phase, setup: Setup, gpu: GPU) -> int:
    """The largest microbatch that fits and divides the device's share of the batch; 0 if none does."""
    share = phase.recipe.global_batch // setup.devices
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    fitting = [size for size in divisors if fits_in_memory(memory_of(phase, replace(setup, microbatch=size)), gpu)]
    return max(fitting, default=0)


def fits_in_memory(memory: Memory, gpu: GPU) -> bool:
    return memory.reserved <= gpu.memory_gib * GIB


def strategies(setup: Setup) -> list[Setup]:
    """The set-up under each strategy, its own first."""
    own = setup.parallelism
    others = [
        replace(own, strategy='ddp', replicas=1),
        replace(own, strategy='fsdp2', reshard_after_forward=False),
        replace(own, strategy='fsdp2', reshard_after_forward=True),
    ]
    found = {setup.label: setup}
    for settings in others:
        other = replace(setup, parallelism=settings)
        found.setdefault(other.label, other)
    return list(found.values()) if setup.devices > 1 else [setup]


def ways_out(phase: Phase, setup: Setup, gpu: GPU, gpus: dict[str, GPU]) -> list[str]:
    """Settings that would make a set-up fit that does not."""
    found = []
    smaller = largest_microbatch(phase, setup, gpu)
    if smaller:
        found.append(f'device_train_microbatch_size={smaller}')
    if phase.speed().reduce_once and fits_in_memory(memory_of(_reducing_each(phase), setup), gpu):
        found.append('speed.reduce_once=false')
    if phase.model.is_latent_diffusion and not setup.parallelism.activation_checkpointing:
        recomputing = replace(setup, parallelism=replace(setup.parallelism, activation_checkpointing=True))
        if fits_in_memory(memory_of(phase, recomputing), gpu):
            found.append('parallelism.activation_checkpointing=true (about a third slower)')
    for other in strategies(setup)[1:]:
        if other.parallelism.strategy == 'fsdp2' and fits_in_memory(memory_of(phase, other), gpu):
            resharding = str(other.parallelism.reshard_after_forward).lower()
            found.append(f'parallelism.strategy=fsdp2 parallelism.reshard_after_forward={resharding}')
            break
    memory = memory_of(phase, setup)
    larger = [other for other in gpus.values() if fits_in_memory(memory, other) and phase.autocast in other.peak_tflops]
    if larger:
        found.append(f'--gpu {min(larger, key=lambda other: other.memory_gib).name}')
    return found


def _reducing_each(phase: Phase) -> Phase:
    speed = replace(phase.recipe.speed, reduce_once=False)
    return replace(phase, recipe=replace(phase.recipe, speed=speed))


def _divided(total: int, shards: int) -> int:
    return -(-total // shards)


def _compute_weights(
    phase: Phase, activations: ActivationCounts, settings: ParallelismConfig, *, keeps_gathered: bool
) -> int:
    autocast = activations.copies_recomputing if settings.activation_checkpointing else activations.copies
    if settings.strategy == 'ddp':
        return autocast
    width = FLOAT32 if phase.autocast == 'fp32' else HALF
    gathered_width = FLOAT32 if settings.mixed_precision == 'full' else width
    facts = phase.model.facts
    gathered = phase.model.trained_parameters
    if settings.reshard_after_forward and not keeps_gathered:
        # The block that is computed, the one fetched ahead, and what is in no block.
        gathered += 2 * facts['largest_block_parameters'] - facts['block_parameters']
    # Weights that are gathered wider than autocast wants are copied by it.
    return gathered_width * gathered + (autocast if gathered_width > width else 0)


def _in_flight(phase: Phase, setup: Setup) -> int:
    """Gradients of a block that FSDP is about to reduce, in the precision of computing and in float32."""
    return 0 if setup.shards == 1 else (HALF + FLOAT32) * phase.model.facts['largest_block_parameters']


def _encoding_bytes(phase: Phase, activations: ActivationCounts, microbatch: int) -> int:
    """About three tensors of the VAE encoder's largest size: a residual, a normalized and an activated one."""
    return 3 * microbatch * encoder_width(phase) * activations.largest_encoder_elements


def _sample_bytes(phase: Phase) -> int:
    shape = phase.largest_shape
    if phase.encoding == 'pictures':
        return 3 * shape.pixels
    stored = 2 if phase.model.posterior == 'sample' else 1
    text = phase.model.text_embedding_elements * HALF
    latents = phase.model.latent_elements(shape) * stored * HALF
    return latents + (text if phase.encoding == 'latents+text' else 0)
