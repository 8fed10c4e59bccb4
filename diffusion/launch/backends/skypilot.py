"""SkyPilot launch backend: a managed job, which SkyPilot recovers on any cloud; jobs in sequence are a pipeline."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from diffusion.config.schema import Gatherer, Problem, build_dataclass, join
from diffusion.launch.backends.base import IMAGE_WORKDIR, Rendered, call, deep_merge, environment_of, unmounted_folders
from diffusion.launch.job_spec import Job

INSTALL = 'pip install skypilot in a separate environment, and run `sky check`'
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
"""Exit status of nodes that SkyPilot kills because another node ended. Retrying 137 would restart all failed jobs."""


@dataclass(frozen=True)
class Options:
    """Settings of the SkyPilot launch backend, from `backend:` in a job spec."""

    infra: str | None = None
    """Cloud, region and zone, such as aws/us-east-1 or k8s/my-context. Null means the cheapest enabled cloud."""
    disk_gb: int | None = None
    """Disk size of a node in GB."""
    network_tier: Literal['standard', 'best'] | None = None
    """Network tier between nodes; best requests the fastest network of the cloud."""
    recovery: Literal['FAILOVER', 'EAGER_NEXT_REGION'] | None = None
    """Recovery of a preempted job: FAILOVER tries the same region first; EAGER_NEXT_REGION goes to another region
    immediately."""
    raw: dict[str, Any] = field(default_factory=dict)
    """Values that are merged last into each SkyPilot task."""


# The next three classes copy the keys of the SkyPilot schemas, because importing SkyPilot takes 12 s. A test compares
# them with the installed SkyPilot.
@dataclass(frozen=True)
class JobRecovery:
    """Keys of `resources.job_recovery` in the YAML of a SkyPilot task."""

    strategy: str | None = None
    max_restarts_on_errors: int | None = None
    recover_on_exit_codes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Resources:
    """Keys of `resources` in the YAML of a SkyPilot task."""

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


@dataclass(frozen=True)
class Task:
    """Keys of a SkyPilot task's YAML that a job can use."""

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
            message = 'is not a valid SkyPilot name; use letters, digits and single dashes, a letter first'
            gather.problem('name', f'{job.name!r} {message}')
    if spec.image is None:
        gather.problem('image', 'is missing; set it to a container image with this library')
    priority = spec.schedule.priority
    if priority is not None and (not isinstance(priority, int) or not -1000 <= priority <= 1000):
        gather.problem('schedule.priority', f'{priority!r} is not a SkyPilot priority; use a number from -1000 to 1000')
    if spec.schedule.queue is not None:
        gather.problem('schedule.queue', 'is not supported by SkyPilot; remove it')
    if any(job.time_limit_seconds for job in jobs):
        gather.problem('schedule.time_limit', 'is not supported by SkyPilot; remove it')
    if spec.restart.actions().get(KILLED, 'stop') != 'stop':
        message = 'SkyPilot ends the other nodes of a job with this status, so every job would restart; remove it'
        gather.problem(f'restart.on_exit.{KILLED}', message)
    for name, source in spec.secrets.items():
        if source is not None:
            message = 'SkyPilot reads it from the environment; set it to null, and export it before submitting'
            gather.problem(join('secrets', name), message)
    for target, source in spec.mounts.items():
        if re.fullmatch(r'(volume|s3|gs|r2|az)://.+', source) is None:
            message = f'{source!r} cannot be mounted; use volume://name or s3://bucket/folder'
            gather.problem(join('mounts', target), message)
    return gather.problems + (unmounted_folders(jobs) if spec.image else [])


def render(jobs: Sequence[Job]) -> Rendered:
    spec = jobs[0].spec
    tasks = [_task(job) for job in jobs]
    documents = [{'name': spec.name}, *tasks] if len(jobs) > 1 else tasks
    text = yaml.safe_dump_all(documents, sort_keys=False, width=1000)
    name = f'{spec.name}.yaml'
    notes = []
    if any(not source.startswith('volume://') for source in spec.mounts.values()):
        notes.append('A mounted bucket has no links and no renames: save checkpoints to a volume.')
    if spec.restart.codes('elsewhere'):
        notes.append('SkyPilot recovers on new machines, which may include the faulty one.')
    return Rendered({name: text}, (_launch(jobs, name),), tuple(notes))


def validate(rendered: Rendered) -> list[Problem]:
    """Return the unknown keys in rendered SkyPilot tasks; SkyPilot's full check runs in `sky jobs launch`."""
    gather = Gatherer()
    for text in rendered.files.values():
        tasks = list(yaml.safe_load_all(text))
        for task in tasks[1:] if len(tasks) > 1 else tasks:
            build_dataclass(Task, task, 'backend.raw', gather)
    return gather.problems


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    name = next(iter(rendered.files))
    command = [*_launch(jobs, str(folder / name)), '--yes', '--async']
    return call(command, install=INSTALL, timeout_seconds=600, env=QUIET)


def status(jobs: Sequence[Job]) -> str:
    # The queue has no filter by name. Compare whole words, since other names may begin with this name.
    queue = call(['sky', 'jobs', 'queue'], install=INSTALL, env=QUIET).splitlines()
    lines = [line for line in queue if jobs[0].spec.name in line.split()]
    return '\n'.join(lines) or f"{jobs[0].spec.name}: not in SkyPilot's queue of managed jobs"


def logs(jobs: Sequence[Job]) -> str:
    return call(['sky', 'jobs', 'logs', '--name', jobs[0].spec.name, '--no-follow'], install=INSTALL, env=QUIET)


def cancel(jobs: Sequence[Job]) -> str:
    return call(['sky', 'jobs', 'cancel', '--yes', '--name', jobs[0].spec.name], install=INSTALL, env=QUIET)


def _launch(jobs: Sequence[Job], file: str) -> tuple[str, ...]:
    secrets = [word for name in jobs[0].spec.secrets for word in ('--secret', name)]
    return 'sky', 'jobs', 'launch', *secrets, file


def _task(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    buckets = {target: source for target, source in spec.mounts.items() if not source.startswith('volume://')}
    volumes = {target: spec.mounts[target].removeprefix('volume://') for target in spec.mounts if target not in buckets}
    task = {
        'name': job.name,
        'num_nodes': job.nodes,
        'resources': _resources(job),
        'envs': environment_of(job, 'skypilot'),
        'secrets': dict.fromkeys(spec.secrets),
        'volumes': volumes,
        'file_mounts': {target: {'source': source, 'mode': 'MOUNT'} for target, source in buckets.items()},
        # `exec` lets the platform's signals reach the node entry point instead of a shell.
        'run': f'cd {shlex.quote(spec.workdir or IMAGE_WORKDIR)} && exec {job.shell_command}',
    }
    return deep_merge({key: value for key, value in task.items() if value}, options.raw)


def _resources(job: Job) -> dict[str, Any]:
    spec = job.spec
    options: Options = spec.options
    schedule, restart = spec.schedule, spec.restart
    codes = restart.codes('retry', 'elsewhere')
    # Status 1 stands for all other failures. max_restarts_on_errors is 0 because SkyPilot would also count preemptions;
    # the node entry point counts restarts without progress instead (MAX_RESTARTS).
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
