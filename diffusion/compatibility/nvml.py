"""NVML, the management library of NVIDIA's driver."""

from typing import Any


def load_nvml() -> Any | None:
    """Initialize NVML and return its module, or None if that fails, as without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
