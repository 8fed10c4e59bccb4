"""Declarations in the annotations of a component's arguments: constraints, and "meanings" such as effects on a resume.

In `depth: Annotated[int, AtLeast(1), ARCHITECTURE]`, `AtLeast(1)` is a constraint and `ARCHITECTURE` is a meaning.
`diffusion check` reads them from the source file, without importing the component; the decorator `constrained` enforces
constraints when the component is built.
"""

import functools
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from typing_extensions import Unpack

from diffusion.config.schema import describe_type, did_you_mean
from diffusion.errors import UserError

Function = TypeVar('Function', bound=Callable[..., Any])


class Effect(Enum):
    """Effect of changing a value before a run resumes."""

    FIXED = 'fixed'
    """The run refuses to resume."""
    APPLIED = 'applied'
    """The new value takes effect."""
    DATA = 'needs allow_data_change'
    """The new value takes effect if the samples and their order stay the same, or with `allow_data_change: true`."""
    BEFORE_AVERAGING = 'applied before averaging starts, then fixed'
    """The new value takes effect if the checkpoint has no averaged weights; otherwise, the run refuses to resume."""


@dataclass(frozen=True)
class OnResume:
    """Effect of changing a value before a run resumes, and the reason, which messages and documentation show.

    If an argument's value is a dataclass, the argument's `OnResume` applies to the fields that declare none. The class
    attribute `on_resume` applies to the whole component and to its arguments that declare no `OnResume`.
    """

    effect: Effect
    reason: str


def fixed_on_resume(reason: str) -> OnResume:
    return OnResume(Effect.FIXED, reason)


def applied_on_resume(reason: str) -> OnResume:
    return OnResume(Effect.APPLIED, reason)


def fixed_once_averaging(reason: str) -> OnResume:
    return OnResume(Effect.BEFORE_AVERAGING, reason)


@dataclass(frozen=True)
class NotArchitecture:
    """Mark a model's argument as one that changes no parameters, FLOPs or activations; others may change them."""


@dataclass(frozen=True)
class WeightsOf:
    """Mark a model's argument as the name of a folder or repository with pretrained weights."""

    parts: tuple[str, ...]
    """Parts of the model that are loaded from the folder or repository, by their names in diffusers pipelines."""


@dataclass(frozen=True)
class Default:
    """Default of an argument that is declared in a TypedDict, whose entries cannot have default values."""

    value: Any


Meaning = OnResume | NotArchitecture | WeightsOf | Default

ARCHITECTURE = fixed_on_resume('the architecture: the names and shapes of the weights follow from it')
"""Default effect of changing an argument of this package's models on resume; it applies unless another is declared."""
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
"""Functions and classes that annotations may call to declare a meaning, as in `NotArchitecture()`, by name."""
NAMED_MEANINGS = {name: each for name, each in globals().items() if isinstance(each, OnResume)}
"""The constants above, such as `ARCHITECTURE`, that annotations may use as a meaning, by name."""


@dataclass(frozen=True)
class MultipleOf:
    """Constraint that a number, or each number of a list, is a positive multiple of `step`."""

    step: int

    def problem(self, value: Any) -> str | None:
        """If a value violates the constraint, return the reason and the nearest valid values; otherwise None."""
        if isinstance(value, list | tuple) and not value:
            return f'is empty; give at least one multiple of {self.step}'
        wrong = next((number for number in _numbers(value) if number < self.step or number % self.step), None)
        if wrong is None:
            return None
        below = int(wrong // self.step) * self.step
        near = [str(multiple) for multiple in (below, below + self.step) if multiple >= self.step] or [str(self.step)]
        return f'{wrong} is not a positive multiple of {self.step}; use {" or ".join(near)}'


@dataclass(frozen=True)
class AtLeast:
    """Constraint that a number, or each number of a list, is at least `least`."""

    least: int

    def problem(self, value: Any) -> str | None:
        wrong = next((number for number in _numbers(value) if number < self.least), None)
        return None if wrong is None else f'{wrong} is less than {self.least}; use {self.least} or more'


@dataclass(frozen=True)
class GreaterThan:
    """Constraint that a number, or each number of a list, is greater than `bound`."""

    bound: float

    def problem(self, value: Any) -> str | None:
        wrong = next((number for number in _numbers(value) if not number > self.bound), None)
        return None if wrong is None else f'{wrong} is not greater than {self.bound:g}; use a larger number'


@dataclass(frozen=True)
class Between:
    """Constraint that a number, or each number of a list, is at least `low` and below `high`."""

    low: float
    high: float

    def problem(self, value: Any) -> str | None:
        wrong = next((number for number in _numbers(value) if not self.low <= number < self.high), None)
        if wrong is None:
            return None
        return f'{wrong} is out of range; use at least {self.low:g} and less than {self.high:g}'


@dataclass(frozen=True)
class Fraction:
    """Constraint that a number, or each number of a list, is greater than 0 and at most 1."""

    def problem(self, value: Any) -> str | None:
        wrong = next((number for number in _numbers(value) if not 0 < number <= 1), None)
        return None if wrong is None else f'{wrong:g} is not a fraction in (0, 1], such as 0.4'


Constraint = MultipleOf | AtLeast | GreaterThan | Between | Fraction
CONSTRAINTS: dict[str, type[Constraint]] = {each.__name__: each for each in get_args(Constraint)}
"""Constraints by their names in annotations."""


def constrained(function: Function) -> Function:
    """Wrap a function with a check of its arguments, by `check_arguments`.

    If the function takes `**keywords: Unpack[...]`, it receives all arguments of that TypedDict; those that the caller
    omits have their defaults.
    """
    signature = full_signature(function)
    own = inspect.signature(function).parameters
    unpacked = {name: each.default for name, each in signature.parameters.items() if name not in own}
    # Evaluate the annotations at the first call: a method's may name the class that contains it, not yet defined here.
    hints = functools.cache(functools.partial(keyword_hints, function))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in signature.parameters), None)
            hint = '' if unknown is None else f'; {did_you_mean(unknown, signature.parameters.keys() - {"self"})}'
            raise TypeError(f'{function.__qualname__}() {error}{hint}') from None
        check_arguments(hints(), given)
        return function(*args, **unpacked | kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]


