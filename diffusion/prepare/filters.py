"""Clean captions; filter images by size, aspect ratio, caption length and numeric metadata columns."""

import math
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from diffusion.errors import UserError
from diffusion.prepare.source import Unfit
from diffusion.storage.text_tables import is_misread

MIN_LENGTH = 1
"""Default minimum length of a caption in characters."""
MAX_LENGTH = 10_000
"""Default maximum length of a caption in characters; longer texts are web pages rather than captions."""
_SURROGATES = re.compile('[\ud800-\udfff]')
_REMOVED = re.compile(
    '[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f'  # control characters except whitespace
    '\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]'  # zero width, text direction
)
_JOINERS = '\u200c\u200d'
"""Zero-width characters to keep, because Persian spelling and composed emoji need them."""


def usable_captions(
    raw: Sequence[Any], *, min_length: int = MIN_LENGTH, max_length: int = MAX_LENGTH
) -> dict[str, int]:
    """Map an image's distinct cleaned captions, in order, to the index of the first raw caption that yields each.

    Raises:
        Unfit: No caption is usable: no_caption, caption_not_text, caption_not_utf8, caption_too_short or
            caption_too_long; for several captions, the first reason other than no_caption.
    """
    kept: dict[str, int] = {}
    rejections: list[Unfit] = []
    for number, caption in enumerate(raw):
        try:
            kept.setdefault(_clean_caption(caption, min_length, max_length), number)
        except Unfit as reason:
            rejections.append(reason)
    if not kept:
        specific = (reason for reason in rejections if str(reason) != 'no_caption')
        raise next(specific, Unfit('no_caption', 'the image has no caption'))
    return kept


def clean_text(text: str) -> str:
    """Normalize text: NFC, one line, single spaces, no control or zero-width characters except `_JOINERS`."""
    text = _REMOVED.sub('', _SURROGATES.sub('\ufffd', text))
    return ' '.join(unicodedata.normalize('NFC', text).split())


def _clean_caption(caption: Any, min_length: int, max_length: int) -> str:
    if caption is None or (isinstance(caption, float) and math.isnan(caption)):
        raise Unfit('no_caption', 'the image has no caption')
    if not isinstance(caption, str):
        raise Unfit('caption_not_text', f'the caption has type {type(caption).__name__}, not str')
    if is_misread(caption):
        raise Unfit('caption_not_utf8', f'the caption {caption[:40]!r} was not written as UTF-8')
    # Check the raw length first: NFC normalization of 100 kB of combining accents takes minutes in Python. Cleaning
    # shortens texts (whitespace, combining characters), so compare with a multiple of the maximum.
    too_long = len(caption) > 4 * max_length
    text = '' if too_long else clean_text(caption)
    if too_long or len(text) > max_length:
        raise Unfit(
            'caption_too_long',
            f'the caption has {len(text) or len(caption)} characters, above the maximum of {max_length}',
        )
    if not text.strip(_JOINERS):
        raise Unfit('no_caption', 'the caption is empty')
    if len(text) < min_length:
        raise Unfit('caption_too_short', f'the caption has {len(text)} characters, below the minimum of {min_length}')
    return text


@dataclass(frozen=True)
class ValueRange:
    """Range of allowed values (inclusive) for a metadata column."""

    min: float | None = None
    """Smallest allowed value; null means no limit."""
    max: float | None = None
    """Largest allowed value; null means no limit."""


@dataclass(frozen=True)
class Filters:
    """Limits for images and captions; images outside these limits are rejected."""

    min_side: int = 1
    """Minimum length of the shorter side in pixels."""
    max_aspect: float | None = None
    """Maximum ratio of the longer to the shorter side; null means no limit."""
    min_caption: int = MIN_LENGTH
    """Minimum caption length in characters; shorter captions are dropped, and images without any left are rejected."""
    max_caption: int = MAX_LENGTH
    """Maximum caption length in characters; longer captions are dropped. Models accept about 1,000 at most."""
    columns: dict[str, ValueRange] = field(default_factory=dict)
    """Ranges by column name, ignoring case, such as `aesthetic_score: {min: 4.5}`; yes counts as 1, and no as 0."""
    missing: Literal['keep', 'reject'] = 'reject'
    """Keep or reject images without a numeric value for a column in `columns`."""

    def check(self) -> None:
        """Raise UserError if a limit is invalid or impossible to satisfy."""
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

    def size_problem(self, width: int, height: int) -> str | None:
        """Return the reason to reject an image for its size, such as `too_small`, or None to keep it."""
        if min(width, height) < self.min_side:
            return 'too_small'
        if self.max_aspect is not None and max(width, height) > self.max_aspect * min(width, height):
            return 'too_elongated'
        return None

    def column_problem(self, metadata: Mapping[str, Any]) -> str | None:
        """Return the reason to reject an image for its columns, such as `aesthetic_score_below_4.5`, or None."""
        values = {name.casefold(): value for name, value in metadata.items()}
        for name, limits in ((name.casefold(), limits) for name, limits in self.columns.items()):
            number = number_in(values.get(name))
            if number is None:
                if self.missing == 'reject':
                    return f'{name}_missing'
            elif limits.min is not None and number < limits.min:
                return f'{name}_below_{limits.min:g}'
            elif limits.max is not None and number > limits.max:
                return f'{name}_above_{limits.max:g}'
        return None

    def columns_in(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return the names of filtered columns that exist in `metadata`, ignoring case."""
        names = {name.casefold() for name in metadata}
        return [name for name in self.columns if name.casefold() in names]

    def unknown_column_notes(self, seen: Collection[str], available: Collection[str] = ()) -> list[str]:
        """Return a note for each filtered column not in `seen`, which may be misspelled; the note lists `available`."""
        return [
            f'filters.columns.{name}: no image has this column; available columns: {sorted(available) or "none"}'
            for name in self.columns
            if name not in seen
        ]


def number_in(value: Any) -> float | None:
    """Return a value as a finite float, or None; strings are parsed: yes is 1 and no is 0, ignoring case."""
    if isinstance(value, str):
        value = {'yes': 1, 'no': 0}.get(value.strip().rstrip('.').casefold(), value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
