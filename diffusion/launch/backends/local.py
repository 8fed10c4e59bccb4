"""Local launch backend: the nodes of a job are processes of this machine, each with its own ranks."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.schema import Gatherer, Problem
from diffusion.errors import ExternalError, UserError
from diffusion.launch.backends.base import Rendered
from diffusion.launch.job_spec import Job
from diffusion.launch.local_cluster import node_environment, run_local_jobs


@dataclass
class Options:
    """Settings of the local launch backend, which has none."""


class JobFailed(ExternalError):
    """Raised when a local job fails; `diffusion launch` then exits with the status of the job."""

    def __init__(self, name: str, exit_status: int) -> None:
        super().__init__(f'{name}: exited with status {exit_status}')
        self.exit_status = exit_status


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    if spec.image is not None:
        gather.problem('image', 'the local backend does not use a container image; remove it')
    if spec.mounts:
        gather.problem('mounts', 'the local backend does not mount folders; remove them')
    schedule = spec.schedule
    settings = {
        'queue': schedule.queue is not None,
        'priority': schedule.priority is not None,
        'preemptible': schedule.preemptible,
        'time_limit': any(job.time_limit_seconds for job in jobs),
    }
    for key in (key for key, given in settings.items() if given):
        gather.problem(f'schedule.{key}', 'the local backend has no scheduler; remove it')
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(f'secrets.{name}', 'the local backend reads secrets from the environment; set it to null')
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    """Return shell scripts that show the commands of the jobs; `submit` starts the commands without a shell."""
    return Rendered({f'{job.name}.sh': _script(job) for job in jobs}, tuple(('bash', f'{job.name}.sh') for job in jobs))


def validate(rendered: Rendered) -> list[Problem]:
    return []


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    """Run the jobs on this machine and wait until they end.

    Raises:
        JobFailed: A job exited with a nonzero status.
    """
    status = run_local_jobs(jobs)
    if status:
        raise JobFailed(jobs[0].spec.name, status)
    return f'{jobs[0].spec.name}: done'


def status(jobs: Sequence[Job]) -> str:
    raise UserError(f'status: a local job has no scheduler; use diffusion status {jobs[0].run_dir}')


def logs(jobs: Sequence[Job]) -> str:
    raise UserError('logs: a local job has no log file; see the terminal in which it was launched')


def cancel(jobs: Sequence[Job]) -> str:
    raise UserError('cancel: press Ctrl-C in the terminal in which the local job was launched')


def _script(job: Job) -> str:
    folder = [] if job.spec.workdir is None else [f'cd {shlex.quote(job.spec.workdir)} || exit 78']
    nodes = []
    for rank in range(job.nodes):
        variables = [f'{name}={shlex.quote(value)}' for name, value in node_environment(job, rank).items()]
        nodes.append(' \\\n    '.join([*variables, f'{job.shell_command} &']))
    waiting = ['status=0', 'for node in $(jobs -p); do wait "$node" || status=$?; done', 'exit "$status"', '']
    return '\n'.join(['#!/bin/bash', *folder, *nodes, *waiting])
