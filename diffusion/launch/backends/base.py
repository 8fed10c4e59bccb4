"""Interface of a launch backend, which renders jobs to files, validates the files and submits them to a scheduler.

Contract with `diffusion.launch.node`, which runs on the nodes: every backend starts `Job.command` once per node with
the variables of `environment_of(job, ...)`; see `diffusion.runs.environment`.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from diffusion.config.schema import Problem
from diffusion.errors import ExternalError, UserError
from diffusion.launch.job_spec import Job
from diffusion.runs import environment
from diffusion.storage.places import is_url

IMAGE_WORKDIR = '/workspace'
"""Folder that contains run.py in the image built from docker/Dockerfile."""


@dataclass(frozen=True)
class Rendered:
    """Files that a launch backend has rendered from jobs, and the commands that submit these files."""

    files: dict[str, str]
    """Contents by file name."""
    commands: tuple[tuple[str, ...], ...]
    """Commands that submit the files, as argument lists, for display."""
    notes: tuple[str, ...] = ()
    """Notes to print for the user, such as requirements that the files do not show."""


class NotValidated(Exception):
    """Raised if the tool that validates rendered job files is missing; the message explains how to install it."""


class Backend(Protocol):
    """Interface of a scheduler's backend module. `Options` is the dataclass of the keys under `backend:` in a spec."""

    Options: type

    def problems(self, jobs: Sequence[Job]) -> list[Problem]:
        """Return the mistakes in a job spec: values that the scheduler would refuse, or accept but misinterpret."""
        ...

    def render(self, jobs: Sequence[Job]) -> Rendered:
        """Return the files that describe the jobs to the scheduler. The same jobs always give the same files."""
        ...

    def validate(self, rendered: Rendered) -> list[Problem]:
        """Return the mistakes in rendered job files by the scheduler's schema; NotValidated if its tool is missing."""
        ...

    def submit(self, jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
        """Submit rendered jobs, whose files have been written to `folder`; return a line about the result.

        Raises:
            UserError: The scheduler's command-line tool is missing.
            ExternalError: The scheduler refuses the job or does not respond.
        """
        ...

    def status(self, jobs: Sequence[Job]) -> str:
        """Return the status of submitted jobs as the scheduler reports it."""
        ...

    def logs(self, jobs: Sequence[Job]) -> str:
        """Return the last lines of the logs of submitted jobs, or the command that prints them."""
        ...

    def cancel(self, jobs: Sequence[Job]) -> str:
        """Cancel submitted jobs in the scheduler; return a line about the result."""
        ...


def environment_of(job: Job, scheduler: str, **more: str) -> dict[str, str]:
    """Return the environment variables that a launch backend sets on every node of a job.

    Args:
        more: Further variables; each argument has the name of a constant in `diffusion.runs.environment`.
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
        ours['CUDA_VISIBLE_DEVICES'] = ''  # hide the machine's GPUs
    if restart.standby:
        ours[environment.STANDBY] = '1'
    if spec.hang_seconds is not None:
        ours[environment.HANG_SECONDS] = str(spec.hang_seconds)
    # Put this package's variables last, so that the user's cannot replace them (job_checks also refuses such names).
    return spec.env | ours | {getattr(environment, name): value for name, value in more.items()}


def deep_merge(base: Any, changes: Any) -> Any:
    """Return `base` with `changes` merged in: mappings merge recursively, None removes a key, other values replace."""
    if not isinstance(base, Mapping) or not isinstance(changes, Mapping):
        return changes
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = deep_merge(result.get(key, {} if isinstance(value, Mapping) else None), value)
    return result


def unmounted_folders(jobs: Sequence[Job]) -> list[Problem]:
    """Return a problem if a containerized job saves checkpoints outside all mounts, where they would be lost."""
    for job in jobs:
        folder = PurePosixPath(job.spec.workdir or IMAGE_WORKDIR, job.run_dir)
        if not is_url(job.run_dir) and not any(folder.is_relative_to(target) for target in job.spec.mounts):
            message = (
                f'nothing is mounted at {folder.parent}, where {job.name} saves checkpoints; mount storage there, or '
                'set runs_dir to a URL such as s3://bucket/runs'
            )
            return [Problem('mounts', message)]
    return []


def call(
    command: Sequence[str],
    *,
    install: str,
    timeout_seconds: float = 120,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command-line tool and return its standard output.

    Args:
        install: Advice for a user who does not have the tool.

    Raises:
        UserError: The tool is not on PATH.
        ExternalError: The tool failed, or did not respond in time; the message includes the tool's error message.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f'{command[0]} is not on PATH; {install}')
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env={**os.environ, **(env or {})},
            input=stdin,
        )
    except subprocess.TimeoutExpired as error:
        message = f'no response in {timeout_seconds:.0f} s; check that its server is up'
        raise ExternalError(f'{" ".join(command[:3])}: {message}') from error
    if result.returncode:
        message = (result.stderr or result.stdout).strip() or f'exit status {result.returncode}'
        raise ExternalError(f'{" ".join(command[:3])}: {message}')
    return result.stdout.strip()
