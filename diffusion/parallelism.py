"""How a model is spread over devices: what Composer and torch are told, and one mistake of theirs mended."""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from composer.utils.parallelism import FSDP2Config
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from diffusion.recipe import ParallelismConfig


@dataclass
class HybridFSDP2Config(FSDP2Config):
    """Composer's FSDP2Config with groups of devices that hold a whole model each."""

    replicas: int = 1
    """How many groups."""

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        return self.replicas if self.replicas > 1 else None


def parallelism_config(settings: ParallelismConfig) -> dict[str, Any] | None:
    """What composer.Trainer takes as parallelism_config."""
    precision = settings.mixed_precision.upper()
    if settings.strategy == 'ddp':
        return None
    if settings.strategy == 'fsdp2':
        average_gradients_on_cpu()
        if settings.replicas > 1 and not torch.cuda.is_available():
            # torch 2.7 asserts an event of a CUDA stream when it reduces over replicas.
            raise ValueError(f'parallelism.replicas: {settings.replicas} groups need GPUs; use 1 on CPUs')
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='FSDP2 Config/APIs are experimental')
            config = HybridFSDP2Config(
                reshard_after_forward=settings.reshard_after_forward,
                mixed_precision=precision,
                state_dict_type='full',  # of Composer's own reading and writing; pieces are the Checkpointer's
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


def average_gradients_on_cpu() -> None:
    """Let FSDP2 average gradients on CPUs, where it sums them.

    It asks for ReduceOp.AVG, which gloo takes for a sum and says nothing: on N ranks every gradient is N times too
    large. Adam's updates do not depend on that scale and hide it; clipping, and moments resumed elsewhere, do depend.
    Measured with torch 2.7.0. Dividing after a plain sum is what FSDP2 itself does in float16.
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
