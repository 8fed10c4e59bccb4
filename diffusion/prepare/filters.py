"""Filters of decoded images by size, aspect, caption length and any numeric column."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.errors import UserError
from diffusion.prepare.caption_cleaning import MAX_LENGTH, MIN_LENGTH

Missing = Literal['keep', 'reject']


@dataclass
class ValueRange:
    """Smallest and largest value that a column may have; None is no limit."""

    min: float | None = None
    max: float | None = None


@dataclass
class Filters:
    """Limits that an image must meet; the defaults keep everything."""

    min_side: int = 1
    """Shorter side in pixels."""
    max_aspect: float | None = None
    """Longer side over shorter."""
    min_caption: int = MIN_LENGTH
    """Shortest caption in characters; shorter ones are left out, and images that have no other."""
    max_caption: int = MAX_LENGTH
    """Longest caption in characters; 10,000 are some ten times what a model's longest prompt holds."""
    columns: dict[str, ValueRange] = field(default_factory=dict)
    """Ranges by the column's name, in capitals or not: `aesthetic_score: {min: 4.5}`."""
    missing: Missing = 'reject'
    """keep or reject images whose value in a column above is missing or not a number."""

    def check(self) -> None:
        """Raise UserError for limits that nothing can pass."""
        if self.min_side < 1:
            raise UserError(f'filters.min_side: {self.min_side} is not positive; it is in pixels')
        if self.max_aspect is not None and self.max_aspect < 1:
            raise UserError(f'filters.max_aspect: {self.max_aspect} is under 1; it is the longer side over the shorter')
        if not 1 <= self.min_caption <= self.max_caption:
            raise UserError(f'filters.min_caption: {self.min_caption} is not from 1 to max_caption, {self.max_caption}')
        for name, limits in self.columns.items():
            if limits.min is None and limits.max is None:
                raise UserError(f'filters.columns.{name}: has no limit; give min, max or both')
            if limits.min is not None and limits.max is not None and limits.max < limits.min:
                raise UserError(f'filters.columns.{name}: max {limits.max} is under min {limits.min}')
        if len({name.casefold() for name in self.columns}) != len(self.columns):
            raise UserError(f'filters.columns: {sorted(self.columns)} names a column twice; capitals do not count')

    def problem(self, width: int, height: int, captions: Sequence[str], metadata: Mapping[str, Any]) -> str | None:
        """Return the reason to leave out an image, such as `aesthetic_score_below_4.5`; None if it is kept."""
        if min(width, height) < self.min_side:
            return 'too_small'
        if self.max_aspect is not None and max(width, height) > self.max_aspect * min(width, height):
            return 'too_elongated'
        if all(len(caption) < self.min_caption for caption in captions):
            return 'caption_too_short'
        if not any(self.min_caption <= len(caption) <= self.max_caption for caption in captions):
            return 'caption_too_long'
        values = {name.casefold(): value for name, value in metadata.items()}
        found = (self._column_problem(name.casefold(), limits, values) for name, limits in self.columns.items())
        return next((problem for problem in found if problem is not None), None)

    def columns_in(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return the columns of `columns` that an image has."""
        names = {name.casefold() for name in metadata}
        return [name for name in self.columns if name.casefold() in names]

    def never_seen(self, seen: Collection[str], available: Collection[str] = ()) -> list[str]:
        """Return a sentence per column of `columns` that no image had; `available` names those that images had."""
        return [
            f'filters.columns.{name}: no image has such a column; they have {sorted(available) or "none"}'
            for name in self.columns
            if name not in seen
        ]

    def _column_problem(self, name: str, limits: ValueRange, values: Mapping[str, Any]) -> str | None:
        number = _number(values.get(name))
        if number is None:
            return f'{name}_missing' if self.missing == 'reject' else None
        if limits.min is not None and number < limits.min:
            return f'{name}_below_{limits.min:g}'
        if limits.max is not None and number > limits.max:
            return f'{name}_above_{limits.max:g}'
        return None


def _number(value: Any) -> float | None:
    """Return a finite number, also one that a CSV wrote as text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
