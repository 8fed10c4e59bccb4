"""Training recipes for text-to-image latent diffusion models, on MosaicML Composer and StreamingDataset."""

import importlib
from typing import TYPE_CHECKING, Any

from diffusion.runs.openmp_spin import shorten_spin

if TYPE_CHECKING:
    from diffusion.algorithms.ema import EMA
    from diffusion.checkpointing.checkpointer import Checkpointer
    from diffusion.config.families import Family
    from diffusion.config.load import Recipe, RecipeError, load
    from diffusion.config.registry import register, register_family
    from diffusion.data.streams import BucketedDataset
    from diffusion.models.families.i1.builder import i1, tiny_i1
    from diffusion.models.families.mmdit.builder import mmdit, tiny_mmdit
    from diffusion.models.families.prx.builder import prx, tiny_prx
    from diffusion.models.families.sd2.builder import sd2, tiny
    from diffusion.models.families.sdxl.builder import sdxl, tiny_sdxl
    from diffusion.models.latent_diffusion import LatentDiffusion
    from diffusion.models.objective import Objective
    from diffusion.training.components import build_loader, build_model

__version__ = '0.1.0'

__all__ = [
    'EMA',
    'BucketedDataset',
    'Checkpointer',
    'Family',
    'LatentDiffusion',
    'Objective',
    'Recipe',
    'RecipeError',
    'build_loader',
    'build_model',
    'i1',
    'load',
    'mmdit',
    'prx',
    'register',
    'register_family',
    'sd2',
    'sdxl',
    'tiny',
    'tiny_i1',
    'tiny_mmdit',
    'tiny_prx',
    'tiny_sdxl',
]

# Set GOMP_SPINCOUNT here: every program of this package imports this file before torch, and child processes inherit
# the variable.
shorten_spin()

# Names are imported on first use (PEP 562): importing Composer, Streaming and diffusers takes 18 to 32 s on a
# slow core, and commands such as `diffusion check` do not need them.
_MODULES = {
    'BucketedDataset': 'diffusion.data.streams',
    'EMA': 'diffusion.algorithms.ema',
    'Checkpointer': 'diffusion.checkpointing.checkpointer',
    'Family': 'diffusion.config.families',
    'LatentDiffusion': 'diffusion.models.latent_diffusion',
    'Objective': 'diffusion.models.objective',
    'Recipe': 'diffusion.config.load',
    'RecipeError': 'diffusion.config.load',
    'build_loader': 'diffusion.training.components',
    'build_model': 'diffusion.training.components',
    'i1': 'diffusion.models.families.i1.builder',
    'load': 'diffusion.config.load',
    'mmdit': 'diffusion.models.families.mmdit.builder',
    'prx': 'diffusion.models.families.prx.builder',
    'register': 'diffusion.config.registry',
    'register_family': 'diffusion.config.registry',
    'sd2': 'diffusion.models.families.sd2.builder',
    'sdxl': 'diffusion.models.families.sdxl.builder',
    'tiny': 'diffusion.models.families.sd2.builder',
    'tiny_i1': 'diffusion.models.families.i1.builder',
    'tiny_mmdit': 'diffusion.models.families.mmdit.builder',
    'tiny_prx': 'diffusion.models.families.prx.builder',
    'tiny_sdxl': 'diffusion.models.families.sdxl.builder',
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
