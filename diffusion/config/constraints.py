"""Constraints on the keywords of components, declared in annotations: `resolution: Annotated[int, MultipleOf(8)]`.

`diffusion check` reads them from the source file of a registered component, without importing it. The decorator
`constrained` enforces them when the component is built.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from diffusion.errors import UserError

Function = TypeVar('Function', bound=Callable[..., Any])


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


Constraint = MultipleOf | AtLeast | GreaterThan | Between
CONSTRAINTS: dict[str, type[Constraint]] = {
    'MultipleOf': MultipleOf,
    'AtLeast': AtLeast,
    'GreaterThan': GreaterThan,
    'Between': Between,
}
"""Constraints by their names in annotations."""


def constrained(function: Function) -> Function:
    """Return the function with a check of its arguments: it raises UserError if one violates its constraints.

    Text in the place of a number violates them too.
    """
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    constraints = {name: found for name, hint in hints.items() if (found := declared(hint))}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        for name in constraints.keys() & given.keys():
            if (problem := _text_problem(given[name])) is not None:
                raise UserError(f'{name}: {problem}')
            for constraint in constraints[name]:
                if (problem := constraint.problem(given[name])) is not None:
                    raise UserError(f'{name}: {problem}')
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def declared(annotation: Any) -> tuple[Constraint, ...]:
    """Return the constraints that an evaluated annotation declares."""
    # In Python 3.10, the annotation of an argument whose default is None is Optional[Annotated[...]].
    parts = get_args(annotation) if get_origin(annotation) is Union else (annotation,)
    extras = [extra for part in parts if get_origin(part) is Annotated for extra in get_args(part)[1:]]
    return tuple(extra for extra in extras if isinstance(extra, Constraint))


def _text_problem(value: Any) -> str | None:
    """Return why a value that must be a number or a list of numbers is neither, if it is or has text, or None."""
    values = value if isinstance(value, list | tuple) else [value]
    wrong = next((each for each in values if isinstance(each, str | bytes | bool)), None)
    return None if wrong is None else f'{wrong!r} is not a number; pass a number without quotes, such as 64'


def _numbers(value: Any) -> list[int | float]:
    """Return a number, or the numbers of a list, as a list. Values of other types are type errors, found elsewhere."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, int | float) and not isinstance(each, bool)]
