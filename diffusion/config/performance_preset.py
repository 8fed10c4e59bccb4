"""Resolve the `speed` section of a recipe: which parts are on, on this machine and under this parallelism."""

from dataclasses import fields, replace

from diffusion.config.recipe import SpeedConfig

PARTS = tuple(field.name for field in fields(SpeedConfig) if field.name != 'preset')
"""Names of the parts."""


def effective_parts(settings: SpeedConfig, *, on_gpu: bool, strategy: str = 'ddp') -> SpeedConfig:
    """Return the settings with every null part replaced by its preset, and parts that cannot work here turned off."""
    preset = on_gpu and settings.preset == 'full'
    # GroupNorm under FSDP1 does not compile since torch 2.6 (pytorch#152185).
    impossible = {'compile': strategy == 'fsdp1', 'reduce_once': strategy != 'fsdp2', 'copy_ahead': not on_gpu}
    decided = {part: getattr(settings, part) for part in PARTS}
    decided = {part: preset if said is None else said for part, said in decided.items()}
    return replace(settings, **{part: on and not impossible.get(part, False) for part, on in decided.items()})
