"""Print the versions and GPUs of this machine as JSON, for `gpu_check.py`, which does not import PyTorch itself."""

import json
import platform
import shutil
import subprocess
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
        'driver': _driver(),
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version(),
        'nccl': '.'.join(map(str, torch.cuda.nccl.version())) if gpus else None,
        'kernels': torch.cuda.get_arch_list() if gpus else [],
        'gpus': gpus,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None without its program nvidia-smi."""
    if shutil.which('nvidia-smi') is None:
        return None
    command = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '--id=0']
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == '__main__':
    main()
