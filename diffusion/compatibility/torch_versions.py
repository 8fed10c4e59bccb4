"""Differences between PyTorch versions: functions, errors for pickled code, and GPUs without kernels."""

import functools
import pickle
import re
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.version import hip

from diffusion.compatibility import private_names
from diffusion.planning.gpus import missing_kernels_message


def set_group_timeout(timeout: timedelta, group: ProcessGroup) -> None:
    """Set the timeout of a group's collectives. Only needed for PyTorch 2.7, whose own function is private."""
    set_timeout = getattr(torch.distributed, 'set_timeout', None) or private_names._set_pg_timeout
    set_timeout(timeout, group)


def average_by_summing(module: FSDPModule, ranks: int) -> None:
    """Make FSDP2 sum gradients over ranks before it divides; PyTorch 2.7 has no setting for this and needs a hook."""
    request_sum: Any = getattr(module, 'set_force_sum_reduction_for_comms', None)
    if request_sum is not None:
        request_sum(True)
    else:
        module.set_all_reduce_hook(functools.partial(_divide_sum, ranks=ranks))


def _divide_sum(gradients: Tensor, ranks: int) -> None:
    """Turn a sum over ranks into an average, in place; an FSDP2 hook that runs after gradients are reduced."""
    if gradients.dtype in (torch.float32, torch.bfloat16):  # in float16, FSDP2 itself divides the sum
        gradients.div_(ranks)


def distribute_tied_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace plain tensors under the second names of FSDP2's tied weights by DTensors, in place; a collective.

    An example is T5's embedding. PyTorch 2.7's set_model_state_dict only distributes a parameter's tensor under its
    first name. It then copies the plain tensor under the second name into a DTensor, which fails. Remove this function
    when support for PyTorch 2.7 is dropped.
    """
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen and isinstance(parameter, DTensor):
            name = name.replace('_checkpoint_wrapped_module.', '')
            plain = weights[name].to(parameter.device)
            weights[name] = distribute_tensor(plain, parameter.device_mesh, parameter.placements)
        seen.add(id(parameter))


def ignore_views_of_fsdp2() -> None:
    """Hide PyTorch 2.14's warning about in-place changes of PRX's output; needed while diffusers returns a view."""
    warnings.filterwarnings('ignore', message='FSDP2-wrapped module .* returned a view tensor')


REFUSED = re.compile(r'(?:unsupported global|unsupported global: global|unsupported class) ([\w.]+)', re.IGNORECASE)
"""Pattern for the messages of torch's restricted unpickler about a function or class that it refuses to call."""


def code_to_run(error: BaseException) -> str | None:
    """Describe the code in a pickle that `torch.load(weights_only=True)` refused; return None for another error."""
    found = REFUSED.search(str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return None if found is None else f'wants to run code when it is read (its pickle calls {found[1]})'


def kernels_problem(index: int) -> str | None:
    """Return a message if the installed torch has no CUDA kernels for the visible GPU with this index, else None.

    The result is also None if torch sees no GPU with this index, or is built for ROCm.
    """
    # Skip ROCm, whose architectures (gfx942) follow other rules.
    if hip is not None or not index < torch.cuda.device_count():
        return None
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return missing_kernels_message(name, capability, torch.cuda.get_arch_list(), str(torch.__version__))
