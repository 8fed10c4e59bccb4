"""The MosaicML platform: renders the YAML of a run for `mcli run -f`, and does not submit it."""

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
from diffusion.launch.backends.base import IMAGE_WORKDIR, NotValidated, Rendered, environment_of, merged
from diffusion.launch.job_spec import Job

NAME = re.compile(r'[a-z0-9]([a-z0-9-]*[a-z0-9])?')
MAX_NAME = 56
"""The platform appends a dash and six characters to a name of at most 63."""
GPU_TYPES = {
    'a100-40gb': 'a100_40gb',
    'a100-80gb': 'a100_80gb',
    'h100-sxm': 'h100_80gb',
}
GPUS_PER_NODE = 8
PRIORITIES = ('auto', 'lowest', 'low', 'medium', 'high')


@dataclass
class Options:
    """The platform's own settings."""

    gpu_type: str | None = None
    """The cluster's name of the GPU; null takes the usual one."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Values merged last into the run."""


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    for job in jobs:
        if NAME.fullmatch(job.name) is None or len(job.name) > MAX_NAME:
            gather.problem('name', f'{job.name!r} is no name of a run; use a-z, 0-9 and dashes, at most {MAX_NAME}')
    if spec.image is None:
        gather.problem('image', 'is missing; a run needs one')
    if spec.schedule.queue is None:
        gather.problem('schedule.queue', 'is missing; give the cluster (`mcli get clusters`)')
    if spec.gpu is None or (spec.gpu not in GPU_TYPES and spec.options.gpu_type is None):
        gather.problem('backend.gpu_type', f'is missing; there is no usual name of {spec.gpu or "no GPU"}')
    if any(job.nodes > 1 for job in jobs) and spec.gpus_per_node != GPUS_PER_NODE:
        what = f'{spec.gpus_per_node} of the {GPUS_PER_NODE} of a machine; several nodes are whole machines: use 8'
        gather.problem('gpus_per_node', what)
    if spec.schedule.priority is not None and spec.schedule.priority not in PRIORITIES:
        gather.problem('schedule.priority', f'{spec.schedule.priority!r} is not one of {", ".join(PRIORITIES)}')
    for target in spec.mounts:
        gather.problem(join('mounts', target), 'the platform mounts nothing; see its integrations, in backend.raw')
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(
                join('secrets', name), f'is kept by the platform: `mcli create secret env {name}`; leave it null'
            )
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    files = {f'{job.name}.yaml': yaml.safe_dump(_run(job), sort_keys=False, width=1000) for job in jobs}
    notes = [f'The platform must know the secret: mcli create secret env {name}' for name in spec.secrets]
    notes.append('Nothing is mounted: the recipe must save where the next attempt finds it.')
    if spec.restart.max_restarts and spec.restart.codes('stop'):
        notes.append('The platform starts a run again whatever it ended with, a mistake in the recipe (78) too.')
    if len(jobs) > 1:
        notes.append('The platform has no chains: submit a stage when the one before it is done.')
    return Rendered(files, tuple(('mcli', 'run', '-f', name) for name in files), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Validate by mcli itself, which comes with Composer; its warnings count as mistakes."""
    try:
        from mcli.api.exceptions import MAPIException, MCLIException
        from mcli.models.run_config import FinalRunConfig, RunConfig
    except ImportError:
        raise NotValidated("the run was not validated; pip install 'diffusion[mcli]'") from None
    found = []
    for text in rendered.files.values():
        with warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)
            try:
                FinalRunConfig.finalize_config(RunConfig.from_dict(yaml.safe_load(text), show_unused_warning=True))
            except (UserWarning, MCLIException, MAPIException, TypeError) as error:
                found.append(Problem('backend.raw', f'mcli: {error}'))
    return found


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> NoReturn:
    raise UserError('backend.name: runs of mcli are rendered only; use --out DIR, then `mcli run -f` the file')


def status(jobs: Sequence[Job]) -> NoReturn:
    _elsewhere('mcli get runs')


def logs(jobs: Sequence[Job]) -> NoReturn:
    _elsewhere('mcli logs RUN')


def cancel(jobs: Sequence[Job]) -> NoReturn:
    _elsewhere('mcli stop run RUN')


def _elsewhere(command: str) -> NoReturn:
    raise UserError(f'backend.name: runs of mcli are rendered only; use `{command}`')


def _run(job: Job) -> dict[str, Any]:
    spec = job.spec
    schedule = spec.schedule
    limit = job.time_limit_seconds
    scheduling = {
        'priority': schedule.priority,
        'preemptible': schedule.preemptible,
        'max_retries': spec.restart.max_restarts,
        'retry_on_system_failure': spec.restart.max_restarts > 0,
        'max_duration': None if limit is None else limit / 3600,
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
        'command': f'cd {shlex.quote(spec.workdir or IMAGE_WORKDIR)} && exec {job.shell_command}',
    }
    return merged(run, spec.options.raw)
