"""The `checkpointing` section of a recipe: its dataclasses (fields are YAML keys), and parsing of save intervals."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KeepConfig:
    """The `checkpointing.keep` section: which checkpoints a run keeps. A checkpoint stays if any rule keeps it."""

    last: int = 1
    """The number of newest checkpoints to keep, at least 1."""
    hourly: int = 0
    """The number of hours whose last checkpoint is kept: the most recent hours in which one was saved."""
    daily: int = 0
    """The number of days (UTC) whose last checkpoint is kept: the most recent days on which one was saved."""
    every: str | None = None
    """The interval of permanent checkpoints in batches, such as 10000ba: the first checkpoint at or after each multiple
    is never removed. Null means no permanent checkpoints."""

    @property
    def every_batches(self) -> int | None:
        return None if self.every is None else int(self.every.removesuffix('ba'))


@dataclass(frozen=True)
class TierConfig:
    """A tier of `checkpointing.tiers`: recent checkpoints in the memory or on a local disk of the nodes."""

    save_interval: str = '1m'
    """The interval between saves: a time, such as 30s or 10m; auto, computed from the duration of saves and the failure
    rate; or a number of batches, such as 50ba. A save waits while another one is being written."""
    folder: str | None = None
    """An existing folder on each node, which nodes must not share; checkpoints are saved in its subfolder
    diffusion-UID/RUN_ID. Null means /dev/shm for `memory`; `disk` needs a folder, such as /local/nvme."""
    replicate: bool = False
    """True keeps a copy of each file on another node, so that the run can resume from this tier when a node is lost.
    The other node is in another rack or block if DIFFUSION_FAILURE_DOMAIN or Slurm names the nodes' racks or blocks.
    Copies double the memory and add a transfer over gloo per save."""


@dataclass(frozen=True)
class TiersConfig:
    """The `checkpointing.tiers` section: where nodes keep recent checkpoints, in addition to `runs_dir`."""

    memory: TierConfig | None = None
    """A tier in the nodes' memory, which survives restarts of the run but not a reboot of a node. Null means none."""
    disk: TierConfig | None = None
    """A tier on a local disk of the nodes, which survives a reboot. Null means none."""


@dataclass(frozen=True)
class CheckpointingConfig:
    """The `checkpointing` section: the checkpoints of a run."""

    keep: KeepConfig | None = None
    """The checkpoints that the run keeps, with the keys `last`, `hourly`, `daily` and `every`; all others are removed
    after each save. Null means that all are kept."""
    asynchronous: bool = True
    """True lets training continue while a checkpoint is written: a save blocks training only while the state is copied
    to host memory (`diffusion plan` shows the size of this copy). False blocks training until the checkpoint is
    complete. Composer's own checkpoints (`trainer.save_folder`) are not affected."""
    tiers: TiersConfig | None = None
    """Recent checkpoints on the nodes, with the keys `memory` and `disk`: a run that is restarted on the same nodes
    loses less work. Null means none."""


def keep_rules(checkpointing: CheckpointingConfig, trainer: Mapping[str, Any]) -> KeepConfig | None:
    """Return `trainer.save_num_checkpoints_to_keep` as rules if set, else `checkpointing.keep`; None keeps all."""
    last = trainer.get('save_num_checkpoints_to_keep')
    return checkpointing.keep if last in (None, -1) else KeepConfig(last=last)  # in Composer, -1 keeps all checkpoints


AUTO = 'auto'
"""Save interval that is computed from the measured duration of saves and the run's failure rate."""
_UNITS = {'s': 1.0, 'sec': 1.0, 'm': 60.0, 'min': 60.0, 'h': 3600.0}
_INTERVAL = re.compile(rf'(\d+(?:\.\d+)?)({"|".join(sorted(_UNITS, key=len, reverse=True))})')


def seconds_of(interval: Any) -> float | None:
    """Return a time such as `90s`, `10m` or `2h` in seconds; None for anything else, such as `auto` or `50ba`."""
    found = _INTERVAL.fullmatch(interval) if isinstance(interval, str) else None
    return None if found is None else float(found[1]) * _UNITS[found[2]]


def is_time(interval: Any) -> bool:
    """Return True if a save interval is `auto` or a time above 0, such as `10m`; False if it is in batches (`50ba`)."""
    return interval == AUTO or bool(seconds_of(interval))
