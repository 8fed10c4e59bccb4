"""Job spec: recipe, machines, scheduling and restarts of a job. The dataclass fields are the keys of the job YAML."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.config.yaml_files import dump_inline
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, PREEMPTED

Action = Literal['retry', 'elsewhere', 'stop']
"""Action after an exit status: retry, retry on other nodes if the backend supports it, or stop."""

ON_EXIT: dict[str, Action] = {str(PREEMPTED): 'retry', str(BAD_HARDWARE): 'elsewhere', str(CONFIG_ERROR): 'stop'}
"""Default actions after the exit statuses of the node entry point."""


@dataclass(frozen=True)
class Restart:
    """Restart policy of a job: the action after each exit status, and the maximum number of restarts."""

    max_restarts: int = 100
    """Maximum number of consecutive restarts without progress, not counting preemptions. A restart makes progress if it
    resumes from a newer checkpoint than before. 0 turns restarts off."""
    on_exit: dict[str, Action] = field(default_factory=dict)
    """Action by exit status: retry, elsewhere (retry on other nodes) or stop. The defaults are retry for 75
    (preempted), elsewhere for 76 (bad hardware) and stop for 78 (user error)."""
    otherwise: Literal['retry', 'stop'] = 'retry'
    """Action after any other exit status, such as after a crash or a kill."""
    standby: bool = False
    """True keeps a standby process per rank, which has already imported all modules and takes over immediately after a
    crash. If a node is lost, the scheduler restarts the job instead. Standby processes need 0.5 GB of memory per rank,
    and an open port between the nodes (`master_port` + 1)."""

    def actions(self) -> dict[int, Action]:
        """Return the action (retry, elsewhere or stop) by exit status, for the defaults and `on_exit`."""
        return {int(code): action for code, action in sorted((ON_EXIT | self.on_exit).items())}

    def codes(self, *selected: Action) -> list[int]:
        """Return the exit statuses in `actions` whose action is one of `selected`, such as stop."""
        return [code for code, action in self.actions().items() if action in selected]


@dataclass(frozen=True)
class Schedule:
    """Queue, priority and limits of a job."""

    queue: str | None = None
    """Slurm partition, Kueue local queue, or MosaicML cluster."""
    priority: str | int | None = None
    """Slurm QOS; Kubernetes or Kueue priority class; a number for SkyPilot; low, medium or high for mcli."""
    preemptible: bool = False
    """True uses cheaper capacity that the provider can take back."""
    time_limit: str | None = None
    """Maximum run time that the scheduler allows, such as 90m, 12h or 3d."""
    notice_seconds: int = 120
    """Time in seconds from the scheduler's warning to the kill, during which the job saves a checkpoint."""


@dataclass(frozen=True)
class JobStage:
    """One stage in a chain of jobs; each stage becomes a job. Keys that are not set are taken from the job spec."""

    recipe: str | None = None
    """Path of the recipe."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of recipe values, applied after the overrides of the job spec."""
    nodes: int | None = None
    """Number of machines."""
    time_limit: str | None = None
    """Time limit of this stage."""


@dataclass
class JobSpec:
    """Job spec, the content of a job YAML: one job, or a chain of jobs that run in sequence."""

    name: str
    """Name of the job in the scheduler, the same for every attempt."""
    recipe: str | None = None
    """Path of the recipe, relative to the folder that contains run.py."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of recipe values, such as `streams.laion.remote: s3://bucket/256`."""
    stages: dict[str, JobStage] = field(default_factory=dict)
    """Jobs that run in sequence, each initialized with the weights of the previous one."""
    nodes: int = 1
    """Number of machines."""
    gpu: str | None = None
    """GPU model, as in `diffusion plan --gpu`. Null means CPUs."""
    gpus_per_node: int = 8
    """Number of GPUs per machine, with one process each; on CPUs, the number of processes."""
    price_usd_per_gpu_hour: float | None = None
    """Price of one GPU per hour in USD. Null means the default price of `diffusion plan`."""
    image: str | None = None
    """Container image. Null means the software installed on the machines."""
    torch: str | None = None
    """Version of torch in the image or on the machines, such as 2.9 or 2.7.0+cu128, which must have kernels for `gpu`.
    Null means the version installed where the job is submitted."""
    workdir: str | None = None
    """Folder on the nodes that contains run.py. Null means the image's working directory or, without an image, the
    folder from which the job is submitted."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables; must not contain secrets."""
    secrets: dict[str, str | None] = field(default_factory=dict)
    """Secret environment variables by name, with the source from which the backend reads each value. Null means the
    environment in which the job is submitted."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Mounts as `FOLDER_ON_NODE: SOURCE`, with a source such as /shared/runs, pvc://claim or s3://bucket/runs."""
    restart: Restart = field(default_factory=Restart)
    """Actions when a job ends."""
    preflight: Literal['none', 'fast', 'deep'] = 'fast'
    """Level of the node checks before training: fast takes less than a minute, deep takes minutes."""
    hang_seconds: int | None = None
    """Minimum time in seconds without a batch after which the run counts as hanging. Null means 900. The timeout of
    collectives is derived from it: four times as long, to allow for saves, plus a minute."""
    master_port: int = 29500
    """Port on the first node for the rendezvous of the ranks."""
    schedule: Schedule = field(default_factory=Schedule)
    """Queue, priority and limits."""
    options: Any = field(default=None, repr=False)
    """Settings of the launch backend, from `backend:`."""
    backend: str = field(default='', repr=False)
    """Name of the launch backend, from `backend:`."""


@dataclass(frozen=True)
class Job:
    """One job to submit to the scheduler: a stage of a job spec, or the whole spec if it has no stages."""

    name: str
    """Name of the spec, followed by the name of the stage if the spec has stages."""
    stage: str
    """Name of the stage; `main` if the spec has none."""
    recipe: str
    overrides: tuple[str, ...]
    nodes: int
    time_limit_seconds: int | None
    run_dir: str
    """Folder of the run and its checkpoints, or their URL in an object store."""
    task: str
    after: str | None
    """Name of the job that must succeed before this one starts, or None."""
    spec: JobSpec

    @property
    def world_size(self) -> int:
        return self.nodes * self.spec.gpus_per_node

    @property
    def arguments(self) -> list[str]:
        return ['--', 'run.py', self.recipe, *self.overrides]

    @property
    def command(self) -> list[str]:
        """Command that every node of the job runs, as a list of arguments."""
        return ['python', '-m', 'diffusion.launch.node', *self.arguments]

    @property
    def shell_command(self) -> str:
        """Command that every node of the job runs, quoted for bash."""
        return shlex.join(self.command)


def override_words(overrides: Mapping[str, Any], prefix: str = '') -> tuple[str, ...]:
    """Return recipe overrides as `key=value` words, which run.py parses to the same values; dots join nested keys."""
    words: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f'{prefix}{key}.')
        else:
            words.append(f'{prefix}{key}={dump_inline(value)}')
    return tuple(words)


def seconds_of(duration: str) -> int:
    """Return a time limit such as 90m, 12h or 3d in seconds; raise UserError for any other text."""
    found = re.fullmatch(r'(\d+)([smhd])', duration)
    if found is None or int(found[1]) == 0:
        raise UserError(f'{duration!r} is not a duration; use a number and a unit, such as 90m, 12h or 3d')
    return int(found[1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[found[2]]
