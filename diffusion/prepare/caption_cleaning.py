"""Caption cleaning: convert raw values of a caption column to clean text, or reject them with a reason."""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from diffusion.prepare.source import Unfit
from diffusion.storage.text_tables import is_misread

MIN_LENGTH = 1
"""Default minimum length of a caption in characters."""
MAX_LENGTH = 10_000
"""Default maximum length of a caption in characters; a longer text is a web page, not a caption."""
_SURROGATES = re.compile('[\ud800-\udfff]')
_REMOVED = re.compile(
    '[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f'  # control characters except white space
    '\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]'  # zero width, text direction
)
_JOINERS = '\u200c\u200d'
"""Zero-width characters to keep: Persian spelling and composed emoji need them."""


def clean_captions(raw: Sequence[Any], *, min_length: int = MIN_LENGTH, max_length: int = MAX_LENGTH) -> list[str]:
    """Return an image's cleaned captions in their order, without unusable and repeated ones; see `usable_captions`."""
    return list(usable_captions(raw, min_length=min_length, max_length=max_length))


def usable_captions(
    raw: Sequence[Any], *, min_length: int = MIN_LENGTH, max_length: int = MAX_LENGTH
) -> dict[str, int]:
    """Return an image's cleaned captions in their order, each with the index of the first raw caption that gives it.

    Args:
        raw: Raw values, which may include None, numbers and NaN.
        min_length: Minimum length of a cleaned caption in characters.
        max_length: Maximum length of a cleaned caption in characters.

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
    """Return text in NFC on one line with single spaces, without control characters and zero-width characters."""
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
    # shortens a text (white space, combining characters), so compare with a multiple of the maximum.
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
