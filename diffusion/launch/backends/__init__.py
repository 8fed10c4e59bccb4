"""Launch backends: one module per scheduler, imported when a job uses the scheduler."""

import importlib
from typing import cast

from diffusion.launch.backends.base import Backend

NAMES = ('kubernetes', 'local', 'mcli', 'sagemaker', 'skypilot', 'slurm')


def backend_of(name: str) -> Backend:
    """Return the launch backend module of this name, such as slurm or kubernetes."""
    return cast(Backend, importlib.import_module(f'diffusion.launch.backends.{name}'))
