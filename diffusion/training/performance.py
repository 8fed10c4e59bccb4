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
FUSED_ALTERNATIVES = {'foreach', 'capturable', 'differentiable'}
"""Optimizer keywords that select another implementation than `fused`."""


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


def compile_blocks(model: LatentDiffusion, *, shapes: int = 1) -> None:
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
