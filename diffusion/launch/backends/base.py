"""The interface of a back end, which turns jobs into files, checks them offline, and submits them to its scheduler.

The contract with `diffusion.launch.node`, which runs on the nodes: every back end starts `Job.command` once per node
with the variables of `environment_of(job, ...)`; `diffusion.launch.environment` documents them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from diffusion.config.schema import Problem
from diffusion.launch import environment
from diffusion.launch.job_spec import Job

IMAGE_WORKDIR = '/workspace'
"""Folder of run.py in the image of docker/Dockerfile."""


@dataclass(frozen=True)
class Rendered:
    """The files that would be submitted."""

    files: dict[str, str]
    """Contents by file name."""
    commands: tuple[tuple[str, ...], ...]
    """Commands that submit the files, as argument lists for people to read."""
    notes: tuple[str, ...] = ()
    """Advice for the user that the files do not show."""


class NotValidated(Exception):
    """The program or package that reads the files offline is missing; the message says how to get it."""


class Backend(Protocol):
    """A module for one scheduler. `Options` is the dataclass of its keys beside `name` under `backend:`."""

    Options: type

    def problems(self, jobs: Sequence[Job]) -> list[Problem]:
        """Find mistakes in the spec that this scheduler would refuse, or would accept and misunderstand."""
        ...

    def render(self, jobs: Sequence[Job]) -> Rendered:
        """Render the files; a pure function of the jobs."""
        ...

    def validate(self, rendered: Rendered) -> list[Problem]:
        """Find mistakes by the scheduler's own schema.

        Raises:
            NotValidated: The package or program that knows the schema is missing.
        """
        ...

    def submit(self, jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
        """Submit the files, which lie in the folder, and return a line about the result.

        Raises:
            UserError: The scheduler's tool is missing.
            ExternalError: The scheduler refuses or does not answer.
        """
        ...

    def status(self, jobs: Sequence[Job]) -> str:
        """Return the scheduler's report on the jobs."""
        ...

    def logs(self, jobs: Sequence[Job]) -> str:
        """Return the last output of the jobs, or the command that shows it."""
        ...

    def cancel(self, jobs: Sequence[Job]) -> str:
        """Stop the jobs and return the scheduler's answer."""
        ...


def environment_of(job: Job, scheduler: str, **more: str) -> dict[str, str]:
    """Return the environment variables of a job's nodes: the user's, ours, and `more` by the names in `environment`."""
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
        ours['CUDA_VISIBLE_DEVICES'] = ''  # the machine may have GPUs all the same
    if spec.hang_seconds is not None:
        ours[environment.HANG_SECONDS] = str(spec.hang_seconds)
    return spec.env | ours | {getattr(environment, name): value for name, value in more.items()}


def merged(base: Any, raw: Any) -> Any:
    """Merge the user's own values into a document: mappings merge, null removes a key, everything else replaces."""
    if not isinstance(base, Mapping) or not isinstance(raw, Mapping):
        return raw
    result = dict(base)
    for key, value in raw.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {} if isinstance(value, Mapping) else None), value)
    return result


def unmounted_run_folders(jobs: Sequence[Job]) -> list[Problem]:
    """Find jobs in a container whose run folder is on no mount, so that their checkpoints would be lost."""
    problems = []
    for job in jobs:
        folder = PurePosixPath(job.spec.workdir or IMAGE_WORKDIR, job.run_dir)
        if not any(folder.is_relative_to(target) for target in job.spec.mounts):
            what = f'nothing is mounted at {folder.parent}, where {job.name} saves; its checkpoints would be lost'
            problems.append(Problem('mounts', what))
    return problems[:1]
