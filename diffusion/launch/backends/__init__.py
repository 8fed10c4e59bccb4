"""Launch back ends, one module per scheduler, imported when a job needs it."""

import importlib
from typing import cast

from diffusion.launch.backends.base import Backend

NAMES = ('kubernetes', 'local', 'mcli', 'sagemaker', 'skypilot', 'slurm')


def backend_of(name: str) -> Backend:
    """Return the back end module for a name in NAMES."""
    return cast(Backend, importlib.import_module(f'diffusion.launch.backends.{name}'))
