"""Back ends by name, one per module; a module is imported when a job needs it."""

import importlib
from typing import cast

from diffusion.launch.backends.base import Backend

NAMES = ('kubernetes', 'local', 'mcli', 'sagemaker', 'skypilot', 'slurm')


def backend_of(name: str) -> Backend:
    """Return the back end of a name in NAMES: the module with its functions."""
    return cast(Backend, importlib.import_module(f'diffusion.launch.backends.{name}'))
