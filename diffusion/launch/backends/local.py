"""This machine: the nodes of a job are processes here, each with ranks of its own."""

import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.config.schema import Gatherer, Problem
from diffusion.errors import UserError
from diffusion.launch.backends.base import Rendered, environment_of
from diffusion.launch.job_spec import Job


@dataclass
class Options:
    """Nothing is the local machine's own."""


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
    for key in (key for key, said in asked.items() if said):
        gather.problem(f'schedule.{key}', 'there is no scheduler on this machine; leave it out')
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(f'secrets.{name}', 'is taken from the environment; leave it null')
    return gather.problems


def node_environment(job: Job, rank: int) -> dict[str, str]:
    """The variables of one node of a job."""
    return environment_of(job, 'local', NODE_RANK=str(rank), MASTER_ADDR='127.0.0.1')


def render(jobs: Sequence[Job]) -> Rendered:
    """What is run, for a person to read; `submit` starts it without a shell."""
    return Rendered({f'{job.name}.sh': _script(job) for job in jobs}, tuple(('bash', f'{job.name}.sh') for job in jobs))


def validate(rendered: Rendered) -> list[Problem]:
    return []


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    # The processes and their restarts are the node's side.
    code = importlib.import_module('diffusion.launch.local_cluster').run(jobs)
    if code:
        raise UserError(f'{jobs[0].spec.name}: ended with {code}')
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
