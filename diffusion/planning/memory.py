"""Memory of one device by purpose, and the largest microbatch that fits on the device.

Weights, gradients, optimizer states and averages follow from the number of parameters. Activations are the tensors that
autograd keeps, counted on the model itself by models/activation_memory.py: exactly under autocast, and within 3% in
compiled blocks. An allowance covers fragmentation and the memory of cuDNN and NCCL.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from diffusion.config import registry
from diffusion.config.model_checks import copies_reference
from diffusion.config.recipe import Component, ParallelismConfig
from diffusion.planning.gpus import GPU
from diffusion.planning.model_costs import FLOAT32, HALF, ActivationCounts, ModelCosts
from diffusion.planning.workload import Phase

GIB = 2**30
CONTEXT_BYTES = 1.5 * GIB
"""Assumed size of CUDA context, libraries and NCCL buffers, which torch does not count as allocated."""
FRAGMENTS = 0.05
"""Assumed fraction of allocated memory to add for cuDNN workspaces and fragmentation."""
ADAM_STATES = 2
"""Optimizer states per parameter in Adam; amsgrad has one more."""
MUON_BATCH_ELEMENTS = 2**24
"""Number of matrix elements that Muon orthogonalizes at a time on a GPU: `MAX_BATCH_ELEMENTS` in training/muon.py."""
MUON_BYTES_PER_ELEMENT = 12
"""Temporary bytes per matrix element in Muon's step: a float32 result and at most four bfloat16 tensors."""


@dataclass(frozen=True)
class Memory:
    """Memory that training takes on one device, in bytes by purpose."""

    weights: int
    """Weights of the denoiser and other trained modules in float32, or the device's shard of these."""
    optimizer: int
    averages: int
    encoders: int
    """Frozen VAE and text encoder, frozen networks of representation alignment and perceptual losses, and the copy of
    the denoiser that diffusion_dpo compares with."""
    gradients: int
    """Gradients, or the device's shard of them."""
    buckets: int
    """Unsharded gradients that wait for reduction: DDP's buckets, or FSDP2's gradients if it reduces once per batch."""
    compute_weights: int
    """Weights in compute precision: autocast's cache, or the parameters that FSDP has gathered."""
    activations: int
    """Activations of one microbatch that are kept for the backward pass."""
    working: int
    """Temporary tensors of the backward pass."""
    encoding: int
    """Activations of the frozen image encoder, which are freed before the denoiser runs."""
    step: int
    """Temporary tensors of the optimizer step; none with a fused AdamW."""
    batch: int
    """The device's part of the batch, as the loader returns it, and encoded samples with `speed.encode_batch_size`."""
    graphs: int
    """Memory of CUDA graphs: gradients that the next replay overwrites, the blocks' inputs and outputs, and gradients
    of inputs and outputs. The graphs' pool also keeps the memory of `activations` throughout the step."""
    accumulates: bool
    """True if gradients of an earlier microbatch exist during the forward pass."""

    @property
    def resident(self) -> int:
        """Bytes that are allocated throughout a training step."""
        # The pool of CUDA graphs never returns memory to the allocator, so activations in it count throughout the step.
        pool = self.graphs + self.activations if self.graphs else 0
        return self.weights + self.optimizer + self.averages + self.encoders + self.buckets + self.batch + pool

    @property
    def allocated(self) -> int:
        """Peak allocated bytes, as counted by torch.cuda.max_memory_allocated except for the pool of CUDA graphs."""
        # The peak of a step can be at the start of the backward pass, at its end (all gradients exist, and activations
        # are freed), in the optimizer step, or when images are encoded before the forward pass. At the start of a
        # backward pass, only gradients of earlier microbatches exist; new gradients appear as activations are freed.
        earlier = self.gradients if self.accumulates else 0
        activations = 0 if self.graphs else self.activations  # `resident` includes activations in CUDA graphs' pool
        backward = earlier + self.compute_weights + activations + self.working
        end_of_backward = self.gradients + self.compute_weights
        return self.resident + max(backward, end_of_backward, self.gradients + self.step, earlier + self.encoding)

    @property
    def reserved(self) -> int:
        """Bytes of memory that the GPU must have: `allocated` plus allowances for CUDA and fragmentation."""
        return round(self.allocated * (1 + FRAGMENTS) + CONTEXT_BYTES)

    def parts(self) -> dict[str, int]:
        return {name: value for name, value in asdict(self).items() if name != 'accumulates'}


