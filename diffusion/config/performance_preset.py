"""Which parts of `speed` are on: as the recipe says, or its preset, where a part can be had."""

from dataclasses import fields, replace

from diffusion.config.recipe import SpeedConfig

PARTS = tuple(field.name for field in fields(SpeedConfig) if field.name != 'preset')
"""Names of the parts."""


def effective_parts(settings: SpeedConfig, *, on_gpu: bool, strategy: str = 'ddp') -> SpeedConfig:
    """The settings with every part decided: what the preset says, where the recipe says nothing."""
    preset = on_gpu and settings.preset == 'full'
    # GroupNorm under FSDP1 does not compile since torch 2.6 (pytorch#152185).
    impossible = {'compile': strategy == 'fsdp1', 'reduce_once': strategy != 'fsdp2', 'copy_ahead': not on_gpu}
    decided = {part: getattr(settings, part) for part in PARTS}
    decided = {part: preset if said is None else said for part, said in decided.items()}
    return replace(settings, **{part: on and not impossible.get(part, False) for part, on in decided.items()})
