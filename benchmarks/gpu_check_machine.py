"""Print the versions and GPUs of this machine as JSON, for `gpu_check.py`, which does not import PyTorch itself."""

import json
import platform
from importlib import metadata
from typing import Any

import torch
import torch.cuda.nccl
import torch.version

PACKAGES = ('torch', 'torchvision', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers', 'numpy')


def main() -> None:
    """Print the JSON."""
    print(json.dumps(describe()))


def describe() -> dict[str, Any]:
    """Return versions, processor and GPUs."""
    from machine import processor

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f'sm_{properties.major}{properties.minor}'
        gpus.append({'name': properties.name, 'memory_gib': properties.total_memory / 2**30, 'capability': capability})
    return {
        'python': platform.python_version(),
        'packages': {name: _version(name) for name in PACKAGES},
        'processor': processor(),
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version(),
        'nccl': '.'.join(map(str, torch.cuda.nccl.version())) if gpus else None,
        'kernels': torch.cuda.get_arch_list() if gpus else [],
        'gpus': gpus,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == '__main__':
    main()
