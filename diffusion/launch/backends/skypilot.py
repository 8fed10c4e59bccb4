"""SkyPilot: a managed job on any cloud, with SkyPilot's recovery; a chain is a pipeline of tasks."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from diffusion.config.schema import Gatherer, Problem, build_dataclass, join
from diffusion.launch.backends.base import IMAGE_WORKDIR, Rendered, environment_of, merged, unmounted_run_folders
from diffusion.launch.command_line_tools import call
from diffusion.launch.job_spec import Job

INSTALL = 'pip install skypilot, in an environment of its own, and see `sky check`'
QUIET = {'SKYPILOT_DISABLE_USAGE_COLLECTION': '1'}
NAME = re.compile(r'[a-zA-Z][a-zA-Z0-9]*([._-]{1,2}[a-zA-Z0-9]+)*')
ACCELERATORS = {
    'a100-40gb': 'A100',
    'a100-80gb': 'A100-80GB',
    'h100-sxm': 'H100',
    'h100-pcie': 'H100',
    'h200': 'H200',
    'b200': 'B200',
    'l40s': 'L40S',
    'a10g': 'A10G',
    'rtx-4090': 'RTX4090',
    'v100-32gb': 'V100-32GB',
    'v100-16gb': 'V100',
}
KILLED = 137
"""Exit status with which SkyPilot kills the other nodes of a job; recovery on it would restart every job that ends."""


@dataclass
class Options:
    """SkyPilot's own settings."""

    infra: str | None = None
    """Cloud, region and zone, such as aws/us-east-1 or k8s/my-context; null takes the cheapest enabled one."""
    disk_gb: int | None = None
    """Size of a node's disk."""
    network_tier: Literal['standard', 'best'] | None = None
    """Network between nodes; best asks for the fast fabric."""
    recovery: Literal['FAILOVER', 'EAGER_NEXT_REGION'] | None = None
    """Recovery of a preempted job: FAILOVER tries the same region first, EAGER_NEXT_REGION another one at once."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Values merged last into each task."""


@dataclass
class JobRecovery:
    """Keys of `job_recovery` in resources."""

    strategy: str | None = None
    max_restarts_on_errors: int | None = None
    recover_on_exit_codes: list[int] = field(default_factory=list)


@dataclass
class Resources:
    """Keys of `resources` in a task."""

    accelerators: Any = None
    accelerator_args: Any = None
    any_of: list[Any] = field(default_factory=list)
    autostop: Any = None
    cloud: str | None = None
    cpus: str | int | float | None = None
    disk_size: str | int | None = None
    disk_tier: str | None = None
    ephemeral_storage: Any = None
    image_id: Any = None
    infra: str | None = None
    instance_type: str | None = None
    job_recovery: JobRecovery | None = None
    labels: dict[str, str] = field(default_factory=dict)
    local_disk: str | None = None
    max_hourly_cost: float | None = None
    memory: str | int | float | None = None
    network_tier: str | None = None
    ordered: list[Any] = field(default_factory=list)
    ports: Any = None
    priority: int | None = None
    priority_class: str | None = None
    region: str | None = None
    use_spot: bool | None = None
    volumes: list[Any] = field(default_factory=list)
    zone: str | None = None


