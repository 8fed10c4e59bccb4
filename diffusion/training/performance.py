"""Apply a recipe's `speed` settings (memory format, attention kernels, norms, ...), and reduce the overhead of steps.

No setting changes parameter names, so checkpoints do not depend on these settings.
`diffusion.config.recipe.SpeedConfig` describes each setting.
"""

import logging
import os
from functools import cache, partial
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, Event, State
from composer.core.engine import Engine
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from diffusion.algorithms.average import unwrapped
from diffusion.algorithms.low_precision_norms import (
    LowPrecisionGroupNormLayer,
    LowPrecisionLayerNormLayer,
    replace_norms,
)
from diffusion.compatibility.private_names import config as dynamo_config
from diffusion.compatibility.private_names import private_attribute, set_private_attribute
from diffusion.config.recipe import SPEED_PARTS, SpeedConfig
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.activation_memory import blocks_of
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import fusible_random_bits
from diffusion.models.vae import encoder_blocks
from diffusion.training.block_graphs import BlockGraphs

log = logging.getLogger(__name__)

BACKEND = 'inductor'
FUSED_ALTERNATIVES = {'foreach', 'capturable', 'differentiable'}
"""Optimizer arguments that select an implementation other than `fused`."""


def apply_speed(model: ComposerModel, parts: SpeedConfig, *, strategy: str = 'ddp', shapes: int = 1) -> None:
    """Apply speed settings (see `effective_parts`) to a model; call before building the Trainer, which wraps the model.

    Args:
        model: A LatentDiffusion; other models are not changed.
        shapes: Number of image shapes in the data; blocks are compiled once per shape.
    """
    if not isinstance(model, LatentDiffusion):
        return
    if parts.channels_last:
        # fully_shard only accepts contiguous parameters (torch 2.7, _fsdp_param.py: "FSDP does not support
        # non-contiguous parameters yet"); cuDNN then follows the memory format of the activations.
        channels_last(model, weights=strategy == 'ddp')
    if parts.flash_attention:
        fuse_attention(model.denoiser)
    if parts.compile:
        compile_blocks(model, shapes=shapes)
    if parts.low_precision_norms:
        blocks = blocks_of(model.denoiser) if parts.compile else []
        keep = {layer for block in blocks for layer in block.modules()}
        replace_norms(model.denoiser, nn.GroupNorm, LowPrecisionGroupNormLayer, keep=keep)
        replace_norms(model.denoiser, nn.LayerNorm, LowPrecisionLayerNormLayer, keep=keep)
    if parts.cuda_graphs:
        BlockGraphs(model.denoiser, blocks_of(model.denoiser))
    model.encoders_in_inference_mode = bool(parts.inference_mode)
    on = [part for part in SPEED_PARTS if getattr(parts, part)]
    if on:
        log.info('speed: %s', ', '.join(on))


def set_backends(parts: SpeedConfig, *, on_gpu: bool, deterministic: bool = False) -> None:
    """Turn TF32 and cuDNN benchmarking on or off for this process, if it uses a GPU; call after building the Trainer.

    Args:
        deterministic: If True, keep the cuDNN benchmarking setting of Composer's deterministic mode.
    """
    # Composer's Trainer sets TF32 in its constructor, so an earlier call would have no effect.
    if not on_gpu:
        return
    torch.backends.cuda.matmul.allow_tf32 = bool(parts.tf32)
    torch.backends.cudnn.allow_tf32 = bool(parts.tf32)
    if not deterministic:
        torch.backends.cudnn.benchmark = bool(parts.conv_benchmark)


