"""MosaicML launch backend: it renders the YAML of a run for `mcli run -f`, but cannot submit the run."""

import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from diffusion.config.schema import Gatherer, Problem, join
from diffusion.errors import UserError
from diffusion.launch.backends.base import IMAGE_WORKDIR, NotValidated, Rendered, deep_merge, environment_of
from diffusion.launch.job_spec import Job
from diffusion.storage.places import is_url

NAME = re.compile(r'[a-z0-9]([a-z0-9-]*[a-z0-9])?')
MAX_NAME = 56
"""Maximum length of a name: the platform allows 63 characters, and appends a dash and six characters."""
GPU_TYPES = {'a100-40gb': 'a100_40gb', 'a100-80gb': 'a100_80gb', 'h100-sxm': 'h100_80gb'}
GPUS_PER_NODE = 8
PRIORITIES = ('auto', 'lowest', 'low', 'medium', 'high')
NOT_TRACKED = 'backend.name: mcli runs are not tracked; use'


@dataclass(frozen=True)
class Options:
    """Settings of the MosaicML launch backend, from `backend:` in a job spec."""

    gpu_type: str | None = None
    """Name of the GPU type in the cluster. Null means the platform's usual name of the GPU."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Values that are merged last into the YAML file that mcli submits."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    for job in jobs:
        if NAME.fullmatch(job.name) is None or len(job.name) > MAX_NAME:
            gather.problem('name', f'{job.name!r} is not a valid run name; use a-z, 0-9 and dashes, at most {MAX_NAME}')
    if spec.image is None:
        gather.problem('image', 'is missing; set the container image of the run')
    if spec.schedule.queue is None:
        gather.problem('schedule.queue', 'is missing; set it to one of the clusters that `mcli get clusters` lists')
    if spec.gpu is None or (spec.gpu not in GPU_TYPES and spec.options.gpu_type is None):
        message = f'is missing; set it (there is no default for {spec.gpu or "a job without GPUs"})'
        gather.problem('backend.gpu_type', message)
    if any(job.nodes > 1 for job in jobs) and spec.gpus_per_node != GPUS_PER_NODE:
        message = 'jobs of several nodes use whole machines; use 8'
        gather.problem('gpus_per_node', f'{spec.gpus_per_node} of {GPUS_PER_NODE} per machine; {message}')
    if spec.schedule.priority is not None and spec.schedule.priority not in PRIORITIES:
        message = f'{spec.schedule.priority!r} is unknown; use one of {", ".join(PRIORITIES)}'
        gather.problem('schedule.priority', message)
    for target in spec.mounts:
        gather.problem(join('mounts', target), 'the platform has no mounts; use its integrations in backend.raw')
    for name, source in spec.secrets.items():
        if source is not None:
            message = f'must be stored in the platform; run `mcli create secret env {name}` and set it to null'
            gather.problem(join('secrets', name), message)
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    files = {f'{job.name}.yaml': yaml.safe_dump(_run(job), sort_keys=False, width=1000) for job in jobs}
    notes = [f'The secret must exist in the platform; run mcli create secret env {name}' for name in spec.secrets]
    if not all(is_url(job.run_dir) for job in jobs):
        notes.append(
            'The platform mounts no storage: set runs_dir to a URL such as s3://bucket/runs, or to a folder of an '
            'integration that the next attempt can read.'
        )
    if spec.restart.max_restarts and spec.restart.codes('stop'):
        notes.append('The platform restarts a run after any exit status, including a user error (78).')
    if len(jobs) > 1:
        notes.append('The platform has no job dependencies: submit each stage when the previous one is done.')
    return Rendered(files, tuple(('mcli', 'run', '-f', name) for name in files), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Return the mistakes that the mcli package finds in the rendered run YAML."""
    try:
        from mcli.api.exceptions import MAPIException, MCLIException
        from mcli.models.run_config import FinalRunConfig, RunConfig
    except ImportError:
        raise NotValidated("the run was not validated; pip install 'diffusion-recipes[mcli]'") from None
    found = []
    for text in rendered.files.values():
        with warnings.catch_warnings():
            # Unknown keys are mistakes, but mcli only warns about them: turn its warnings into errors.
            warnings.simplefilter('error', UserWarning)
            try:
                FinalRunConfig.finalize_config(RunConfig.from_dict(yaml.safe_load(text), show_unused_warning=True))
            except (UserWarning, MCLIException, MAPIException, TypeError) as error:
                found.append(Problem('backend.raw', f'mcli: {error}'))
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> NoReturn:
    raise UserError('backend.name: mcli runs cannot be submitted; pass --out DIR, then run `mcli run -f` on the file')


def status(jobs: Sequence[Job]) -> NoReturn:
    raise UserError(f'{NOT_TRACKED} `mcli get runs`')


def logs(jobs: Sequence[Job]) -> NoReturn:
    raise UserError(f'{NOT_TRACKED} `mcli logs RUN`')


def cancel(jobs: Sequence[Job]) -> NoReturn:
    raise UserError(f'{NOT_TRACKED} `mcli stop run RUN`')


def _run(job: Job) -> dict[str, Any]:
    """Return a job as a MosaicML run: a dictionary with the content of the YAML that mcli submits."""
    spec = job.spec
    schedule = spec.schedule
    scheduling = {
        'priority': schedule.priority,
        'preemptible': schedule.preemptible,
        'max_retries': spec.restart.max_restarts,
        'retry_on_system_failure': spec.restart.max_restarts > 0,
        'max_duration': None if job.time_limit_seconds is None else job.time_limit_seconds / 3600,
    }
    run = {
        'name': job.name,
        'image': spec.image,
        'compute': {
            'cluster': schedule.queue,
            'gpu_type': spec.options.gpu_type or GPU_TYPES.get(str(spec.gpu)),
            'gpus': job.world_size,
        },
        'scheduling': {key: value for key, value in scheduling.items() if value is not None},
        'env_variables': environment_of(job, 'mosaicml'),
        # `exec` lets the platform's signals reach the node entry point instead of a shell.
        'command': f'cd {shlex.quote(spec.workdir or IMAGE_WORKDIR)} && exec {job.shell_command}',
    }
    return deep_merge(run, spec.options.raw)
