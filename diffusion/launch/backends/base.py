"""What a back end is: it turns jobs into files, checks them offline, and hands them to its scheduler.

The border to the node's side, `diffusion.launch.node`: every back end renders `Job.command` for every node, with
`environment_of(job, ...)` set (see `diffusion.launch.environment`), and nothing else is agreed on. `diffusion status
RUN` prints what `diffusion.launch.attempts.report(run)` makes of a run's attempts.jsonl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from diffusion.config.schema import Problem
from diffusion.launch import environment
from diffusion.launch.job_spec import Job

IMAGE_WORKDIR = '/workspace'
"""Where docker/Dockerfile puts run.py."""


@dataclass(frozen=True)
class Rendered:
    """What would be submitted."""

    files: dict[str, str]
    """Text by file name."""
    commands: tuple[tuple[str, ...], ...]
    """How a person would submit the files, as argument lists."""
    notes: tuple[str, ...] = ()
    """What the user should know and cannot see in the files."""


class Backend(Protocol):
    """A scheduler. Options is the dataclass of its keys beside `name` under `backend:`."""

    Options: type

    def problems(self, jobs: Sequence[Job]) -> list[Problem]:
        """Mistakes in the spec that this scheduler would refuse, or would accept and misunderstand."""
        ...

    def render(self, jobs: Sequence[Job]) -> Rendered:
        """The files; depends on nothing but the jobs."""
        ...

    def validate(self, rendered: Rendered) -> list[Problem]:
        """Mistakes by the scheduler's own schema, offline, so far as what that takes is installed."""
        ...

    def submit(self, jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
        """Hand the files, which lie in the folder, to the scheduler; what it answered."""
        ...

    def status(self, jobs: Sequence[Job]) -> str:
        """What the scheduler says of the jobs."""
        ...

    def logs(self, jobs: Sequence[Job]) -> str:
        """What the jobs wrote last, or how to see it."""
        ...

    def cancel(self, jobs: Sequence[Job]) -> str:
        """Stop the jobs; what the scheduler answered."""
        ...


def environment_of(job: Job, scheduler: str, **more: str) -> dict[str, str]:
    """The variables of every node of a job: the user's own, ours, and `more` by the names in `environment`."""
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
        ours['CUDA_VISIBLE_DEVICES'] = ''  # the machine may have one all the same
    if spec.hang_seconds is not None:
        ours[environment.HANG_SECONDS] = str(spec.hang_seconds)
    return spec.env | ours | {getattr(environment, name): value for name, value in more.items()}


def merged(base: Any, raw: Any) -> Any:
    """A document with the user's own on top: mappings merge, null removes a key, everything else replaces."""
    if not isinstance(base, Mapping) or not isinstance(raw, Mapping):
        return raw
    result = dict(base)
    for key, value in raw.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key, {} if isinstance(value, Mapping) else None), value)
    return result


def unmounted(jobs: Sequence[Job]) -> list[Problem]:
    """Checkpoints that a container would take with it: no mount holds the folder of a run."""
    problems = []
    for job in jobs:
        folder = PurePosixPath(job.spec.workdir or IMAGE_WORKDIR, job.run_dir)
        if not any(folder.is_relative_to(target) for target in job.spec.mounts):
            what = f'nothing is mounted at {folder.parent}, where {job.name} saves; its checkpoints would be lost'
            problems.append(Problem('mounts', what))
    return problems[:1]
