"""What a component declares beside the types of its keywords: constraints and meanings.

A constraint or a meaning stands in the keyword's annotation, as in `depth: Annotated[int, AtLeast(1), ARCHITECTURE]`.
`diffusion check` reads them from the source file, without importing the component; the decorator `constrained` enforces
constraints when the component is built.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import Unpack

from diffusion.errors import UserError

Function = TypeVar('Function', bound=Callable[..., Any])


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


@dataclass(frozen=True)
class MultipleOf:
    """Constraint to positive multiples of `step`: one number, or each number of a list."""

    step: int

    def problem(self, value: Any) -> str | None:
        """Return why a value violates the constraint and the nearest value that does not, or None."""
        if isinstance(value, list | tuple) and not value:
            return f'is empty; give at least one multiple of {self.step}'
        wrong = next((number for number in _numbers(value) if number <= 0 or number % self.step), None)
        if wrong is None:
            return None
        below = int(wrong // self.step) * self.step
        near = [str(multiple) for multiple in (below, below + self.step) if multiple > 0] or [str(self.step)]
        return f'{wrong} is not a positive multiple of {self.step}; use {" or ".join(near)}'


@dataclass(frozen=True)
class AtLeast:
    """Constraint to numbers of at least `least`: one number, or each number of a list."""

    least: int

    def problem(self, value: Any) -> str | None:
        """Return why a value violates the constraint and the range to choose from, or None."""
        wrong = next((number for number in _numbers(value) if number < self.least), None)
        return None if wrong is None else f'{wrong} is less than {self.least}; use {self.least} or more'


@dataclass(frozen=True)
class GreaterThan:
    """Constraint to numbers greater than `bound`: one number, or each number of a list."""

    bound: float

    def problem(self, value: Any) -> str | None:
        """Return why a value violates the constraint, or None."""
        wrong = next((number for number in _numbers(value) if not number > self.bound), None)
        return None if wrong is None else f'{wrong} is not greater than {self.bound:g}; use a larger number'


@dataclass(frozen=True)
class Between:
    """Constraint to numbers of at least `low` and below `high`: one number, or each number of a list."""

    low: float
    high: float

    def problem(self, value: Any) -> str | None:
        """Return why a value violates the constraint and the range to choose from, or None."""
        wrong = next((number for number in _numbers(value) if not self.low <= number < self.high), None)
        if wrong is None:
            return None
        return f'{wrong} is out of range; use at least {self.low:g} and less than {self.high:g}'


@dataclass(frozen=True)
class Fraction:
    """Constraint to numbers greater than 0 and at most 1: one number, or each number of a list."""

    def problem(self, value: Any) -> str | None:
        """Return why a value violates the constraint, or None."""
        wrong = next((number for number in _numbers(value) if not 0 < number <= 1), None)
        return None if wrong is None else f'{wrong:g} is not a fraction in (0, 1], such as 0.4'


Constraint = MultipleOf | AtLeast | GreaterThan | Between | Fraction
CONSTRAINTS: dict[str, type[Constraint]] = {
    'MultipleOf': MultipleOf,
    'AtLeast': AtLeast,
    'GreaterThan': GreaterThan,
    'Between': Between,
    'Fraction': Fraction,
}
"""Constraints by their names in annotations."""


def constrained(function: Function) -> Function:
    """Return the function with a check of its arguments: it raises UserError if one violates its constraints.

    Text instead of a number violates them too. If the function takes `**keywords: Unpack[...]`, it gets all keywords of
    that TypedDict, with defaults for those that are not given.
    """
    signature, hints = full_signature(function), keyword_hints(function)
    constraints = {name: found for name, hint in hints.items() if (found := declared(hint))}
    own = inspect.signature(function).parameters
    unpacked = {name: each.default for name, each in signature.parameters.items() if name not in own}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in constraints.keys() & given.keys():
            if (problem := _text_problem(given[name])) is not None:
                raise UserError(f'{name}: {problem}')
            for constraint in constraints[name]:
                if (problem := constraint.problem(given[name])) is not None:
                    raise UserError(f'{name}: {problem}')
        return function(*args, **unpacked | kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def defaults(**values: Any) -> Callable[[Function], Function]:
    """Return a decorator that sets defaults of a function's `**keywords: Unpack[...]`."""

    def decorate(function: Function) -> Function:
        function.keyword_defaults = values  # type: ignore[attr-defined]
        return function

    return decorate


def full_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class, with the keywords of a TypedDict in place of `**keywords`.

    Meanings are removed from the annotations, since `inspect.signature` and `help` would show them at length.
    """
    signature = inspect.signature(function)
    init = function.__init__ if inspect.isclass(function) else function
    values = getattr(init, 'keyword_defaults', {})
    found = []
    for each in signature.parameters.values():
        if get_origin(each.annotation) is not Unpack:
            found.append(each.replace(annotation=_without_meanings(each.annotation)))
            continue
        for name, hint in get_type_hints(*get_args(each.annotation), include_extras=True).items():
            default = next((extra.value for extra in extras_of(hint) if isinstance(extra, Default)), each.empty)
            default = values.get(name, default)
            plain = _without_meanings(hint)
            found.append(inspect.Parameter(name, each.KEYWORD_ONLY, default=default, annotation=plain))
    return signature.replace(parameters=found)


def keyword_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the evaluated annotations of a function, with the keywords of a TypedDict in place of `**keywords`."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        unpacked = get_origin(hint) is Unpack
        found |= get_type_hints(*get_args(hint), include_extras=True) if unpacked else {name: hint}
    return found


def declared(annotation: Any) -> tuple[Constraint, ...]:
    """Return the constraints that an evaluated annotation declares."""
    return tuple(extra for extra in extras_of(annotation) if isinstance(extra, Constraint))


def plain_type(annotation: Any) -> Any:
    """Return an evaluated annotation without the constraints and meanings that it declares."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _without_meanings(annotation: Any) -> Any:
    """Return an evaluated annotation with its constraints, but nothing else that it declares."""
    if get_origin(annotation) is not Annotated:
        return annotation
    constraints = declared(annotation)
    return Annotated[(plain_type(annotation), *constraints)] if constraints else plain_type(annotation)


def extras_of(annotation: Any) -> list[Any]:
    """Return everything that an evaluated annotation declares beside the type: constraints and meanings."""
    # In Python 3.10, the annotation of an argument whose default is None is Optional[Annotated[...]].
    parts = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    return [extra for part in parts if get_origin(part) is Annotated for extra in get_args(part)[1:]]


def _text_problem(value: Any) -> str | None:
    """Return an error message if a value is, or contains, text or a boolean instead of a number, else None."""
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((each for each in values if isinstance(each, str | bytes | bool)), None)
    return None if wrong is None else f'{wrong!r} is not a number; pass a number without quotes, such as 64'


def _numbers(value: Any) -> list[int | float]:
    """Return a number, or the numbers of a list, as a list. Values of other types are type errors, found elsewhere."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
