"""Resolve the `speed` section of a recipe: which settings are on for a device type and a parallelism strategy."""

from dataclasses import fields, replace

from diffusion.config.recipe import SpeedConfig

PARTS = tuple(field.name for field in fields(SpeedConfig) if field.name not in ('preset', 'encode_batch_size'))
"""Names of the `speed` settings that can be on or off."""

ON_CPU = ('fused_optimizer',)
"""Names of the settings that the preset turns on for a CPU too."""


def parts_without_effect(settings: SpeedConfig, effective: SpeedConfig) -> list[str]:
    """Return the settings that a recipe turns on but that have no effect here, since they need a GPU."""
    return [part for part in PARTS if getattr(settings, part) is True and not getattr(effective, part)]


def effective_parts(settings: SpeedConfig, *, on_gpu: bool, strategy: str = 'ddp') -> SpeedConfig:
    """Return `speed` settings with nulls replaced by the preset's values and unsupported settings turned off."""
    full = settings.preset == 'full'
    # Composer's DDP already reduces once per batch, so reduce_once changes only FSDP2. copy_ahead overlaps host-to-GPU
    # copies, which a CPU does not have.
    impossible = {'reduce_once': strategy != 'fsdp2', 'copy_ahead': not on_gpu}
    # CUDA graphs need weights at fixed addresses, but FSDP gathers them at other addresses each time.
    impossible['cuda_graphs'] = not on_gpu or strategy != 'ddp'
    decided = {part: getattr(settings, part) for part in PARTS}
    decided = {
        part: full and (on_gpu or part in ON_CPU) if choice is None else choice for part, choice in decided.items()
    }
    return replace(settings, **{part: on and not impossible.get(part, False) for part, on in decided.items()})
