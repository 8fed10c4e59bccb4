"""What makes a training step fast, part by part: memory format, kernels, precision, compilation, copies.

Every part leaves parameter names, and so checkpoints, as they are. `diffusion.config.recipe.SpeedConfig` describes
each part.
"""

import logging
from typing import Any

import torch
import torch._dynamo
from composer.models import ComposerModel
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from diffusion.algorithms.low_precision_norms import (
    LowPrecisionGroupNormLayer,
    LowPrecisionLayerNormLayer,
    replace_norms,
)
from diffusion.config.performance_preset import PARTS
from diffusion.config.recipe import SpeedConfig
from diffusion.models.latent_diffusion import LatentDiffusion, is_block

log = logging.getLogger(__name__)

BACKEND = 'inductor'
"""Backend of torch.compile."""
FUSED_ALTERNATIVES = {'foreach', 'capturable', 'differentiable'}
"""Keywords of an optimizer that choose another implementation than `fused`."""


def apply_speed(model: ComposerModel, parts: SpeedConfig, *, strategy: str = 'ddp', shapes: int = 1) -> None:
    """Do to a model what the parts say, before a Trainer wraps it.

    Args:
        model: A LatentDiffusion; others are left alone.
        parts: As `chosen` decided.
        strategy: Of the parallelism.
        shapes: Different shapes of pictures in the data, each of which is compiled on its own.
    """
    if not isinstance(model, LatentDiffusion):
        return
    if parts.channels_last:
        # fully_shard takes contiguous parameters alone (torch 2.7, _fsdp_param.py: "FSDP does not support
        # non-contiguous parameters yet"); cuDNN then follows the activations.
        channels_last(model, weights=strategy == 'ddp')
    if parts.flash_attention:
        fuse_attention(model.denoiser)
    if parts.compile:
        compile_blocks(model, shapes=shapes)
    if parts.low_precision_norms:
        lower_norms(model.denoiser, except_blocks=bool(parts.compile))
    model.encoders_in_inference_mode = bool(parts.inference_mode)
    on = [part for part in PARTS if getattr(parts, part)]
    if on:
        log.info('speed: %s', ', '.join(on))


def set_backends(parts: SpeedConfig, *, on_gpu: bool, deterministic: bool = False) -> None:
    """Set what is global to the process; after a Trainer is made, whose device sets TF32 by itself."""
    if not on_gpu:
        return
    torch.backends.cuda.matmul.allow_tf32 = bool(parts.tf32)
    torch.backends.cudnn.allow_tf32 = bool(parts.tf32)
    if not deterministic:
        torch.backends.cudnn.benchmark = bool(parts.conv_benchmark)


def channels_last(model: LatentDiffusion, *, weights: bool) -> None:
    """Let the denoiser compute with channels innermost; the VAE always with weights in that order too."""
    # Not vae.to(): diffusers' override of it warns about modules that this VAE has not.
    nn.Module.to(model.vae, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if weights:
        nn.Module.to(model.denoiser, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.denoiser.register_forward_pre_hook(_in_channels_last)


def _in_channels_last(denoiser: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    noisy: Tensor = args[0]
    return (noisy.contiguous(memory_format=torch.channels_last), *args[1:])


def fuse_attention(denoiser: UNet2DConditionModel) -> None:
    """Compute attention by `scaled_dot_product_attention` where diffusers' plain processor would.

    On GPUs it takes flash attention in half precision for heads of up to 256 channels (SD2's have 64) without a mask:
    `mask_padding` leaves cross-attention to the memory-efficient kernel.
    """
    processors = denoiser.attn_processors.items()
    fused: Any = {name: AttnProcessor2_0() if type(each) is AttnProcessor else each for name, each in processors}
    denoiser.set_attn_processor(fused)


def lower_norms(denoiser: nn.Module, *, except_blocks: bool) -> None:
    """Let norms compute in autocast's dtype; those inside of compiled blocks are fused, and stay as precise as ever."""
    blocks = [block for block in denoiser.modules() if except_blocks and is_block(block)]
    keep = {layer for block in blocks for layer in block.modules()}
    replace_norms(denoiser, nn.GroupNorm, LowPrecisionGroupNormLayer, keep=keep)
    replace_norms(denoiser, nn.LayerNorm, LowPrecisionLayerNormLayer, keep=keep)


def compile_blocks(model: LatentDiffusion, *, shapes: int = 1) -> None:
    """Compile the denoiser's blocks for training, and those of a frozen VAE's encoder.

    A block's `forward` is compiled and not the module: hooks of FSDP stay outside of the graph, and state dicts have
    the names they had. Evaluation and sampling run the denoiser as it was, since their many batch sizes would each be
    compiled. Blocks of equal shapes share what was compiled.
    """
    trained = [block for block in model.denoiser.modules() if is_block(block)]
    encoding = [block for block in model.vae.encoder.modules() if is_block(block)]  # type: ignore[union-attr]
    # A shape comes with and without gradients, and at an epoch's end in a smaller batch.
    configure_dynamo(graphs=4 * shapes * (len(trained) + len(encoding)))
    for block in trained:
        _compile_forward(block, with_gradients=True)
    for block in encoding:
        _compile_forward(block, with_gradients=False)


def configure_dynamo(*, graphs: int) -> None:
    """Let Dynamo make so many graphs of one function, which blocks share; past its limit it runs them eagerly."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)
    # Norms of blocks that share code differ in epsilon, which as a variable breaks graphs (torch 2.7).
    config.specialize_float = True
    # It would cut blocks at DDP's buckets to reduce these early; blocks are small enough.
    config.optimize_ddp = False


def _compile_forward(block: nn.Module, *, with_gradients: bool) -> None:
    eager = block.forward
    compiled = torch.compile(eager, dynamic=False, backend=BACKEND)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if with_gradients and not torch.is_grad_enabled():
            return eager(*args, **kwargs)
        return compiled(*args, **kwargs)

    block.forward = forward


def keep_layout(optimizer: torch.optim.Optimizer) -> None:
    """After a checkpoint is loaded, moments get the strides of their weights and the optimizer its own settings again.

    Fused kernels refuse weights and moments of different strides, as they are where a run without channels_last is
    continued with it; and a checkpoint says how the optimizer that wrote it computed.
    """
    how = {key: optimizer.defaults[key] for key in ('fused', 'foreach') if key in optimizer.defaults}

    def restore(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group.update(how)
            for parameter in group['params']:
                state = optimizer.state.get(parameter, {})
                state.update(
                    {key: _like(value, parameter) for key, value in state.items() if isinstance(value, Tensor)}
                )
                if group.get('fused') and isinstance(state.get('step'), Tensor):
                    state['step'] = state['step'].to(parameter.device, torch.float32)

    optimizer.register_load_state_dict_post_hook(restore)


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    if type(value) is not Tensor or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
