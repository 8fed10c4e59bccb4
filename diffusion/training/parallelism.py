"""Parallelism of a run: settings for Composer and PyTorch, the order of DDP's buckets, and a fix for FSDP2 on CPUs."""

import functools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.nn.parallel import DistributedDataParallel

from diffusion.config.recipe import ParallelismConfig
from diffusion.errors import UserError


@dataclass
class HybridFSDP2Config(FSDP2Config):
    """Composer's FSDP2Config with replicas: groups of devices that hold a whole model each (HYBRID_SHARD)."""

    replicas: int = 1
    """Number of groups."""

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        return self.replicas if self.replicas > 1 else None


def parallelism_config(settings: ParallelismConfig) -> dict[str, Any] | None:
    """Return the `parallelism_config` of composer.Trainer; None for DDP."""
    precision = settings.mixed_precision.upper()
    if settings.strategy == 'ddp':
        return None
    if settings.strategy == 'fsdp2':
        average_gradients_on_cpu()
        if settings.replicas > 1 and not torch.cuda.is_available():
            # torch 2.7 asserts an event of a CUDA stream when it reduces over replicas.
            raise UserError(f'parallelism.replicas: {settings.replicas} groups need GPUs; use 1 on CPUs')
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='FSDP2 Config/APIs are experimental')
            config = HybridFSDP2Config(
                reshard_after_forward=settings.reshard_after_forward,
                mixed_precision=precision,
                state_dict_type='full',  # for Composer's own checkpoints; our Checkpointer writes sharded ones itself
                replicas=settings.replicas,
            )
        return {'fsdp': config}
    hybrid = settings.replicas > 1
    strategies = {
        (True, False): 'FULL_SHARD',
        (False, False): 'SHARD_GRAD_OP',
        (True, True): 'HYBRID_SHARD',
        (False, True): '_HYBRID_SHARD_ZERO2',
    }
    config = {
        'sharding_strategy': strategies[settings.reshard_after_forward, hybrid],
        'mixed_precision': precision,
        'use_orig_params': True,
        'state_dict_type': 'full',
    }
    return {'fsdp': config | ({'data_parallel_replicate_degree': settings.replicas} if hybrid else {})}


def settle_buckets(model: DistributedDataParallel) -> None:
    """Bring DDP's buckets into their final order before the first batch.

    DDP assigns gradients to buckets in the order of the parameters, and reassigns them after the first batch of a
    process, in the order in which they became ready. The order in which an all-reduce sums over ranks depends on a
    parameter's offset in its bucket. So on more than two ranks, the first batch after a restart would be summed in
    another order than in an uninterrupted run, and losses would differ.

    This backward pass of zeros triggers the reassignment before training, in about the order of a real backward pass,
    which the overlap of reduction and computation depends on.
    """
    module = model.module
    parameters = [parameter for parameter in in_order_of_use(module) if parameter.requires_grad]
    # DDP offers no call for this: its reducer only counts gradients of a forward pass through the DDP module, and a
    # pass through the real model would need a batch. So the wrapped module is swapped for one without inputs; it has
    # no buffers to broadcast.
    model.module, model.require_forward_param_sync = _Touch(parameters), False
    try:
        model().backward()
    finally:
        model.module, model.require_forward_param_sync = module, True
    for parameter in parameters:
        parameter.grad = None


def in_order_of_use(module: nn.Module) -> list[nn.Parameter]:
    """Return parameters in the order of a forward pass; diffusers registers the mid block after the up blocks."""
    later = ('mid_block.', 'up_blocks.', 'conv_norm_out.', 'conv_out.')
    stage_of = {
        name: max((stage for stage, part in enumerate(later, 1) if part in name and 'denoiser.' in name), default=0)
        for name, _ in module.named_parameters()
    }
    return [parameter for _, parameter in sorted(module.named_parameters(), key=lambda item: stage_of[item[0]])]


class _Touch(nn.Module):
    """Compute zero from every parameter, so that each gets a gradient."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._touched = tuple(parameters)  # a tuple is not registered: the parameters stay those of the real module

    def forward(self) -> Tensor:
        # The sum is left-associative, so its backward pass goes from the last parameter to the first.
        return functools.reduce(operator.add, (each.sum().float() * 0 for each in self._touched))


def average_gradients_on_cpu() -> None:
    """Make FSDP2 average gradients on CPUs, where torch 2.7 sums them.

    FSDP2 asks for ReduceOp.AVG, which gloo silently treats as a sum: on N ranks every gradient is N times too large.
    Adam's updates do not depend on that scale and hide it, but gradient clipping and moments that are resumed elsewhere
    do. Measured with torch 2.7.0. Dividing after a plain sum is what FSDP2 itself does in float16. The patch can go
    when gloo averages.
    """
    factors = _fsdp_collectives._get_gradient_divide_factors
    if hasattr(factors, '__wrapped__'):
        return

    @functools.wraps(factors)
    def averaging(scatter: Any, replicate: Any, dtype: torch.dtype, device_type: str = '') -> Any:
        if device_type != 'cpu':
            return factors(scatter, replicate, dtype, device_type)
        return 1.0, float(scatter.size() * (1 if replicate is None else replicate.size()))

    _fsdp_collectives._get_gradient_divide_factors = averaging
