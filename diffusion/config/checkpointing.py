"""The `checkpointing` section of a recipe: its dataclasses, whose fields are YAML keys, and the intervals of saves."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class KeepConfig:
    """The `checkpointing.keep` section: the checkpoints that a run keeps. A checkpoint stays if any rule keeps it."""

    last: int = 1
    """The number of newest checkpoints to keep, at least 1."""
    hourly: int = 0
    """The number of hours, newest first, whose last checkpoint is kept; hours without a checkpoint do not count."""
    daily: int = 0
    """The number of days (UTC), newest first, whose last checkpoint is kept; days without a checkpoint do not count."""
    every: str | None = None
    """The interval in batches, such as 10000ba: at each multiple, the first checkpoint saved there or later is kept for
    good. Null keeps none for good."""

    @property
    def every_batches(self) -> int | None:
        """`every` as a number of batches; None if it is null."""
        return None if self.every is None else int(self.every.removesuffix('ba'))


@dataclass
class TierConfig:
    """A tier of `checkpointing.tiers`: recent checkpoints on the nodes themselves."""

    save_interval: str = '1m'
    """The time between two saves, such as 30s or 10m; or auto; or a number of batches, such as 50ba. A save waits while
    another one is being written."""
    folder: str | None = None
    """An existing folder on each node, which nodes must not share; the checkpoints are in its diffusion-UID/RUN_ID.
    Null is /dev/shm for `memory`; `disk` needs one, such as /local/nvme."""
    replicate: bool = False
    """True keeps a copy of each file on another node, in another rack or block if DIFFUSION_FAILURE_DOMAIN or Slurm
    names them: the run then resumes from this tier when a node is lost, at the price of twice the memory and of a
    transfer over gloo per save."""


@dataclass
class TiersConfig:
    """The `checkpointing.tiers` section: where nodes keep recent checkpoints, in addition to `runs_dir`."""

    memory: TierConfig | None = None
    """A tier in the memory of the nodes, which outlives the processes of a run but not its nodes; null for none."""
    disk: TierConfig | None = None
    """A tier on a local disk of the nodes, which outlives a reboot; null for none."""


@dataclass
class CheckpointingConfig:
    """The `checkpointing` section: the checkpoints of a run."""

    keep: KeepConfig | None = None
    """The checkpoints that the run keeps, with the keys `last`, `hourly`, `daily` and `every`; the others are removed
    after each save. Null keeps all."""
    asynchronous: bool = True
    """True lets training continue while a checkpoint is written: a save blocks it only while the state is copied to
    host memory; `diffusion plan` shows its size. False blocks it until the checkpoint is complete. It has no effect on
    Composer's own checkpoints (`trainer.save_folder`)."""
    tiers: TiersConfig | None = None
    """Recent checkpoints on the nodes, with the keys `memory` and `disk`: a run that is restarted on its nodes loses
    less work. Null keeps none."""


def keep_rules(checkpointing: CheckpointingConfig, trainer: Mapping[str, Any]) -> KeepConfig | None:
    """Return the checkpoints that a run keeps, from its sections `checkpointing` and `trainer`; None keeps all."""
    # In Composer, -1 keeps all checkpoints.
    last = trainer.get('save_num_checkpoints_to_keep', -1)
    return KeepConfig(last=last) if last > 0 else checkpointing.keep


AUTO = 'auto'
"""Interval that is computed from the measured duration of saves and from the failures of the run."""
_UNITS = {'s': 1.0, 'sec': 1.0, 'm': 60.0, 'min': 60.0, 'h': 3600.0}
_INTERVAL = re.compile(rf'(\d+(?:\.\d+)?)({"|".join(sorted(_UNITS, key=len, reverse=True))})')


def seconds_of(interval: Any) -> float | None:
    """Return the seconds of an interval such as `90s`, `10m` or `2h`; None for `auto` and for Composer's durations."""
    found = _INTERVAL.fullmatch(interval) if isinstance(interval, str) else None
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def is_time(interval: Any) -> bool:
    """Return True for `auto` and for times longer than 0."""
    return interval == AUTO or bool(seconds_of(interval))
