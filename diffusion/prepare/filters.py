"""Filters for decoded images: size, aspect ratio, caption length and numeric metadata columns."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.errors import UserError
from diffusion.prepare.caption_cleaning import MAX_LENGTH, MIN_LENGTH

Missing = Literal['keep', 'reject']


@dataclass
class ValueRange:
    """Inclusive range of allowed values of a metadata column."""

    min: float | None = None
    """Smallest allowed value; null for no limit."""
    max: float | None = None
    """Largest allowed value; null for no limit."""


@dataclass
class Filters:
    """Limits on images and captions; an image outside of them is rejected."""

    min_side: int = 1
    """Minimum length of the shorter side in pixels."""
    max_aspect: float | None = None
    """Maximum ratio of the longer to the shorter side; null for no limit."""
    min_caption: int = MIN_LENGTH
    """Minimum caption length in characters; shorter captions are dropped, and images left without one are rejected."""
    max_caption: int = MAX_LENGTH
    """Maximum caption length in characters, like `min_caption`; 10,000 is about ten times the longest model prompt."""
    columns: dict[str, ValueRange] = field(default_factory=dict)
    """Ranges by column name, ignoring case, such as `aesthetic_score: {min: 4.5}`."""
    missing: Missing = 'reject'
    """keep or reject images without a numeric value in a column of `columns`."""

    def check(self) -> None:
        """Check that the limits themselves are valid, before images are read.

        Raises:
            UserError: A limit is invalid, or nothing can pass it.
        """
        if self.min_side < 1:
            raise UserError(f'filters.min_side: {self.min_side} is not positive; give pixels')
        if self.max_aspect is not None and self.max_aspect < 1:
            raise UserError(
                f'filters.max_aspect: {self.max_aspect} is below 1; it is the ratio of the longer to the shorter side'
            )
        if not 1 <= self.min_caption <= self.max_caption:
            raise UserError(
                f'filters.min_caption: {self.min_caption} is not between 1 and max_caption={self.max_caption}'
            )
        for name, limits in self.columns.items():
            if limits.min is None and limits.max is None:
                raise UserError(f'filters.columns.{name}: has no limit; give min, max or both')
            if limits.min is not None and limits.max is not None and limits.max < limits.min:
                raise UserError(f'filters.columns.{name}: max {limits.max} is below min {limits.min}')
        if len({name.casefold() for name in self.columns}) != len(self.columns):
            raise UserError(
                f'filters.columns: {sorted(self.columns)} contains a column twice; names are compared ignoring case'
            )

    def image_problem(self, width: int, height: int, captions: Sequence[str]) -> str | None:
        """Return the reason to reject an image by its size or its captions, such as `too_small`, or None to keep it."""
        if min(width, height) < self.min_side:
            return 'too_small'
        if self.max_aspect is not None and max(width, height) > self.max_aspect * min(width, height):
            return 'too_elongated'
        if all(len(caption) < self.min_caption for caption in captions):
            return 'caption_too_short'
        if not any(self.min_caption <= len(caption) <= self.max_caption for caption in captions):
            return 'caption_too_long'
        return None

    def column_problem(self, metadata: Mapping[str, Any]) -> str | None:
        """Return the reason to reject an image by its columns, such as `aesthetic_score_below_4.5`, or None."""
        values = {name.casefold(): value for name, value in metadata.items()}
        found = (self._column_problem(name.casefold(), limits, values) for name, limits in self.columns.items())
        return next((problem for problem in found if problem is not None), None)

    def columns_in(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return the names of the filtered columns that exist in `metadata`, ignoring case."""
        names = {name.casefold() for name in metadata}
        return [name for name in self.columns if name.casefold() in names]

    def unknown_column_notes(self, seen: Collection[str], available: Collection[str] = ()) -> list[str]:
        """Return a message for the report for each filtered column that no image has, such as a misspelled one.

        Args:
            seen: Names in `columns` that at least one image has.
            available: All metadata columns of the images, for the message.
        """
        return [
            f'filters.columns.{name}: no image has this column; available columns: {sorted(available) or "none"}'
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
    """Return a value as a finite float, or None; text is parsed, since CSV columns are text."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
