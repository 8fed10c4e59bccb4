"""Interface of a back end, which renders jobs to files, validates them offline and submits them to its scheduler.

Contract with `diffusion.launch.node`, which runs on the nodes: every back end starts `Job.command` once per node with
the variables of `environment_of(job, ...)`; see `diffusion.launch.environment`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from diffusion.config.schema import Problem
from diffusion.launch import environment
from diffusion.launch.job_spec import Job

IMAGE_WORKDIR = '/workspace'
"""Folder with run.py in the image of docker/Dockerfile."""


@dataclass(frozen=True)
class Rendered:
    """Rendered files of jobs, ready for submission."""

    files: dict[str, str]
    """Contents by file name."""
    commands: tuple[tuple[str, ...], ...]
    """Commands that submit the files, as argument lists, for display."""
    notes: tuple[str, ...] = ()
    """Notes for the user that the files do not show."""


class NotValidated(Exception):
    """The program or package that validates the files is missing; the message explains how to install it."""


class Backend(Protocol):
    """Module for one scheduler. `Options` is the dataclass of the keys beside `name` under `backend:`."""

    Options: type

    def problems(self, jobs: Sequence[Job]) -> list[Problem]:
        """Return mistakes in the spec that this scheduler would refuse, or would accept and misinterpret."""
        ...

    def render(self, jobs: Sequence[Job]) -> Rendered:
        """Return the rendered files; a pure function of the jobs."""
        ...

    def validate(self, rendered: Rendered) -> list[Problem]:
        """Return the mistakes that the schema of the scheduler finds in the files.

        Raises:
            NotValidated: The package or program that knows the schema is missing.
        """
        ...

    def submit(self, jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
        """Submit the files, which have been written to the folder, and return a line about the result.

        Raises:
            UserError: The tool of the scheduler is missing.
            ExternalError: The scheduler refuses the job or does not respond.
        """
        ...

    def status(self, jobs: Sequence[Job]) -> str:
        """Return the status of the jobs as the scheduler reports it."""
        ...

    def logs(self, jobs: Sequence[Job]) -> str:
        """Return the last output of the jobs, or the command that shows it."""
        ...

    def cancel(self, jobs: Sequence[Job]) -> str:
        """Cancel the jobs and return a line about the result."""
        ...


def environment_of(job: Job, scheduler: str, **more: str) -> dict[str, str]:
    """Return the environment variables of the nodes of a job.

    Args:
        job: The job.
        scheduler: Value of `environment.SCHEDULER`.
        more: Further values by the name of their constant in `diffusion.launch.environment`.
    """
    spec = job.spec
    restart = spec.restart
    actions = {str(code): action for code, action in restart.actions().items()} | {'*': restart.otherwise}
    ours = {
        environment.SCHEDULER: scheduler,
        environment.JOB: job.name,
        environment.NODES: str(job.nodes),
        environment.PROCESSES_PER_NODE: str(spec.gpus_per_node),
        environment.GPU: spec.gpu or 'none',
        environment.MASTER_PORT: str(spec.master_port),
        environment.PREFLIGHT: spec.preflight,
        environment.MAX_RESTARTS: str(restart.max_restarts),
        environment.ON_EXIT: ','.join(f'{code}={action}' for code, action in actions.items()),
        environment.NOTICE_SECONDS: str(spec.schedule.notice_seconds),
    }
    if spec.gpu is None:
        ours['CUDA_VISIBLE_DEVICES'] = ''  # hides the GPUs of a machine that has some
    if spec.hang_seconds is not None:
        ours[environment.HANG_SECONDS] = str(spec.hang_seconds)
    # Last, so that a variable of the user cannot replace one of the contract; job_checks refuses such names.
    return spec.env | ours | {getattr(environment, name): value for name, value in more.items()}


def deep_merge(base: Any, changes: Any) -> Any:
    """Return a document with the user's values merged in: mappings merge, null removes a key, other values replace."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = deep_merge(result.get(key, {} if isinstance(value, Mapping) else None), value)
    return result


def unmounted_run_folders(jobs: Sequence[Job]) -> list[Problem]:
    """Return a problem if a job in a container saves outside of all mounts, where its checkpoints would be lost."""
    problems = []
    for job in jobs:
        folder = PurePosixPath(job.spec.workdir or IMAGE_WORKDIR, job.run_dir)
        if not any(folder.is_relative_to(target) for target in job.spec.mounts):
            message = f'nothing is mounted at {folder.parent}, where {job.name} saves; its checkpoints would be lost'
            problems.append(Problem('mounts', message))
    return problems[:1]
