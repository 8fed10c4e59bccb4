"""Job spec: recipe, machines, scheduling and restarts of a job. Its fields are the keys of the job YAML."""

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


@dataclass
class Restart:
    """Restart policy of a job: the action after each exit status, and the maximum number of restarts in a row."""

    max_restarts: int = 100
    """Maximum number of restarts in a row without progress. Preemptions do not count; progress is a newer checkpoint
    from which an attempt resumed. 0 turns restarts off."""
    on_exit: dict[str, Action] = field(default_factory=dict)
    """Action by exit status: retry, elsewhere (retry on other nodes) or stop. Defaults: 75 (preempted) retry, 76 (bad
    hardware) elsewhere, 78 (user error) stop."""
    otherwise: Literal['retry', 'stop'] = 'retry'
    """Action after every other exit status, such as that of a crash or a kill."""
    standby: bool = False
    """Keep a standby process per rank, which has imported what the rank needs and takes over at once after a crash, if
    all nodes survive; the scheduler restarts the job otherwise. It needs 0.5 GB of memory per rank, and the port after
    `master_port` between the nodes."""

    def actions(self) -> dict[int, Action]:
        """Return the action (retry, elsewhere or stop) for each listed exit status, including the defaults."""
        return {int(code): action for code, action in sorted((ON_EXIT | self.on_exit).items())}

    def codes(self, *selected: Action) -> list[int]:
        """Return the listed exit statuses whose action is one of `selected`, such as stop."""
        return [code for code, action in self.actions().items() if action in selected]


@dataclass
class Schedule:
    """Queue, priority and limits of a job."""

    queue: str | None = None
    """Slurm partition, Kueue local queue, or MosaicML cluster."""
    priority: str | int | None = None
    """Slurm QOS; Kubernetes or Kueue priority class; a number for SkyPilot; low, medium or high for mcli."""
    preemptible: bool = False
    """Use cheaper capacity that the provider can take back."""
    time_limit: str | None = None
    """Maximum run time that the scheduler allows, such as 90m, 12h or 3d."""
    notice_seconds: int = 120
    """Time in seconds between the scheduler's warning and the kill, in which the job saves a checkpoint."""


@dataclass
class JobStage:
    """Stage of a chain of jobs, which becomes one job. Keys that are not set are taken from the job spec."""

    recipe: str | None = None
    """Path of the recipe."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of the recipe, applied after the overrides of the job spec."""
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
    """Overrides of the recipe, such as `streams.laion.remote: s3://bucket/256`."""
    stages: dict[str, JobStage] = field(default_factory=dict)
    """Jobs that run in sequence, each initialized with the weights of the previous one."""
    nodes: int = 1
    """Number of machines."""
    gpu: str | None = None
    """GPU model, as in `diffusion plan --gpu`; null runs on CPUs."""
    gpus_per_node: int = 8
    """Number of GPUs per machine, with one process each; without GPUs, the number of processes."""
    price_usd_per_gpu_hour: float | None = None
    """Price of one GPU per hour in USD; null uses the default price of `diffusion plan`."""
    image: str | None = None
    """Container image; null runs the software that is installed on the machines."""
    torch: str | None = None
    """Version of torch in the image or on the machines, such as 2.9 or 2.7.0+cu128, which must have kernels for `gpu`;
    null assumes the version that is installed where the job is submitted."""
    workdir: str | None = None
    """Folder with run.py on a node; null uses the working directory of the image, or else the folder from which the job
    is submitted."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables; must not contain secrets."""
    secrets: dict[str, str | None] = field(default_factory=dict)
    """Secret environment variables by name, with the source from which the backend reads each; null reads it from the
    environment in which the job is submitted."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Mounts, as folder on the node and source: `/workspace/runs: /shared/runs`, `pvc://claim`, `s3://bucket/runs`."""
    restart: Restart = field(default_factory=Restart)
    """Actions when a job ends."""
    preflight: Literal['none', 'fast', 'deep'] = 'fast'
    """Level of the node checks before the first step: fast takes less than a minute, deep takes minutes."""
    hang_seconds: int | None = None
    """Minimum time in seconds without a batch that counts as a hang; null uses 900. The timeout of collectives follows
    from it: four times as long, for saves, plus a minute."""
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
    """One job to submit to the scheduler: one stage of a job spec, or the whole spec if it has no stages.

    A stage is one of several jobs that run one after the other. Settings that it omits are those of the spec.
    """

    name: str
    """Name of the spec, followed by the name of the stage if there are stages."""
    stage: str
    """Name of the stage; `main` if there are none."""
    recipe: str
    overrides: tuple[str, ...]
    nodes: int
    time_limit_seconds: int | None
    run_dir: str
    """Folder of the run and its checkpoints, or their URL in an object store."""
    task: str
    """Task of the recipe, such as train."""
    after: str | None
    """Name of the job that must succeed before this one starts, or None."""
    spec: JobSpec

    @property
    def world_size(self) -> int:
        return self.nodes * self.spec.gpus_per_node

    @property
    def arguments(self) -> list[str]:
        """Arguments of the node entry point: the training program, the recipe and its overrides."""
        return ['--', 'run.py', self.recipe, *self.overrides]

    @property
    def command(self) -> list[str]:
        """Command that every node of the job runs, as a list of words."""
        return ['python', '-m', 'diffusion.launch.node', *self.arguments]

    @property
    def shell_command(self) -> str:
        """Command that every node of the job runs, quoted for bash."""
        return shlex.join(self.command)


def override_words(overrides: Mapping[str, Any], prefix: str = '') -> tuple[str, ...]:
    """Return recipe overrides as `key=value` words that run.py parses to the same values; dots join nested keys."""
    words: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f'{prefix}{key}.')
        else:
            words.append(f'{prefix}{key}={dump_inline(value)}')
    return tuple(words)


def seconds_of(duration: str) -> int:
    """Return a time limit such as 90m, 12h or 3d in seconds.

    Raises:
        UserError: The text is not a time limit.
    """
    found = re.fullmatch(r'(\d+)([smhd])', duration)
    if found is None or int(found[1]) == 0:
        raise UserError(f'{duration!r} is not a duration; use a number and a unit, such as 90m, 12h or 3d')
    return int(found[1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[found[2]]