@dataclass
class Task:
    """Keys of a task that a job can use."""

    run: str
    name: str
    num_nodes: int
    resources: Resources
    api_server_access: Any = None
    config: Any = None
    envs: dict[str, str] = field(default_factory=dict)
    event_callback: str | None = None
    file_mounts: dict[str, Any] = field(default_factory=dict)
    inputs: Any = None
    managed_secrets: Any = None
    outputs: Any = None
    pool: Any = None
    secrets: dict[str, str | None] = field(default_factory=dict)
    setup: str | None = None
    volumes: dict[str, Any] = field(default_factory=dict)
    workdir: Any = None


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    for job in jobs:
        if NAME.fullmatch(job.name) is None:
            what = f'{job.name!r} is no name in SkyPilot; use letters and digits with a dash between, a letter first'
            gather.problem('name', what)
    if spec.image is None:
        gather.problem('image', 'is missing; without one a machine of SkyPilot has nothing of this library')
    if spec.gpu is not None and spec.gpu not in ACCELERATORS:
        known = ', '.join(ACCELERATORS)
        gather.problem('gpu', f'{spec.gpu} has no name in SkyPilot here; known: {known} (or backend.raw.resources)')
    priority = spec.schedule.priority
    if priority is not None and (not isinstance(priority, int) or not -1000 <= priority <= 1000):
        gather.problem('schedule.priority', f'{priority!r} is no priority of SkyPilot; write a number up to 1000')
    if spec.schedule.queue is not None:
        gather.problem('schedule.queue', 'is unknown to SkyPilot; leave it out')
    if any(job.time_limit_seconds for job in jobs):
        gather.problem('schedule.time_limit', 'is unknown to SkyPilot; leave it out')
    if spec.restart.actions().get(KILLED, 'stop') != 'stop':
        what = 'SkyPilot ends the other nodes of a job with it, which would bring every job back; leave it out'
        gather.problem(f'restart.on_exit.{KILLED}', what)
    for name, source in spec.secrets.items():
        if source is not None:
            what = 'SkyPilot takes it from the environment; leave it null, and export it where you submit'
            gather.problem(join('secrets', name), what)
    for target, source in spec.mounts.items():
        if re.fullmatch(r'(volume|s3|gs|r2|az)://.+', source) is None:
            gather.problem(
                join('mounts', target), f'{source!r} cannot be mounted; write volume://name or s3://bucket/folder'
            )
    return gather.problems + (unmounted_run_folders(jobs) if spec.image else [])


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    tasks = [_task(job) for job in jobs]
    documents = [{'name': spec.name}, *tasks] if len(jobs) > 1 else tasks
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    name = f'{spec.name}.yaml'
    notes = []
    if any(not source.startswith('volume://') for source in spec.mounts.values()):
        notes.append('A bucket that is mounted has no links and no renames: checkpoints belong on a volume.')
    if spec.restart.codes('elsewhere'):
        notes.append('SkyPilot recovers on new machines, which may be the same ones again.')
    return Rendered({name: text}, (_launch(jobs, name),), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Validate by the keys above; SkyPilot's own check takes 12 s to import, and runs in `sky jobs launch`."""
    gather = Gatherer()
    for text in rendered.files.values():
        tasks = list(yaml.safe_load_all(text))
        for task in tasks[1:] if len(tasks) > 1 else tasks:
            build_dataclass(Task, task, 'backend.raw', gather)
    return gather.problems


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    name = next(iter(rendered.files))
    command = _launch(jobs, str(folder / name))
    return call([*command, '--yes', '--async'], install=INSTALL, timeout_seconds=600, env=QUIET)


def status(jobs: Sequence[Job]) -> str:
    queue = call(['sky', 'jobs', 'queue'], install=INSTALL, env=QUIET).splitlines()
    own = [line for line in queue if jobs[0].spec.name in line.split()]
    return '\n'.join(own) or f"{jobs[0].spec.name}: not in SkyPilot's queue of managed jobs"


def logs(jobs: Sequence[Job]) -> str:
    command = ['sky', 'jobs', 'logs', '--name', jobs[0].spec.name, '--no-follow']
    return call(command, install=INSTALL, env=QUIET)


def cancel(jobs: Sequence[Job]) -> str:
    return call(['sky', 'jobs', 'cancel', '--yes', '--name', jobs[0].spec.name], install=INSTALL, env=QUIET)


def _launch(jobs: Sequence[Job], file: str) -> tuple[str, ...]:
    secrets = [word for name in jobs[0].spec.secrets for word in ('--secret', name)]
    return 'sky', 'jobs', 'launch', *secrets, file


def _task(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    buckets = {target: source for target, source in spec.mounts.items() if not source.startswith('volume://')}
    volumes = {
        target: source.removeprefix('volume://') for target, source in spec.mounts.items() if target not in buckets
    }
    task = {
        'name': job.name,
        'num_nodes': job.nodes,
        'resources': _resources(job),
        'envs': environment_of(job, 'skypilot'),
        'secrets': dict.fromkeys(spec.secrets),
        'volumes': volumes,
        'file_mounts': {target: {'source': source, 'mode': 'MOUNT'} for target, source in buckets.items()},
        'run': f'cd {shlex.quote(spec.workdir or IMAGE_WORKDIR)} && exec {job.shell_command}',
    }
    return merged({key: value for key, value in task.items() if value}, options.raw)


def _resources(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    schedule, restart = spec.schedule, spec.restart
    codes = restart.codes('retry', 'elsewhere')
    # Every other failure is 1. The node entry point counts those, because SkyPilot counts preemptions as well.
    codes = sorted({*codes, *([1] if restart.otherwise == 'retry' else [])}) if restart.max_restarts else []
    recovery = {'strategy': options.recovery, 'max_restarts_on_errors': 0, 'recover_on_exit_codes': codes}
    resources = {
        'infra': options.infra,
        'accelerators': {ACCELERATORS[spec.gpu]: spec.gpus_per_node} if spec.gpu else None,
        'image_id': f'docker:{spec.image}',
        'disk_size': options.disk_gb,
        'network_tier': options.network_tier,
        'use_spot': schedule.preemptible or None,
        'priority': schedule.priority,
        'job_recovery': {key: value for key, value in recovery.items() if value is not None},
    }
    return {key: value for key, value in resources.items() if value is not None}
