"""Parallelism settings for Composer and PyTorch, the order of DDP's gradient buckets, and a fix for FSDP2 on CPUs."""

import datetime
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diffusion.compatibility import private_names
from diffusion.compatibility.torch_versions import average_by_summing, ignore_views_of_fsdp2, set_group_timeout
from diffusion.config.recipe import ParallelismConfig
from diffusion.errors import UserError


@dataclass
class HybridFSDP2Config(FSDP2Config):
    """Composer's FSDP2Config with support for replicas: device groups that each hold a whole model (HYBRID_SHARD)."""

    replicas: int = 1
    """Number of replicas."""

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """Number of replicas, which is the size of the device mesh's outer dimension; None for a single replica.

        Composer 0.32 builds the mesh from this attribute, which is always None in Composer's own FSDP2Config.
        """
        return self.replicas if self.replicas > 1 else None


def parallelism_config(settings: ParallelismConfig) -> dict[str, Any] | None:
    """Return composer.Trainer's `parallelism_config` for a recipe's settings, under the key `fsdp`; None for DDP."""
    if settings.strategy == 'ddp':
        return None
    if settings.replicas > 1 and not torch.cuda.is_available():
        # FSDP2 in torch 2.7 cannot reduce over replicas on CPUs: it asserts that a CUDA stream event exists.
        raise UserError(f'parallelism.replicas: {settings.replicas} groups need GPUs; use 1 on CPUs')
    ignore_views_of_fsdp2()
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='FSDP2 Config/APIs are experimental')
        config = HybridFSDP2Config(
            reshard_after_forward=settings.reshard_after_forward,
            mixed_precision=settings.mixed_precision.upper(),
            state_dict_type='full',  # only for Composer's own checkpoints; our Checkpointer writes sharded ones itself
            replicas=settings.replicas,
        )
    return {'fsdp': config}


def set_group_timeouts(seconds: float) -> None:
    """Set the timeout for collectives in all process groups of this process, such as those of FSDP's device mesh."""
    # When torch creates the groups of a mesh with replicas, it ignores the default group's timeout and uses its own, 10
    # minutes for NCCL. A hanging run would then be ended by a timeout in one of these groups, before the watchdog acts.
    if not torch.distributed.is_initialized():
        return
    for group in list(private_names._world.pg_map):
        if torch.distributed.get_backend(group) in ('nccl', 'gloo') and torch.distributed.get_world_size(group) > 0:
            set_group_timeout(datetime.timedelta(seconds=seconds), group)


def settle_buckets(model: DistributedDataParallel) -> None:
    """Put DDP's gradient buckets into their final order before the first batch, so that resuming is bit-exact.

    Runs a backward pass of zeros through the DDP module, which triggers DDP's reassignment of parameters to buckets.
    """
    # DDP first assigns gradients to buckets in parameter order, and reassigns them after the process's first batch, in
    # the order in which they became ready. A parameter's offset in its bucket determines the order in which an
    # all-reduce sums over ranks. On more than two ranks, the first batch after a restart would therefore be summed in a
    # different order than in an uninterrupted run, and losses would differ.
    module = model.module
    # The backward pass of `_Touch` goes through this list in reverse: about the order of a real backward pass, so that
    # DDP can reduce a bucket while it computes the gradients of the next one.
    parameters = [parameter for parameter in in_order_of_use(module) if parameter.requires_grad]
    # DDP has no method for this: its reducer only counts gradients from a forward pass through the DDP module, and a
    # pass through the real model would need a batch. Replace the wrapped module with one without inputs, and skip the
    # broadcast of buffers before the forward pass, since the replacement has none.
    model.module, model.require_forward_param_sync = _Touch(parameters), False
    try:
        model().backward()
    finally:
        model.module, model.require_forward_param_sync = module, True
    for parameter in parameters:
        parameter.grad = None


def in_order_of_use(module: nn.Module) -> list[nn.Parameter]:
    """Return a model's parameters in the order in which a forward pass uses them."""
    # diffusers' U-Net registers the mid block after the up blocks, so its parameters are not in order of use.
    later = ('mid_block.', 'up_blocks.', 'conv_norm_out.', 'conv_out.')
    stage_of = {
        name: max((stage for stage, part in enumerate(later, 1) if part in name and 'denoiser.' in name), default=0)
        for name, _ in module.named_parameters()
    }
    return [parameter for _, parameter in sorted(module.named_parameters(), key=lambda item: stage_of[item[0]])]


class _Touch(nn.Module):
    """Stand-in for the model in `settle_buckets`: without inputs, it returns a zero that depends on all parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._touched = tuple(parameters)  # a tuple, so that they are not registered as parameters of this module too

    def forward(self) -> Tensor:
        # reduce() adds from the left, so the backward pass goes from the last parameter to the first, as in training.
        return functools.reduce(operator.add, (each.sum().float() * 0 for each in self._touched))


def average_gradients_on_cpu(model: nn.Module) -> None:
    """Make FSDP2 average gradients over ranks on CPUs, where it would sum them; call once after wrapping the model.

    If the model is on a GPU, or FSDP2 wraps none of its modules, nothing is changed.
    """
    # FSDP2 requests ReduceOp.AVG, which gloo silently treats as a sum: on N ranks every gradient is N times too large
    # (measured with torch 2.7.0 and 2.14.1). Adam's updates do not depend on this scale and hide the problem, but
    # gradient clipping does, and so do moments that are resumed on a different number of ranks. Remove this when gloo
    # averages.
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        mesh = next((each.device_mesh for each in module.parameters() if isinstance(each, DTensor)), None)
        if mesh is None or mesh.device_type != 'cpu' or mesh.size() == 1:
            continue
        average_by_summing(module, mesh.size())
