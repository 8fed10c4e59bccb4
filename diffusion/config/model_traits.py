"""Traits of a family of models, declared by decorators of its builders, so that checks need not import the models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Builder = TypeVar('Builder', bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelTraits:
    """Traits of a model; a model that declares none, such as one of your own, has the defaults."""

    u_net: bool = False
    """True if the denoiser is a U-Net: it has no image tokens, and the default objective is diffusion."""
    image_sizes: bool = False
    """True if the denoiser is conditioned on the sizes of images: the dataset then returns them."""
    single_file: bool = True
    """False if no program reads the model from a single file."""
    pipelines: tuple[str, ...] = ()
    """Pipelines of diffusers that the model is exported to."""
    loads_lora: bool = True
    """False if diffusers loads no LoRA into these pipelines."""


def traits(**values: Any) -> Callable[[Builder], Builder]:
    """Return a decorator for model builders that declares traits, which are fields of `ModelTraits`."""
    declared = ModelTraits(**values)

    def decorate(builder: Builder) -> Builder:
        builder.traits = declared  # type: ignore[attr-defined]
        return builder

    return decorate