def check_arguments(hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check arguments against their evaluated annotations: plain types, dataclasses and constraints.

    Raises:
        UserError: An argument has another type, or violates a constraint.
    """
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not _fits(hint, value):
            quotes = isinstance(value, str) and _fits(hint, 1)
            way_out = '; pass a number without quotes, such as 64' if quotes else ''
            raise UserError(f'{name}: {value!r} is not {_describe(hint)}{way_out}')
        for constraint in declared(hint):
            if (problem := constraint.problem(value)) is not None:
                raise UserError(f'{name}: {problem}')


def defaults(**values: Any) -> Callable[[Function], Function]:
    """Return a decorator that sets defaults of arguments in `**keywords: Unpack[...]`; `constrained` passes them on."""

    def decorate(function: Function) -> Function:
        function.keyword_defaults = values  # type: ignore[attr-defined]
        return function

    return decorate


def full_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class, with the arguments of a TypedDict in place of `**keywords`.

    Meanings are removed from the annotations, since they would make the output of `help` hard to read.
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
    """Return the evaluated annotations of a function, with the arguments of a TypedDict in place of `**keywords`."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        unpacked = get_origin(hint) is Unpack
        found |= get_type_hints(*get_args(hint), include_extras=True) if unpacked else {name: hint}
    return found


def declared(annotation: Any) -> tuple[Constraint, ...]:
    return tuple(extra for extra in extras_of(annotation) if isinstance(extra, Constraint))


def plain_type(annotation: Any) -> Any:
    """Return the type in an evaluated annotation, without its constraints and meanings."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _without_meanings(annotation: Any) -> Any:
    if get_origin(annotation) is not Annotated:
        return annotation
    constraints = declared(annotation)
    return Annotated[(plain_type(annotation), *constraints)] if constraints else plain_type(annotation)


def extras_of(annotation: Any) -> list[Any]:
    """Return the constraints and meanings in an evaluated annotation, without the type."""
    # Look inside unions: Python 3.10 wraps the annotation of an argument that defaults to None in Optional[...].
    parts = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    return [extra for part in parts if get_origin(part) is Annotated for extra in get_args(part)[1:]]


def _fits(hint: Any, value: Any) -> bool:
    """Return False if a value does not have the type of an annotation; True if it does or the type is not checked."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(arguments[0], value)
    if origin in (Union, UnionType):
        return any(_fits(choice, value) for choice in arguments)
    if origin is Literal:
        return any(value == choice for choice in arguments if type(value) is type(choice))
    if origin in (list, tuple, Sequence):
        items = value if isinstance(value, list | tuple) else ()  # do not read an iterator
        is_list = isinstance(value, Iterable) and not isinstance(value, bytes)
        kinds = {*arguments} - {...}  # items are checked only if all have the same type
        return is_list and (len(kinds) != 1 or all(_fits(arguments[0], item) for item in items))
    if hint in (int, float):
        # NumPy's and PyTorch's numbers are accepted too; True is not a number.
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    is_checked = hint in (str, bool, type(None)) or (isinstance(hint, type) and is_dataclass(hint))
    return not is_checked or isinstance(value, hint)


def _describe(hint: Any) -> str:
    """Return a type as the end of a sentence, such as `an integer or None`."""
    if get_origin(hint) is Annotated:
        return _describe(plain_type(hint))
    if get_origin(hint) in (Union, UnionType):
        return ' or '.join(_describe(choice) for choice in get_args(hint))
    if get_origin(hint) in (list, tuple, Sequence):
        return f'a list, each {_describe(get_args(hint)[0])}'
    if isinstance(hint, type) and is_dataclass(hint):
        return f'{hint.__name__}(...)'
    return {bool: 'True or False', type(None): 'None'}.get(hint) or describe_type(hint)


def _numbers(value: Any) -> list[int | float]:
    """Return a number, or the numbers of a list, as a list. Skip other values, which the type check reports."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
