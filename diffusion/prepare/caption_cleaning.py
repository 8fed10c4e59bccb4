"""Cleaning captions: any value of a column becomes clean text or a reason why there is none."""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from diffusion.prepare.image_decoding import Unfit

MIN_LENGTH = 1
MAX_LENGTH = 10_000
"""Characters; a longer text is a page, not a caption."""
_SURROGATES = re.compile('[\ud800-\udfff]')
_INVISIBLE = re.compile(
    '[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f'  # control characters but those that are white space
    '\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufeff\ufff9-\ufffb]'  # widthless, and of direction
)
_JOINERS = '\u200c\u200d'
"""Characters without width that stay: Persian is spelled with them and emoji are made of them."""


def clean_captions(raw: Sequence[Any], *, min_length: int = MIN_LENGTH, max_length: int = MAX_LENGTH) -> list[str]:
    """Return the usable captions, cleaned, without repeats, in their order.

    Args:
        raw: As they were found: None, numbers and NaN included.
        min_length, max_length: In characters, of a cleaned caption.

    Raises:
        Unfit: None is left: no_caption, caption_not_text, caption_too_short, caption_too_long; of several captions,
            the reason of the first that holds something.
    """
    kept: dict[str, None] = {}
    refused: list[Unfit] = []
    for caption in raw:
        try:
            kept[_clean_caption(caption, min_length, max_length)] = None
        except Unfit as reason:
            refused.append(reason)
    if not kept:
        said = (reason for reason in refused if str(reason) != 'no_caption')
        raise next(said, Unfit('no_caption', 'it has no caption'))
    return list(kept)


def clean_text(text: str) -> str:
    """Return text in NFC on one line, with single blanks, without control characters and those without width."""
    text = _INVISIBLE.sub('', _SURROGATES.sub('\ufffd', text))
    return ' '.join(unicodedata.normalize('NFC', text).split())


def _clean_caption(caption: Any, min_length: int, max_length: int) -> str:
    if caption is None or (isinstance(caption, float) and math.isnan(caption)):
        raise Unfit('no_caption', 'it has no caption')
    if not isinstance(caption, str):
        raise Unfit('caption_not_text', f'its caption is of type {type(caption).__name__}')
    # Before it is cleaned: putting 100 kB of accents in order takes Python minutes.
    too_long = len(caption) > 4 * max_length
    text = '' if too_long else clean_text(caption)
    if too_long or len(text) > max_length:
        raise Unfit('caption_too_long', f'its caption has {len(text) or len(caption)} characters, over {max_length}')
    if not text.strip(_JOINERS):
        raise Unfit('no_caption', 'its caption is empty')
    if len(text) < min_length:
        raise Unfit('caption_too_short', f'its caption has {len(text)} characters, under {min_length}')
    return text
