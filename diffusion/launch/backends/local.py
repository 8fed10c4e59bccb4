"""This machine as a back end: the nodes of a job are processes here, each with ranks of its own."""

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
    """This back end has no settings of its own."""


class JobFailed(ExternalError):
    """A local job ended with another status than 0, with which `diffusion launch` ends too."""

    def __init__(self, name: str, exit_status: int) -> None:
        super().__init__(f'{name}: ended with {exit_status}')
        self.exit_status = exit_status


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    if spec.image is not None:
        gather.problem('image', 'is not used on this machine; leave it out')
    if spec.mounts:
        gather.problem('mounts', 'are not used on this machine; leave them out')
    schedule = spec.schedule
    asked = {
        'queue': schedule.queue is not None,
        'priority': schedule.priority is not None,
        'preemptible': schedule.preemptible,
        'time_limit': any(job.time_limit_seconds for job in jobs),
    }
    for key in (key for key, given in asked.items() if given):
        gather.problem(f'schedule.{key}', 'there is no scheduler on this machine; leave it out')
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(f'secrets.{name}', 'is taken from the environment; leave it null')
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    """Render scripts for people to read; `submit` starts the same commands without a shell."""
    return Rendered({f'{job.name}.sh': _script(job) for job in jobs}, tuple(('bash', f'{job.name}.sh') for job in jobs))


def validate(rendered: Rendered) -> list[Problem]:
    return []


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    """Run the jobs to their end.

    Raises:
        JobFailed: One of them ended with another status than 0.
    """
    status = run_local_jobs(jobs)
    if status:
        raise JobFailed(jobs[0].spec.name, status)
    return f'{jobs[0].spec.name}: done'


def status(jobs: Sequence[Job]) -> str:
    raise UserError(f'status: a local job runs where it was launched; try diffusion status {jobs[0].run_dir}')


def logs(jobs: Sequence[Job]) -> str:
    raise UserError('logs: a local job writes where it was launched')


def cancel(jobs: Sequence[Job]) -> str:
    raise UserError('cancel: interrupt a local job where it was launched (Ctrl-C)')


def _script(job: Job) -> str:
    folder = [] if job.spec.workdir is None else [f'cd {shlex.quote(job.spec.workdir)} || exit 78']
    nodes = []
    for rank in range(job.nodes):
        variables = [f'{name}={shlex.quote(value)}' for name, value in node_environment(job, rank).items()]
        nodes.append(' \\\n    '.join([*variables, f'{job.shell_command} &']))
    waiting = ['status=0', 'for node in $(jobs -p); do wait "$node" || status=$?; done', 'exit "$status"', '']
    return '\n'.join(['#!/bin/bash', *folder, *nodes, *waiting])
