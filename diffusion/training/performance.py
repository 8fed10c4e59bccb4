"""Apply a recipe's `speed` settings: memory format, attention kernels, norms, compilation, optimizer settings.

No setting changes parameter names, so checkpoints do not depend on these settings.
`diffusion.config.recipe.SpeedConfig` describes each setting.
"""

import logging
from typing import Any

import torch
from composer.models import ComposerModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

from diffusion.algorithms.low_precision_norms import (
    LowPrecisionGroupNormLayer,
    LowPrecisionLayerNormLayer,
    replace_norms,
)
from diffusion.compatibility.private_names import config as dynamo_config
from diffusion.config.recipe import SPEED_PARTS, SpeedConfig
from diffusion.models.activation_memory import blocks_of
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import fusible_random_bits
from diffusion.models.vae import encoder_blocks
from diffusion.training.block_graphs import BlockGraphs

log = logging.getLogger(__name__)

BACKEND = 'inductor'
"""Backend of torch.compile."""
FUSED_ALTERNATIVES = {'foreach', 'capturable', 'differentiable'}
"""Keywords of an optimizer that choose another implementation than `fused`."""


def apply_speed(model: ComposerModel, parts: SpeedConfig, *, strategy: str = 'ddp', shapes: int = 1) -> None:
    """Apply a recipe's `speed` settings to a model; call before building the Trainer, which wraps the model.

    Args:
        model: A LatentDiffusion; other models are not changed.
        parts: Settings as returned by `effective_parts`.
        strategy: ddp or fsdp2.
        shapes: Number of image shapes in the data; blocks are compiled once per shape.
    """
    if not isinstance(model, LatentDiffusion):
        return
    if parts.channels_last:
        # fully_shard takes only contiguous parameters (torch 2.7, _fsdp_param.py: "FSDP does not support
        # non-contiguous parameters yet"); cuDNN then follows the activations.
        channels_last(model, weights=strategy == 'ddp')
    if parts.flash_attention:
        fuse_attention(model.denoiser)
    if parts.compile:
        compile_blocks(model, shapes=shapes)
    if parts.low_precision_norms:
        lower_norms(model.denoiser, except_blocks=bool(parts.compile))
    if parts.cuda_graphs:
        BlockGraphs(model.denoiser, blocks_of(model.denoiser))
    model.encoders_in_inference_mode = bool(parts.inference_mode)
    on = [part for part in SPEED_PARTS if getattr(parts, part)]
    if on:
        log.info('speed: %s', ', '.join(on))


def set_backends(parts: SpeedConfig, *, on_gpu: bool, deterministic: bool = False) -> None:
    """Turn TF32 and cuDNN benchmarking of this process on or off, if it uses a GPU; call after building the Trainer.

    Args:
        parts: Settings as returned by `effective_parts`.
        deterministic: True leaves cuDNN benchmarking as Composer's deterministic mode sets it.
    """
    # Composer's Trainer sets TF32 when it is built, which would undo an earlier call.
    if not on_gpu:
        return
    torch.backends.cuda.matmul.allow_tf32 = bool(parts.tf32)
    torch.backends.cudnn.allow_tf32 = bool(parts.tf32)
    if not deterministic:
        torch.backends.cudnn.benchmark = bool(parts.conv_benchmark)