def channels_last(model: LatentDiffusion, *, weights: bool) -> None:
    """Make the VAE and the denoiser compute in channels_last; `weights` converts the denoiser's weights to it too."""
    # Call nn.Module.to: diffusers' override of vae.to() warns about modules that this VAE does not have.
    nn.Module.to(model.vae, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if weights:
        nn.Module.to(model.denoiser, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.denoiser.register_forward_pre_hook(_in_channels_last)


def _in_channels_last(denoiser: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the denoiser's positional arguments with the latents in channels_last; a forward pre-hook."""
    noisy: Tensor = args[0]
    return (noisy.contiguous(memory_format=torch.channels_last), *args[1:])


def fuse_attention(denoiser: Any) -> None:
    """Replace diffusers' plain attention processors with `scaled_dot_product_attention`.

    On GPUs, it uses flash attention in half precision, for heads with up to 256 channels (64 in SD2) and without a
    mask. With `mask_padding`, cross-attention uses the memory-efficient kernel.
    """
    # Share one stateless processor among all layers. Dynamo in torch 2.7 guards on its identity: with one per layer, it
    # would compile every transformer block, even those with equal shapes (SD2: 39 graphs instead of 28).
    shared: dict[type, Any] = {AttnProcessor: AttnProcessor2_0()}
    shared[AttnProcessor2_0] = shared[AttnProcessor]
    processors = denoiser.attn_processors.items()
    # The processors of transformer denoisers already use fused attention; share their stateless processors too.
    fused = {name: each if vars(each) else shared.setdefault(type(each), each) for name, each in processors}
    denoiser.set_attn_processor(fused)


def compile_blocks(model: LatentDiffusion, *, shapes: int) -> None:
    """Compile the denoiser's blocks (for training only), the VAE encoder's blocks, and random number draws."""
    # Compile each block's `forward` instead of the module, so that FSDP's hooks stay outside the graph and state dict
    # names do not change. Evaluation and sampling run the denoiser without compiled blocks: they have many batch sizes,
    # and each would be compiled. Blocks with equal shapes share compiled code; transformer blocks do so only if they
    # share their attention processor (`fuse_attention`).
    trained = blocks_of(model.denoiser)
    encoding = encoder_blocks(model.vae)
    # Each shape is compiled with gradients, without gradients, and for a smaller last batch.
    configure_dynamo(graphs=4 * shapes * (len(trained) + len(encoding)))
    for block in trained:
        _compile_forward(block, with_gradients=True)
    for block in encoding:
        _compile_forward(block, with_gradients=False)
    # Use one graph for all shapes: the arithmetic takes no time, but launching 60 separate kernels would.
    model.random_bits = torch.compile(fusible_random_bits, dynamic=True, backend=BACKEND)


def configure_dynamo(*, graphs: int) -> None:
    """Configure torch.compile for blocks: the number of graphs per function, floats as constants, no graph splits."""
    # All blocks of a class share one `forward`, so they share its limit of 8 recompilations in torch 2.7. Beyond the
    # limit, Dynamo runs them eagerly and only logs a warning.
    config: Any = dynamo_config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)
    # Compile floats as constants: norms in blocks that share code have different epsilons, and an epsilon that is a
    # variable causes a graph break (torch 2.7).
    config.specialize_float = True
    # Dynamo would split graphs at DDP's buckets to overlap their reduction, but blocks are already smaller than that.
    config.optimize_ddp = False


def _compile_forward(block: nn.Module, *, with_gradients: bool) -> None:
    """Compile a block's `forward`; `with_gradients` uses the compiled one only while gradients are enabled."""
    eager = block.forward
    compiled = torch.compile(eager, dynamic=False, backend=BACKEND)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if with_gradients and not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        return compiled(*args, **kwargs)

    block.forward = forward


def keep_layout(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer keep its own `fused`, `foreach` and moments' strides when it loads state from a checkpoint."""
    # Fused kernels reject weights and moments with different strides, which occur if a run without channels_last is
    # resumed with it. A checkpoint also contains the `fused` and `foreach` settings of the optimizer that wrote it.
    settings = {key: optimizer.defaults[key] for key in ('fused', 'foreach') if key in optimizer.defaults}

    def restore(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(settings)
            for parameter in group['params']:
                state = optimizer.state.get(parameter, {})
                state.update(
                    {key: _like(value, parameter) for key, value in state.items() if isinstance(value, Tensor)}
                )
                # Fused kernels also need `step` on the weights' device; other implementations keep it on the CPU.
                if group.get('fused') and isinstance(state.get('step'), Tensor):
                    state['step'] = state['step'].to(parameter.device, torch.float32)

    optimizer.register_load_state_dict_post_hook(restore)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return a state tensor of an optimizer with the strides of its parameter, copied if its own strides differ."""
    # Leave subclasses unchanged: under FSDP2, weights and moments are DTensors, which are always contiguous (see
    # apply_speed).
    if type(value) is not Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


EVENTS_OF_A_STEP = frozenset(
    {
        *(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
        *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS),
        *(Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH),
        *(Event.BATCH_END, Event.BATCH_CHECKPOINT),
    }
)


def reduce_step_overhead(trainer: Trainer) -> None:
    """Reduce the host overhead of a built Trainer's steps.

    Callbacks and loggers are called, in the same order as before, only for events whose methods they override. Composer
    searches for FSDP modules once instead of in each step. If a profiler or Composer's debug log is on, callbacks and
    loggers are still called for all events.
    """
    # A step takes 22 to 70 ms on 128 GPUs, which are idle while the host prepares the next step.
    trainer.state.__class__ = _StateOfKnownModel
    if trainer.state.profiler is None and not os.environ.get('ENGINE_DEBUG'):
        _call_only_handlers(trainer.engine)


class _StateOfKnownModel(State):
    """Composer's State with one search of the model for FSDP modules, instead of a search after every step."""

    # In a model without FSDP, the search visits frozen parts too: 1,236 modules for Stable Diffusion 2. DDP wraps the
    # model in the first fit(), so store the result together with the model that was searched.
    _searched: tuple[Any, bool] | None = None

    @property
    def fsdp_enabled(self) -> bool:
        if self._searched is None or self._searched[0] is not self.model:
            self._searched = self.model, super().fsdp_enabled
        return self._searched[1]


def _call_only_handlers(engine: Engine) -> None:
    """Make an engine call callbacks and loggers only for events that they handle."""
    # Composer calls every callback for every event, and first formats lines for a debug log. This takes 10 microseconds
    # for each of 25 events and 16 callbacks: 4 ms per step, a fifth of a step on 128 H100s. Nearly all of these calls
    # do nothing.
    run_algorithms, run_any_event = private_attribute(engine, '_run_algorithms'), engine.run_event

    def dispatch(event: Event | str, *, to_loggers: bool) -> None:
        event = Event(event)
        for callback in engine.state.callbacks:
            if _is_logger(type(callback)) == to_loggers and handles(callback, event.value):
                callback.run_event(event, engine.state, engine.logger)

    run_callbacks, run_loggers = partial(dispatch, to_loggers=False), partial(dispatch, to_loggers=True)

    def run_event(event: Event | str) -> Any:
        event = Event(event)
        if event not in EVENTS_OF_A_STEP:
            # Use Composer's own method, which at FIT_START also checks that the engine is open and that there is data.
            return run_any_event(event)
        traces = run_algorithms(event) if engine.state.algorithms else {}
        run_callbacks(event)
        run_loggers(event)
        return traces

    set_private_attribute(engine, '_run_loggers', run_loggers)
    set_private_attribute(engine, '_run_nonlogger_callbacks', run_callbacks)
    engine.run_event = run_event  # type: ignore[method-assign]


@cache
def _is_logger(kind: type[Callback]) -> bool:
    return issubclass(kind, LoggerDestination)


def handles(callback: Callback, event: str) -> bool:
    """Return True if a callback handles an event, given as the name of the event's method, such as `batch_end`."""
    # A method may also be overridden on the instance.
    changed = callback.__dict__
    return event in changed or 'run_event' in changed or _class_handles(type(callback), event)


@cache
def _class_handles(kind: type[Callback], event: str) -> bool:
    overrides_all = kind.run_event not in (Callback.run_event, LoggerDestination.run_event)
    return overrides_all or getattr(kind, event) not in (getattr(Callback, event), getattr(LoggerDestination, event))


class EncodeTogether(Algorithm):
    """Encode a device's batch before it is split into microbatches (the setting `speed.encode_batch_size`).

    The frozen VAE and text encoders then run a few large kernels instead of many small ones per microbatch, which
    reduces host overhead. Their activations are freed before the first microbatch is trained. Batches of a single
    microbatch are left unchanged. Random numbers depend on samples, so results differ only by rounding in the kernels.

    Args:
        batch_size: Number of samples that are encoded at a time.
    """

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise UserError(f'speed.encode_batch_size: {batch_size} samples; use 1 or more, or null')
        self.batch_size = batch_size
        self._given: dict[str, Tensor] | None = None

    def match(self, event: Event, state: State) -> bool:
        # Encode at BATCH_START: Composer splits the batch afterwards, and again when it tries smaller microbatches.
        return event in (Event.BATCH_START, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            # Restore the original batch: with the encoded one, SpeedMonitor would not count the encoders' FLOPs.
            if self._given is not None:
                state.batch, self._given = self._given, None
            return
        model, size = unwrapped(state.model), state.device_train_microbatch_size
        if isinstance(model, LatentDiffusion):
            batch_keys.check_batch(state.batch)
        if isinstance(model, LatentDiffusion) and size is not None and len(state.batch[batch_keys.INPUT_IDS]) > size:
            model.place(state.device.tensor_to_device(torch.empty(0)).device)
            self._given, state.batch = state.batch, model.encode_batch(state.batch, self.batch_size)
