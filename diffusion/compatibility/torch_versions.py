"""Differences between PyTorch 2.7, the newest for mosaicml 0.32, and later versions."""

import functools
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusion.compatibility import private_names


def set_group_timeout(timeout: timedelta, group: ProcessGroup) -> None:
    """Set the timeout of a group's collectives.

    PyTorch 2.7 has only a private function for it. Remove this function with the support of PyTorch 2.7.
    """
    set_timeout = getattr(torch.distributed, 'set_timeout', None) or private_names._set_pg_timeout
    set_timeout(timeout, group)


def average_by_summing(module: FSDPModule, ranks: int) -> None:
    """Make FSDP2 sum the gradients of a module over ranks, and divide the sum.

    PyTorch 2.9 has a setting for it. Remove this function with the support of PyTorch 2.7.
    """
    request_sum: Any = getattr(module, 'set_force_sum_reduction_for_comms', None)
    if request_sum is not None:
        request_sum(True)
    else:
        module.set_all_reduce_hook(functools.partial(_divide_sum, ranks=ranks))


def _divide_sum(gradients: Tensor, ranks: int) -> None:
    """Turn a sum over ranks into an average, in place: a hook of FSDP2 after it reduced gradients."""
    if gradients.dtype in (torch.float32, torch.bfloat16):  # for float16, FSDP2 requests a sum and divides it itself
        gradients.div_(ranks)


def distribute_tied_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace the second names of FSDP2's tied weights, such as T5's embedding, by DTensors, in place; a collective.

    PyTorch 2.7's set_model_state_dict distributes a tensor only under the first name of its parameter, and then copies
    the plain tensor of the second name into a DTensor, which fails. Remove this function with the support of PyTorch
    2.7.
    """
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and isinstance(parameter, DTensor):
            name = name.replace('_checkpoint_wrapped_module.', '')
            plain = weights[name].to(parameter.device)
            weights[name] = distribute_tensor(plain, parameter.device_mesh, parameter.placements)
        seen.add(id(parameter))


def ignore_views_of_fsdp2() -> None:
    """Hide a warning that changing PRX's prediction in place would give wrong gradients; nothing changes it.

    PyTorch 2.14 warns in each run with FSDP2. Remove this function when diffusers' PRX does not return a view.
    """
    warnings.filterwarnings('ignore', message='FSDP2-wrapped module .* returned a view tensor')
