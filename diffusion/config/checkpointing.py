"""Dataclasses of a recipe's `checkpointing` section; each field is a YAML key, as in `recipe`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class KeepConfig:
    """The `checkpointing.keep` section: the checkpoints that a run keeps. One that any rule keeps stays."""

    last: int = 1
    """The number of newest checkpoints to keep, at least 1."""
    hourly: int = 0
    """The number of hours, newest first, of which the last checkpoint is kept; hours without a checkpoint do not
    count."""
    daily: int = 0
    """The number of days (UTC), newest first, of which the last checkpoint is kept; days without a checkpoint do not
    count."""
    every: str | None = None
    """The number of batches, such as 10000ba, at each multiple of which a checkpoint is kept for good: the first one
    saved there or later. Null keeps none for good."""

    @property
    def every_batches(self) -> int | None:
        """`every` as a number of batches; None if it is null."""
        return None if self.every is None else int(self.every.removesuffix('ba'))


@dataclass
class CheckpointingConfig:
    """The `checkpointing` section: the checkpoints of a run."""

    keep: KeepConfig | None = None
    """The checkpoints that the run keeps, with the keys `last`, `hourly`, `daily` and `every`; the others are removed
    after each save. Null keeps all."""
    asynchronous: bool = True
    """True lets training continue while a checkpoint is written: a save blocks it only while the state is copied to
    host memory, of which `diffusion plan` shows the size. False blocks it until the checkpoint is complete. Without
    effect for Composer's own checkpoints (`trainer.save_folder`)."""


def keep_rules(checkpointing: CheckpointingConfig, trainer: Mapping[str, Any]) -> KeepConfig | None:
    """Return which checkpoints a run keeps, by its recipe's sections `checkpointing` and `trainer`; None for all."""
    # Composer's keyword, which is -1 for all.
    last = trainer.get('save_num_checkpoints_to_keep', -1)
    return KeepConfig(last=last) if last > 0 else checkpointing.keep
