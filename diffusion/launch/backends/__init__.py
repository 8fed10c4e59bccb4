"""Back ends by name, one a module; imported when a job wants it."""

import importlib
from typing import cast

from diffusion.launch.backends.base import Backend

NAMES = ('kubernetes', 'local', 'mcli', 'sagemaker', 'skypilot', 'slurm')


def backend_of(name: str) -> Backend:
    """The back end of a name out of NAMES: its module is what has the functions."""
    return cast(Backend, importlib.import_module(f'diffusion.launch.backends.{name}'))
