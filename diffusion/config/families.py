"""Model families: the properties of models that checks, plans, exports and docs use, without importing torch.

A family is a folder in `diffusion/models/families/`, or a package of your own that calls `diffusion.register_family`.
Its `__init__.py` declares a `Family`, which gives the addresses (`module:name`) of its other code; these modules are
imported on first use.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusion.config.signatures import ADDRESS, source_file
from diffusion.errors import UserError

PACKAGE = 'diffusion.models.families'


@dataclass(frozen=True)
class Pipeline:
    """A diffusers pipeline class to which a family's models are exported."""

    optional_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Optional parts of the pipeline by the model's argument: if it is false, an exported pipeline lacks these parts,
    and `from_pretrained` requires that they are passed as None."""
    call: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda keywords: {}
    """Function that maps the model's arguments to arguments of the pipeline's call that reproduce `task: generate`."""
    loads_lora: bool = True
    """False if diffusers cannot load a LoRA into the pipeline."""
    module: str = ''
    """Module of this package that defines the class; exports contain a copy of it. Empty for a class of diffusers."""
    part_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules of this package that define classes of pipeline parts, by part; exports contain copies of them too."""
    takes_guidance_rescale: bool = False
    """True if the pipeline's call takes `guidance_rescale`, which is a setting of `task: generate`."""
    takes_other_schedulers: bool = True
    """False if the pipeline works only with the noise scheduler class that it was exported with."""


@dataclass(frozen=True)
class Miniature:
    """A small model of a family that can be trained on a CPU."""

    model: str
    """The miniature's `model.name` in recipes."""
    smallest: Mapping[str, Any]
    """Model arguments that make the miniature as small as possible; tests run the family's recipes with them."""


@dataclass(frozen=True)
class Family:
    """Declaration of a family. The defaults apply to models without a family."""

    models: Mapping[str, str] = field(default_factory=dict)
    """Addresses (`module:function`) of the functions that build the models, by `model.name` in recipes."""
    denoiser_class: str = ''
    """Name of the denoiser's class; its subclasses belong to the family too."""
    adapter: str = ''
    """Address of the family's subclass of `diffusion.models.families.adapter.DenoiserAdapter`."""
    u_net: bool = False
    """True if the denoiser is a U-Net: it has no image tokens, and the default objective is diffusion."""
    image_sizes: bool = False
    """True if the denoiser is conditioned on image sizes, which the dataset then returns."""
    single_file: bool = True
    """False if no program can read the model from a single file, so that it is not exported to one."""
    layouts: tuple[str, ...] = ()
    """Names of layouts for `diffusion export --layout`, which writes a `.pt` file for the models' original code."""
    pipelines: Mapping[str, Pipeline] = field(default_factory=dict)
    """The diffusers pipelines to which the models are exported, by class name."""
    licenses: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """License fields of model cards, by the Hub repository of the published weights or frozen parts."""
    miniature: Miniature | None = None
    """The family's miniature; tests run the family's recipes with it."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Published number of parameters of the denoiser, by what it denoises: `latents` or `pixels`."""
    sides: tuple[int, ...] = ()
    """Image sides in pixels for which the package includes precomputed FLOPs and memory."""
    mirrored_depth: int = 0
    """Number of blocks n of models with long skip connections from block i to block n - 1 - i, so that a token route
    must skip both. A model's argument `depth` takes precedence. 0 for families without such connections."""
    side_step: int = 8
    """Number of pixels by which image sides must be divisible."""

    def __post_init__(self) -> None:
        for where, address in {**({'adapter': self.adapter} if self.adapter else {}), **self.models}.items():
            if not isinstance(address, str) or not ADDRESS.fullmatch(address):
                raise UserError(f"Family: {where}: {address!r} is not an address; write 'module:name'")

    @property
    def loads_lora(self) -> bool:
        return any(pipeline.loads_lora for pipeline in self.pipelines.values())

    def load_adapter(self) -> Any:
        module, name = self.adapter.split(':')
        return getattr(importlib.import_module(module), name)()


_registered: list[Family] = []


def add(family: Family) -> None:
    """Add a family of your own, which takes precedence over all others; `registry.register_family` calls this."""
    if family not in _registered:
        _registered.insert(0, family)


def families() -> list[Family]:
    """Return all families: your own, then those of this package in alphabetical order."""
    return [*_registered, *built_in()]


@functools.cache
def built_in() -> tuple[Family, ...]:
    """Return the families that are folders of this package."""
    folder = source_file(PACKAGE).parent
    names = sorted(each.name for each in pkgutil.iter_modules([str(folder)]) if each.ispkg)
    return tuple(importlib.import_module(f'{PACKAGE}.{name}').FAMILY for name in names)


def pipeline_of(name: str) -> Pipeline:
    """Return the `Pipeline` of the diffusers class with this name, or `Pipeline()` if no family is exported to it."""
    return next((each.pipelines[name] for each in families() if name in each.pipelines), Pipeline())


def family_of_model(model: str) -> Family:
    """Return the family of the model with this name in recipes, or `Family()` if the model has no family."""
    return next((family for family in families() if model in family.models), Family())
