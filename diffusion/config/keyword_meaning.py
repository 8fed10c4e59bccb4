"""Meaning of a component's keyword beside its type: its effect on a resumed run and on the architecture.

A meaning stands in the keyword's annotation, as in `depth: Annotated[int, AtLeast(1), ARCHITECTURE]`. Constraints on
values are in constraints.py. `diffusion check` reads both from the source file, without importing the component.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Effect(Enum):
    """Effect of a changed value on a run that resumes."""

    FIXED = 'fixed'
    """The run is refused."""
    APPLIED = 'applied'
    """The new value takes effect."""
    DATA = 'needs allow_data_change'
    """The new value takes effect if the samples and their order stay the same, or with `allow_data_change: true`."""
    BEFORE_AVERAGING = 'applied before averaging starts, then fixed'
    """The new value takes effect, unless the checkpoint has averaged weights."""


@dataclass(frozen=True)
class OnResume:
    """Effect of a changed value on a run that resumes, and the reason, which messages and documentation show.

    A dataclass field without one has the effect of the keyword that takes the dataclass. The class attribute
    `on_resume` declares the effect for the whole component and for its keywords without one.
    """

    effect: Effect
    reason: str


def fixed_on_resume(reason: str) -> OnResume:
    """Return the meaning of a keyword that cannot change when a run resumes."""
    return OnResume(Effect.FIXED, reason)


def applied_on_resume(reason: str) -> OnResume:
    """Return the meaning of a keyword whose new value takes effect when a run resumes."""
    return OnResume(Effect.APPLIED, reason)


def fixed_once_averaging(reason: str) -> OnResume:
    """Return the meaning of a keyword that can change only before the averaging of weights has started."""
    return OnResume(Effect.BEFORE_AVERAGING, reason)


@dataclass(frozen=True)
class NotArchitecture:
    """Mark a model's keyword that changes no parameters, FLOPs or activations; all other keywords are assumed to."""


@dataclass(frozen=True)
class WeightsOf:
    """Mark a model's keyword that names a folder or repository of pretrained weights."""

    parts: tuple[str, ...]
    """Parts of the model that are loaded from it, by their names in pipelines of diffusers."""


@dataclass(frozen=True)
class Default:
    """Default of a keyword in a TypedDict, whose entries cannot have values."""

    value: Any


Meaning = OnResume | NotArchitecture | WeightsOf | Default

ARCHITECTURE = fixed_on_resume('the architecture: the names and shapes of the weights follow from it')
"""Meaning on resume of a keyword of this package's models that declares none."""
FROZEN_PARTS = fixed_on_resume('the frozen parts: the weights were trained on their latents and embeddings')
OBJECTIVE = fixed_on_resume('the training objective: the weights predict its target under its noise schedule')
CONDITIONING = fixed_on_resume('the conditioning of the denoiser on captions')
LOSS = applied_on_resume('the loss after the resume')
STATELESS = applied_on_resume('has no state')
UPDATE = applied_on_resume('replaces the value that the checkpoint holds; the moments are kept')
SAME_UPDATE = applied_on_resume('another implementation of the same update')
OPTIMIZER_STATE = fixed_on_resume("the optimizer's state depends on it")

MEANINGS = {
    each.__name__: each
    for each in (fixed_on_resume, applied_on_resume, fixed_once_averaging, NotArchitecture, WeightsOf, Default)
}
"""Functions and classes of meanings by their names in annotations."""
NAMED_MEANINGS = {name: each for name, each in globals().items() if isinstance(each, OnResume)}
"""Meanings of several keywords by their names in annotations."""