@dataclass(frozen=True)
class Setup:
    """Number of devices, microbatch and parallelism of a run, which together determine the memory per device."""

    devices: int
    microbatch: int
    parallelism: ParallelismConfig

    @property
    def shards(self) -> int:
        """Number of devices over which weights, gradients and optimizer states are sharded."""
        return 1 if self.parallelism.strategy == 'ddp' else max(1, self.devices // self.parallelism.replicas)

    @property
    def label(self) -> str:
        """Name of the parallelism strategy as printed, such as 'fsdp2 SHARD_GRAD_OP'."""
        settings = self.parallelism
        if settings.strategy == 'ddp':
            return 'ddp'
        kind = 'FULL_SHARD' if settings.reshard_after_forward else 'SHARD_GRAD_OP'
        replicas = f' x {settings.replicas}' if settings.replicas > 1 else ''
        return f'{settings.strategy} {kind}{replicas}'


def memory_of(phase: Phase, setup: Setup) -> Memory:
    """Return the memory that training takes on one device, given the microbatch and parallelism in `setup`."""
    settings, shards = setup.parallelism, setup.shards
    parts = phase.speed(settings.strategy)
    activations = phase.model.activations(phase.largest_shape, phase.precision(settings.strategy))
    trained, images = phase.trained_parameters, phase.images_per_sample * setup.microbatch
    # Count gradients of earlier microbatches, which exist during later forward passes: otherwise, a plan would accept a
    # microbatch size that runs out of memory at the second microbatch.
    share = max(setup.microbatch, phase.recipe.global_batch // setup.devices)
    accumulates = share > setup.microbatch
    # With `speed.encode_batch_size`, the encoders process several microbatches at a time, and latents and text
    # embeddings are kept until their microbatch is trained.
    together = min(share, phase.recipe.speed.encode_batch_size or 0) if accumulates else 0
    # DDP's buckets are a second copy of all gradients, and FSDP2 keeps unsharded gradients if it reduces them only at
    # the last microbatch. Either takes 4 bytes per parameter on each device, regardless of sharding.
    reduces_once = accumulates and shards > 1 and bool(parts.reduce_once)
    unsharded_gradients = reduces_once or (settings.strategy == 'ddp' and setup.devices > 1)
    kept = activations.kept_recomputing if settings.activation_checkpointing else activations.kept
    extra = _auxiliary_activations(phase)
    encodes = phase.encoding == 'pictures' and phase.model.is_latent_diffusion
    optimizer = optimizer_elements(phase.recipe.optimizer, phase.model, auxiliary=phase.auxiliary_parameters)
    return Memory(
        weights=_divided(FLOAT32 * (trained + phase.model.frozen_denoiser_parameters), shards),
        optimizer=_divided(FLOAT32 * optimizer, shards),
        averages=_divided(FLOAT32 * averages_of(phase.recipe.algorithms) * trained, shards),
        encoders=_frozen_bytes(phase),
        gradients=_divided(FLOAT32 * trained, shards),
        buckets=FLOAT32 * trained if unsharded_gradients else 0,
        compute_weights=_compute_weights(phase, activations, settings, keeps_gathered=reduces_once)
        + sum(each.copies for each, _ in extra),
        activations=kept * images + round(sum(seen * each.kept for each, seen in extra) * setup.microbatch),
        # The backward passes of the networks run one after the other, so only the largest tensor counts.
        working=max(each.largest for each in (activations, *(each for each, _ in extra))) * images
        + _in_flight(phase, setup),
        encoding=_encoding_bytes(phase, activations, max(setup.microbatch, together)) if encodes else 0,
        step=_step_bytes(phase, setup, fused=bool(parts.fused_optimizer)),
        batch=share * phase.images_per_sample * (_sample_bytes(phase) + (_encoded_bytes(phase) if together else 0)),
        # `kept_between` estimates the size of the blocks' inputs and outputs, which is 0.8 times that for SD2.
        graphs=FLOAT32 * trained + 2 * activations.kept_between * images if parts.cuda_graphs else 0,
        accumulates=accumulates,
    )


def optimizer_elements(optimizer: Component, model: ModelCosts, *, auxiliary: int) -> int:
    """Return the number of elements in the optimizer's states: two per parameter, but one if Muon updates it."""
    states = ADAM_STATES + bool(optimizer.kwargs.get('amsgrad'))
    return states * (model.trained_parameters + auxiliary) - _muon_parameters(optimizer, model)


def averages_of(algorithms: Mapping[str, Component]) -> int:
    """Return the number of averaged copies of the weights at the end of the run."""
    post_hoc = [each for each in algorithms.values() if each.name == 'post_hoc_ema']
    widths = [registry.settings_of('algorithm', each)['widths'] for each in post_hoc]
    return sum(each.name == 'ema' for each in algorithms.values()) + sum(len(found) for found in widths)


def encoder_width(phase: Phase) -> int:
    """Return the bytes per parameter of the frozen encoders; `encoder_dtype: auto` is float16 on a GPU."""
    return FLOAT32 if phase.recipe.model.kwargs.get('encoder_dtype') == 'float32' else HALF


def largest_microbatch(phase: Phase, setup: Setup, gpu: GPU) -> int:
    """Return the largest microbatch that fits in memory and divides the batch per device; 0 if none fits."""
    share = phase.recipe.global_batch // setup.devices
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    fitting = [size for size in divisors if fits_in_memory(memory_of(phase, replace(setup, microbatch=size)), gpu)]
    return max(fitting, default=0)


def fits_in_memory(memory: Memory, gpu: GPU) -> bool:
    return memory.reserved <= gpu.memory_gib * GIB


def strategies(setup: Setup, *, devices_per_node: int | None = None) -> list[Setup]:
    """Return copies of a setup, one per parallelism strategy, the setup itself first; on one device, only itself.

    With `devices_per_node`, a run on several nodes also gets FSDP2 within each node (one replica per node).
    """
    current = setup.parallelism
    others = [
        replace(current, strategy='ddp', replicas=1, checkpoints='whole'),  # sharded ones need fsdp2
        replace(current, strategy='fsdp2', reshard_after_forward=False),
        replace(current, strategy='fsdp2', reshard_after_forward=True),
    ]
    if devices_per_node and setup.devices > devices_per_node > 1 and setup.devices % devices_per_node == 0:
        nodes = setup.devices // devices_per_node
        others.append(replace(current, strategy='fsdp2', reshard_after_forward=False, replicas=nodes))
    by_label = {setup.label: setup}
    for settings in others:
        other = replace(setup, parallelism=settings)
        by_label.setdefault(other.label, other)
    return list(by_label.values()) if setup.devices > 1 else [setup]


def ways_out(phase: Phase, setup: Setup, gpu: GPU, gpus: dict[str, GPU]) -> list[str]:
    """Return the changes that would each make a run fit in GPU memory; empty if none does."""
    found = []
    smaller = largest_microbatch(phase, setup, gpu)
    if smaller:
        found.append(f'device_train_microbatch_size={smaller}')
    without = replace(phase, recipe=replace(phase.recipe, speed=replace(phase.recipe.speed, reduce_once=False)))
    if phase.speed().reduce_once and fits_in_memory(memory_of(without, setup), gpu):
        found.append('speed.reduce_once=false')
    if phase.model.is_latent_diffusion and not setup.parallelism.activation_checkpointing:
        recomputing = replace(setup, parallelism=replace(setup.parallelism, activation_checkpointing=True))
        if fits_in_memory(memory_of(phase, recomputing), gpu):
            # Recomputing adds a forward pass (1 F) to the forward and backward passes (3 F).
            found.append('parallelism.activation_checkpointing=true (about a third slower)')
    for other in strategies(setup)[1:]:
        if other.parallelism.strategy == 'fsdp2' and fits_in_memory(memory_of(phase, other), gpu):
            # The first fsdp2 strategy is the fastest, because it does not gather weights again in the backward pass.
            resharding = str(other.parallelism.reshard_after_forward).lower()
            found.append(f'parallelism.strategy=fsdp2 parallelism.reshard_after_forward={resharding}')
            break
    memory = memory_of(phase, setup)
    larger = [other for other in gpus.values() if fits_in_memory(memory, other) and phase.autocast in other.peak_tflops]
    if larger:
        found.append(f'--gpu {min(larger, key=lambda other: other.memory_gib).name}')
    return found


def _muon_parameters(optimizer: Component, model: ModelCosts) -> int:
    """Return the number of parameters that Muon updates: those trained in the blocks; 0 if unknown or without Muon."""
    # Ignore that AdamW updates the blocks' norms and biases, which are only 0.05% of SD2's blocks. If Muon leaves
    # convolutions to AdamW, the number of Muon's parameters is unknown: 0 overestimates the memory.
    is_muon = optimizer.name == 'muon' and registry.settings_of('optimizer', optimizer)['convolutions']
    # With a LoRA, which freezes the blocks, Muon updates no more than the LoRA's parameters.
    return min(model.facts['block_parameters'], model.trained_parameters) if is_muon else 0


def _step_bytes(phase: Phase, setup: Setup, *, fused: bool) -> int:
    """Return the bytes of temporary tensors in the optimizer step, with or without `speed.fused_optimizer`."""
    name, facts = phase.recipe.optimizer.name, phase.model.facts
    # Composer's DecoupledAdamW has no fused kernel. In Muon, only the parameters that AdamW updates have one.
    others = phase.trained_parameters - _muon_parameters(phase.recipe.optimizer, phase.model)
    adamw = 0 if fused and name in ('adamw', 'muon') else _divided(FLOAT32 * others, setup.shards)
    if name != 'muon':
        return adamw
    # A matrix may be larger than Muon's batch, but not larger than a block. With DDP, each device holds all batches.
    batch = max(MUON_BATCH_ELEMENTS, facts['largest_block_parameters'])
    copies = setup.devices if setup.parallelism.strategy == 'ddp' else 1
    return max(adamw, MUON_BYTES_PER_ELEMENT * min(batch * copies, facts['block_parameters']))


def _divided(total: int, shards: int) -> int:
    return -(-total // shards)


def _compute_weights(
    phase: Phase, activations: ActivationCounts, settings: ParallelismConfig, *, keeps_gathered: bool
) -> int:
    """Return the bytes of weights in compute precision: autocast's copies, or parameters gathered by FSDP."""
    # Autocast caches a 16-bit copy of each weight in the forward pass; autograd keeps it for the backward pass.
    autocast = activations.copies_recomputing if settings.activation_checkpointing else activations.copies
    if settings.strategy == 'ddp':
        return autocast
    width = FLOAT32 if phase.autocast == 'fp32' else HALF
    gathered_width = FLOAT32 if settings.mixed_precision == 'full' else width
    facts = phase.model.facts
    gathered = phase.trained_parameters + phase.model.frozen_denoiser_parameters
    # With `speed.reduce_once`, all blocks stay gathered after a microbatch's backward pass, although they are freed
    # after the forward pass.
    if settings.reshard_after_forward and not keeps_gathered:
        # FSDP2 holds the current block, the prefetched block, and all parameters outside the blocks.
        gathered += 2 * facts['largest_block_parameters'] - facts['block_parameters']
    # Autocast copies weights only if they are gathered in a wider dtype than that of autocast.
    return gathered_width * gathered + (autocast if gathered_width > width else 0)


def _in_flight(phase: Phase, setup: Setup) -> int:
    """Return the bytes of gradients that FSDP reduces at a time: a block's, in compute precision and in float32."""
    largest = min(phase.model.facts['largest_block_parameters'], phase.trained_parameters)
    return 0 if setup.shards == 1 else (HALF + FLOAT32) * largest


def _frozen_bytes(phase: Phase) -> int:
    """Return the bytes of the frozen parts' weights; perceptual losses and a copied reference are in float32."""
    parameters = phase.model.frozen_parameters
    if phase.alignment is not None:
        parameters += phase.alignment.facts['frozen_parameters']
    perceptual = 0 if phase.perceptual is None else phase.perceptual.facts['frozen_parameters']
    reference = phase.model.trained_parameters if copies_reference(phase.recipe) else 0
    return encoder_width(phase) * parameters + FLOAT32 * (perceptual + reference)


def _auxiliary_activations(phase: Phase) -> list[tuple[ActivationCounts, float]]:
    """Return the activations of each network that only losses use, and the fraction of tokens that it processes."""
    shape, precision = phase.largest_shape, phase.auxiliary_precision
    found = []
    if phase.alignment is not None:
        found.append((phase.alignment.activations(shape, precision), phase.alignment.seen(phase.route)))
    if phase.perceptual is not None:
        found.append((phase.perceptual.activations(shape, precision), 1.0))
    return found


def _encoding_bytes(phase: Phase, activations: ActivationCounts, samples: int) -> int:
    """Return the bytes of the VAE encoder's activations, estimated as three times its largest tensor."""
    # A residual block needs three tensors: the residual, its normalization and the activation. The frozen encoder runs
    # without autograd, so earlier tensors are freed.
    return 3 * samples * encoder_width(phase) * activations.largest_encoder_elements


def _encoded_bytes(phase: Phase) -> int:
    """Return the bytes per sample of frozen encoders' outputs in float32, kept until their microbatch is trained."""
    latents = 2 * phase.model.latent_elements(phase.largest_shape) if phase.encoding == 'pictures' else 0
    has_text = phase.encoding == 'latents+text' or phase.model.trains_text
    return FLOAT32 * (latents + (0 if has_text else phase.model.text_embedding_elements))


def _sample_bytes(phase: Phase) -> int:
    """Return the bytes of one sample on the device: uint8 pixels, or latents and text embeddings in 16 bits."""
    shape = phase.largest_shape
    if phase.encoding == 'pictures':
        return 3 * shape.pixels
    stored = 2 if phase.model.posterior == 'sample' else 1
    text = phase.model.text_embedding_elements * HALF
    latents = phase.model.latent_elements(shape) * stored * HALF
    return latents + (text if phase.encoding == 'latents+text' else 0)
