"""Check that the installed torch has kernels for a GPU of this machine."""

import torch
from torch.version import hip

from diffusion.planning.gpus import missing_kernels_message


def kernels_problem(index: int) -> str | None:
    """Return a message if the installed torch has no kernels for a visible GPU, else None.

    Args:
        index: Index of the GPU among the visible ones. An index out of range is left to torch.cuda.set_device.
    """
    # Skip ROCm, whose architectures (gfx942) have other rules.
    if hip is not None or not index < torch.cuda.device_count():
        return None
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return missing_kernels_message(name, capability, torch.cuda.get_arch_list(), str(torch.__version__))
