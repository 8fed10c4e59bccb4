"""The job spec: recipe, machines, scheduling and restarts of a job. Its fields are the keys of the job's YAML."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.config.yaml_files import dump_inline
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, PREEMPTED

Action = Literal['retry', 'elsewhere', 'stop']
"""Action after an exit status: retry, retry on other nodes if the back end can, or stop."""

ON_EXIT: dict[str, Action] = {str(PREEMPTED): 'retry', str(BAD_HARDWARE): 'elsewhere', str(CONFIG_ERROR): 'stop'}
"""Default actions after the exit statuses of the node entry point."""


@dataclass
class Restart:
    """Actions when a job ends."""

    max_restarts: int = 100
    """Most restarts of a job."""
    on_exit: dict[str, Action] = field(default_factory=dict)
    """Action by exit status: retry, elsewhere (other nodes) or stop. Defaults: 75 (preempted) retry, 76 (bad hardware)
    elsewhere, 78 (a mistake in the recipe) stop."""
    otherwise: Literal['retry', 'stop'] = 'retry'
    """Action after every other exit status: a crash, a kill."""

    def actions(self) -> dict[int, Action]:
        """Return the action after each named exit status, the defaults included."""
        return {int(code): action for code, action in sorted((ON_EXIT | self.on_exit).items())}

    def codes(self, *wanted: Action) -> list[int]:
        """Return the named exit statuses with one of these actions."""
        return [code for code, action in self.actions().items() if action in wanted]


@dataclass
class Schedule:
    """Queue, priority and limits of a job."""

    queue: str | None = None
    """Slurm's partition, Kueue's local queue, the MosaicML cluster."""
    priority: str | int | None = None
    """Slurm's QOS, a Kubernetes (or Kueue) priority class, a number for SkyPilot, low or medium or high for mcli."""
    preemptible: bool = False
    """Run on cheaper capacity that can be taken away."""
    time_limit: str | None = None
    """Longest time that the scheduler lets the job run, such as 90m, 12h or 3d."""
    notice_seconds: int = 120
    """Seconds between the scheduler's warning and the kill, in which the job saves."""


@dataclass
class JobStage:
    """One job of a chain; keys that it leaves out are those of the spec."""

    recipe: str | None = None
    """Path of the recipe."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of the recipe, on top of those of all stages."""
    nodes: int | None = None
    """Number of machines."""
    time_limit: str | None = None
    """Time limit of this stage."""


@dataclass
class JobSpec:
    """A job, or a chain of jobs."""

    name: str
    """The job's name for the scheduler, the same at every attempt."""
    recipe: str | None = None
    """The recipe, a path from the folder that holds run.py."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Overrides of the recipe, as `streams.laion.remote: s3://bucket/256`."""
    stages: dict[str, JobStage] = field(default_factory=dict)
    """Jobs that run one after the other, each from the weights of the one before."""
    nodes: int = 1
    """Number of machines."""
    gpu: str | None = None
    """The kind of GPU, as in `diffusion plan --gpu`; null runs on CPUs."""
    gpus_per_node: int = 8
    """Number of GPUs per machine, each with a process of its own; without GPUs, the number of processes."""
    price_usd_per_gpu_hour: float | None = None
    """Your price of a GPU per hour; null takes the usual price, as `diffusion plan` does."""
    image: str | None = None
    """The container image; null runs what is installed on the machines."""
    workdir: str | None = None
    """The folder that holds run.py on a node; null is the image's own, or where the job is submitted from."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, none of them secret."""
    secrets: dict[str, str | None] = field(default_factory=dict)
    """Secret environment variables, by name, and the source from which the back end takes each; null is the environment
    that the job is submitted from."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Sources by the folder on a node where each is mounted: `/workspace/runs: /shared/runs`, `pvc://claim`,
    `s3://bucket/runs`."""
    restart: Restart = field(default_factory=Restart)
    """Actions when a job ends."""
    preflight: Literal['none', 'fast', 'deep'] = 'fast'
    """Level of the checks of every node before the first step: fast takes under a minute, deep minutes."""
    hang_seconds: int | None = None
    """Shortest time without a batch that counts as a hang; null takes the default of the node entry point."""
    master_port: int = 29500
    """Port on the first node where the ranks meet."""
    schedule: Schedule = field(default_factory=Schedule)
    """Queue, priority and limits."""
    options: Any = field(default=None, repr=False)
    """The back end's own settings, from `backend:`."""
    backend: str = field(default='', repr=False)
    """The name of the back end, from `backend:`."""


@dataclass(frozen=True)
class Job:
    """One job as a back end renders it: a stage with the keys of the spec filled in."""

    name: str
    """The spec's name, followed by the stage's if there are stages."""
    stage: str
    """The stage's name; `main` if there are none."""
    recipe: str
    overrides: tuple[str, ...]
    nodes: int
    time_limit_seconds: int | None
    run_dir: str
    """Folder of the run, with its checkpoints."""
    after: str | None
    """Name of the job that must have succeeded before this one starts."""
    spec: JobSpec

    @property
    def world_size(self) -> int:
        return self.nodes * self.spec.gpus_per_node

    @property
    def arguments(self) -> list[str]:
        """The arguments of the node entry point."""
        return ['--', 'run.py', self.recipe, *self.overrides]

    @property
    def command(self) -> list[str]:
        """The command that every node runs."""
        return ['python', '-m', 'diffusion.launch.node', *self.arguments]

    @property
    def shell_command(self) -> str:
        """The command quoted for bash."""
        return shlex.join(self.command)


def override_words(overrides: Mapping[str, Any], prefix: str = '') -> tuple[str, ...]:
    """Write overrides as `key=value` words, which run.py reads back as the same values; nested keys get dots."""
    words: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f'{prefix}{key}.')
        else:
            words.append(f'{prefix}{key}={dump_inline(value)}')
    return tuple(words)


def seconds_of(duration: str) -> int:
    """Convert a time limit such as 90m, 12h or 3d to seconds.

    Raises:
        UserError: The text is not a time limit.
    """
    found = re.fullmatch(r'(\d+)([smhd])', duration)
    if found is None or int(found[1]) == 0:
        raise UserError(f'{duration!r} is not a time; write a number and its unit, such as 90m, 12h or 3d')
    return int(found[1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[found[2]]