def channels_last(model: LatentDiffusion, *, weights: bool) -> None:
    """Make denoiser and VAE compute in the channels_last memory format.

    Args:
        weights: True also stores the denoiser's weights in channels_last; the VAE's always are.
    """
    # Call nn.Module.to: diffusers overrides vae.to() by a method that warns about modules that this VAE does not have.
    nn.Module.to(model.vae, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if weights:
        nn.Module.to(model.denoiser, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.denoiser.register_forward_pre_hook(_in_channels_last)


def _in_channels_last(denoiser: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the denoiser's positional arguments with the latents in channels_last; a forward pre-hook."""
    noisy: Tensor = args[0]
    return (noisy.contiguous(memory_format=torch.channels_last), *args[1:])


def fuse_attention(denoiser: Any) -> None:
    """Replace diffusers' plain attention processors by `scaled_dot_product_attention`.

    On GPUs, this function uses flash attention in half precision, for heads of up to 256 channels (64 in SD2) without a
    mask. With `mask_padding`, cross-attention uses the memory-efficient kernel.
    """
    # Share one processor, which has no state, between all layers. Dynamo of torch 2.7 guards its identity: with one per
    # layer, it would compile each transformer block, although their shapes are equal (SD2: 39 graphs instead of 28).
    shared: dict[type, Any] = {AttnProcessor: AttnProcessor2_0()}
    shared[AttnProcessor2_0] = shared[AttnProcessor]
    processors = denoiser.attn_processors.items()
    # Processors of transformers call fused attention already; those without state are shared too.
    fused = {name: each if vars(each) else shared.setdefault(type(each), each) for name, each in processors}
    denoiser.set_attn_processor(fused)


def lower_norms(denoiser: nn.Module, *, except_blocks: bool) -> None:
    """Replace the denoiser's GroupNorm and LayerNorm layers by layers that compute in the autocast dtype.

    Args:
        except_blocks: True keeps the norms of compiled blocks, which torch.compile fuses.
    """
    blocks = blocks_of(denoiser) if except_blocks else []
    keep = {layer for block in blocks for layer in block.modules()}
    replace_norms(denoiser, nn.GroupNorm, LowPrecisionGroupNormLayer, keep=keep)
    replace_norms(denoiser, nn.LayerNorm, LowPrecisionLayerNormLayer, keep=keep)


def compile_blocks(model: LatentDiffusion, *, shapes: int = 1) -> None:
    """Compile the blocks of the denoiser (for training only) and of a frozen VAE's encoder with torch.compile."""
    # The `forward` of a block is compiled instead of the module, so that FSDP's hooks stay outside of the graph and
    # names in state dicts do not change. Evaluation and sampling run the denoiser eagerly, because each of their many
    # batch sizes would be compiled. Blocks of equal shapes share compiled code; transformer blocks only if they share
    # their attention processor (`fuse_attention`).
    trained = blocks_of(model.denoiser)
    encoding = encoder_blocks(model.vae)
    # Each shape is compiled with and without gradients, and for a smaller last batch.
    configure_dynamo(graphs=4 * shapes * (len(trained) + len(encoding)))
    for block in trained:
        _compile_forward(block, with_gradients=True)
    for block in encoding:
        _compile_forward(block, with_gradients=False)
    # One graph for all shapes: its arithmetic takes no time, but 60 kernels one by one would.
    model.random_bits = torch.compile(fusible_random_bits, dynamic=True, backend=BACKEND)


def configure_dynamo(*, graphs: int) -> None:
    """Configure torch.compile for blocks: the number of graphs per function, floats as constants, no graph splits."""
    # All blocks of a class share one `forward`, so they share its limit of 8 recompilations in torch 2.7. Beyond the
    # limit, Dynamo runs them eagerly and only logs a warning.
    config: Any = dynamo_config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)
    # Norms of blocks that share code differ in epsilon. An epsilon that is a variable breaks the graph (torch 2.7).
    config.specialize_float = True
    # Dynamo would split graphs at DDP's buckets to overlap their reduction; blocks are smaller than that already.
    config.optimize_ddp = False


def _compile_forward(block: nn.Module, *, with_gradients: bool) -> None:
    """Replace a block's `forward` method by a version compiled with torch.compile.

    If `with_gradients` is True, the compiled version runs only while gradients are enabled, and the block runs eagerly
    otherwise.
    """
    eager = block.forward
    compiled = torch.compile(eager, dynamic=False, backend=BACKEND)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if with_gradients and not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        return compiled(*args, **kwargs)

    block.forward = forward


def keep_layout(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer keep the strides of its moments, `fused` and `foreach` when it loads a checkpoint's state."""
    # Fused kernels refuse weights and moments with different strides, which happens when a run without channels_last
    # is resumed with it. A checkpoint also holds `fused` and `foreach` of the optimizer that wrote it.
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
    """Return a tensor of an optimizer's state, copied to the strides of its parameter if they differ."""
    # Subclasses are left alone: under FSDP2, weights and moments are DTensors, which are always contiguous (see
    # apply_speed).
    if type(value) is not Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
