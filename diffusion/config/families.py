"""Families of models: what checks, plans, exports and documentation need to know of a model, without importing torch.

A family is a folder in `diffusion/models/families/`, or a package of your own that calls `diffusion.register_family`.
Its `__init__.py` declares a `Family`, which names its other files by address; they are imported on first use.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion.config.signatures import source_file

PACKAGE = 'diffusion.models.families'


def _no_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Pipeline:
    """Class of diffusers' pipelines that a family's models are exported to."""

    optional_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Parts that a pipeline lacks, by the keyword of the model whose value is then false; `from_pretrained` requires
    that each of them is given as None."""
    call: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_arguments
    """Arguments with which the pipeline generates the images of `task: generate`, given the model's keywords."""
    loads_lora: bool = True
    """False if diffusers loads no LoRA into the pipeline."""
    takes_other_schedulers: bool = True
    """False if the pipeline works only with the class of noise scheduler that it was exported with."""


@dataclass(frozen=True)
class Miniature:
    """Model of a family that trains on a CPU."""

    model: str
    """Its `model.name` in recipes."""
    smallest: Mapping[str, Any]
    """Keywords for the smallest one, with which the recipes of the family are tested."""


@dataclass(frozen=True)
class Family:
    """Declaration of a family. The defaults are what is assumed of a model without a family."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the builders, `module:function`, by `model.name` in recipes."""
    denoiser_class: str = ''
    """Name of the denoiser's class; denoisers of subclasses belong to the family too."""
    adapter: str = ''
    """Address of the subclass of `diffusion.models.families.adapter.DenoiserAdapter`."""
    u_net: bool = False
    """True if the denoiser is a U-Net: it has no image tokens, and the default objective is diffusion."""
    image_sizes: bool = False
    """True if the denoiser is conditioned on the sizes of images: the dataset then returns them."""
    single_file: bool = True
    """False if no program reads the model from a single file."""
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    """Pipelines of diffusers that the models are exported to, by the name of the class."""
    licenses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Front matter of model cards for the licenses of published weights and frozen parts, by repository on the Hub."""
    miniature: Miniature | None = None
    """The family's miniature; its recipes are tested with it."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Published number of the denoiser's parameters, on `latents` and on `pixels`."""
    sides: tuple[int, ...] = ()
    """Sides of images in pixels for which the package has counts of FLOPs and memory."""
    side_step: int = 8
    """Divisor of the sides of images, in pixels."""

    @property
    def loads_lora(self) -> bool:
        """True if diffusers loads a LoRA into one of the pipelines."""
        return any(pipeline.loads_lora for pipeline in self.pipelines.values())

    def load_adapter(self) -> Any:
        """Import the adapter's class, and return an object of it."""
        module, name = self.adapter.split(':')
        return getattr(importlib.import_module(module), name)()


_registered: list[Family] = []


def add(family: Family) -> None:
    """Add a family of your own, which takes precedence over all others; `registry.register_family` calls this."""
    if family not in _registered:
        _registered.insert(0, family)


def families() -> list[Family]:
    """Return all families: those of your own, then those of this package in the order of their names."""
    return [*_registered, *built_in()]


@functools.cache
def built_in() -> tuple[Family, ...]:
    """Return the families that are folders of this package."""
    folder = source_file(PACKAGE).parent
    names = sorted(each.name for each in pkgutil.iter_modules([str(folder)]) if each.ispkg)
    return tuple(importlib.import_module(f'{PACKAGE}.{name}').FAMILY for name in names)


def pipeline_of(name: str) -> Pipeline:
    """Return the pipeline of diffusers with this class name, or `Pipeline()` if no family is exported to it."""
    return next((each.pipelines[name] for each in families() if name in each.pipelines), Pipeline())


def family_of_model(model: str) -> Family:
    """Return the family of the model with this name in recipes; `Family()` if no family has it."""
    return next((family for family in families() if model in family.models), Family())
