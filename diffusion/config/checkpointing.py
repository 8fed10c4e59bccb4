"""Dataclasses of a recipe's `checkpointing` section; each field is a YAML key, as in `recipe`."""

from dataclasses import dataclass


@dataclass
class CheckpointingConfig:
    """The `checkpointing` section: the checkpoints of a run."""

    asynchronous: bool = True
    """True lets training continue while a checkpoint is written: a save blocks it only while the state is copied to
    host memory, of which `diffusion plan` shows the size. False blocks it until the checkpoint is complete. Without
    effect for Composer's own checkpoints (`trainer.save_folder`)."""
