"""Launch backends: one module per scheduler, imported on first use."""

import importlib
from typing import cast

from diffusion.errors import UserError
from diffusion.launch.backends.base import Backend
from diffusion.launch.job_spec import JobSpec

NAMES = ('kubernetes', 'local', 'mcli', 'sagemaker', 'skypilot', 'slurm')


def backend_of(name: str) -> Backend:
    """Return the launch backend module of this name, such as slurm or kubernetes."""
    return cast(Backend, importlib.import_module(f'diffusion.launch.backends.{name}'))


def free_nodes(spec: JobSpec) -> int:
    """Return the number of free nodes that have the GPUs a job needs, so that the job could start on them now.

    Raises:
        UserError: The backend cannot count free nodes, or its command-line tool is missing.
        ExternalError: The scheduler does not respond.
    """
    count = getattr(backend_of(spec.backend), 'free_nodes', None)
    if count is None:
        message = f'{spec.backend} does not tell which nodes are free; set the size of the job: nodes=N'
        raise UserError(f'--max-nodes: {message}')
    return count(spec)
