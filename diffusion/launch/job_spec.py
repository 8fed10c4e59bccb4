"""The job spec: what to run, on what, where, and what follows when it ends; its fields are the keys of its YAML."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.config.yaml_files import dump_inline
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, PREEMPTED

Action = Literal['retry', 'elsewhere', 'stop']
"""What follows an exit status: retry; retry on other nodes, where the back end can; or stop."""

ON_EXIT: dict[str, Action] = {str(PREEMPTED): 'retry', str(BAD_HARDWARE): 'elsewhere', str(CONFIG_ERROR): 'stop'}
"""What follows the exit statuses that the node entry point gives, unless a spec says otherwise."""


@dataclass
class Restart:
    """What follows when a job ends."""

    max_restarts: int = 100
    """How often a job is started again."""
    on_exit: dict[str, Action] = field(default_factory=dict)
    """By exit status: retry, elsewhere (other nodes) or stop; 75 (preempted) retries, 76 (bad hardware) goes elsewhere
    and 78 (a mistake in the recipe) stops unless it is said here."""
    otherwise: Literal['retry', 'stop'] = 'retry'
    """What follows every other exit status: a crash, a kill."""

    def actions(self) -> dict[int, Action]:
        """What follows each exit status that is named, the usual ones included."""
        return {int(code): action for code, action in sorted((ON_EXIT | self.on_exit).items())}

    def codes(self, *wanted: Action) -> list[int]:
        """The named exit statuses that one of these actions follows."""
        return [code for code, action in self.actions().items() if action in wanted]


@dataclass
class Schedule:
    """When and how the scheduler runs a job."""

    queue: str | None = None
    """Slurm's partition, Kueue's local queue, the MosaicML cluster."""
    priority: str | int | None = None
    """Slurm's QOS, a Kubernetes (or Kueue) priority class, a number for SkyPilot, low or medium or high for mcli."""
    preemptible: bool = False
    """Run on capacity that can be taken away, for less money."""
    time_limit: str | None = None
    """After which the scheduler stops the job, such as 90m, 12h or 3d."""
    notice_seconds: int = 120
    """Time to save in, between the scheduler's warning and the end."""


@dataclass
class JobStage:
    """One job of a chain; what it leaves out is as for the whole."""

    recipe: str | None = None
    """The recipe."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Changes of the recipe, on top of those of all stages."""
    nodes: int | None = None
    """How many machines."""
    time_limit: str | None = None
    """Of this stage."""


@dataclass
class JobSpec:
    """A job, or a chain of jobs."""

    name: str
    """The job's name for the scheduler, the same at every attempt."""
    recipe: str | None = None
    """The recipe, a path from the folder that holds run.py."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Changes of the recipe, as `streams.laion.remote: s3://bucket/256`."""
    stages: dict[str, JobStage] = field(default_factory=dict)
    """Jobs that follow one another, each from the weights of the one before."""
    nodes: int = 1
    """How many machines."""
    gpu: str | None = None
    """The kind of GPU, as in `diffusion plan --gpu`; null runs on CPUs."""
    gpus_per_node: int = 8
    """How many GPUs of a machine the job takes, each with a process of its own; without GPUs, how many processes."""
    price_usd_per_gpu_hour: float | None = None
    """What a GPU costs you an hour; null takes the usual price, as `diffusion plan` does."""
    image: str | None = None
    """The container image; null runs what is installed on the machines."""
    workdir: str | None = None
    """The folder that holds run.py on a node; null is the image's own, or where the job is submitted from."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, none of them secret."""
    secrets: dict[str, str | None] = field(default_factory=dict)
    """Environment variables whose values are secret, and where the back end finds them; null is the environment that
    the job is submitted from."""
    mounts: dict[str, str] = field(default_factory=dict)
    """Folders on a node by what is in them: `/workspace/runs: /shared/runs`, `pvc://claim`, `s3://bucket/runs`."""
    restart: Restart = field(default_factory=Restart)
    """What follows when a job ends."""
    preflight: Literal['none', 'fast', 'deep'] = 'fast'
    """What every node checks before the first step: fast takes under a minute."""
    hang_seconds: int | None = None
    """Shortest time without a batch that counts as hung; null leaves it to the node."""
    master_port: int = 29500
    """The port on the first node that the ranks meet at."""
    schedule: Schedule = field(default_factory=Schedule)
    """When and how the scheduler runs it."""
    options: Any = field(default=None, repr=False)
    """The back end's own settings, from `backend:`."""
    backend: str = field(default='', repr=False)
    """The name of the back end, from `backend:`."""


@dataclass(frozen=True)
class Job:
    """One job as a back end renders it: a stage with everything of the spec filled in."""

    name: str
    """The spec's name, with the stage's where there are stages."""
    stage: str
    """The stage's name; `main` where there are none."""
    recipe: str
    overrides: tuple[str, ...]
    nodes: int
    time_limit_seconds: int | None
    run_dir: str
    """Where its recipe puts checkpoints."""
    after: str | None
    """The name of the job that must have ended well before this one starts."""
    spec: JobSpec

    @property
    def world_size(self) -> int:
        return self.nodes * self.spec.gpus_per_node

    @property
    def arguments(self) -> list[str]:
        """What the node entry point is told."""
        return ['--', 'run.py', self.recipe, *self.overrides]

    @property
    def command(self) -> list[str]:
        """What every node runs."""
        return ['python', '-m', 'diffusion.launch.node', *self.arguments]

    @property
    def shell_command(self) -> str:
        """The command for bash, which hands on every argument as it is."""
        return shlex.join(self.command)


def override_words(overrides: Mapping[str, Any], prefix: str = '') -> tuple[str, ...]:
    """Overrides as `key=value` words, which run.py reads back as the same values; mappings become keys with dots."""
    words: list[str] = []
    for key, value in overrides.items():
        if isinstance(value, Mapping) and value:
            words += override_words(value, f'{prefix}{key}.')
        else:
            words.append(f'{prefix}{key}={dump_inline(value)}')
    return tuple(words)


def seconds_of(duration: str) -> int:
    """Seconds of a time limit such as 90m, 12h or 3d.

    Raises:
        UserError: It is none.
    """
    found = re.fullmatch(r'(\d+)([smhd])', duration)
    if found is None or int(found[1]) == 0:
        raise UserError(f'{duration!r} is not a time; write a number and its unit, such as 90m, 12h or 3d')
    return int(found[1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86400}[found[2]]
