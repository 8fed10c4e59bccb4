"""From what a column holds to clean captions."""

import time
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.prepare.caption_cleaning import clean_captions, clean_text
from diffusion.prepare.image_decoding import Unfit


def reason(*raw: Any, **limits: int) -> str:
    with pytest.raises(Unfit) as refused:
        clean_captions(list(raw), **limits)
    assert refused.value.detail
    return str(refused.value)


@pytest.mark.parametrize(
    'raw', [None, float('nan'), np.float64('nan'), '', ' \n\t\u3000', '\0\u200b\ufeff', '\u200d\u200c']
)
def test_nothing_is_no_caption(raw: Any) -> None:
    assert reason(raw) == 'no_caption'
    assert reason() == 'no_caption'


@pytest.mark.parametrize('raw', [3, 2.5, True, b'a cat', ['a cat'], {'a': 'cat'}])
def test_what_is_not_text_is_refused(raw: Any) -> None:
    assert reason(raw) == 'caption_not_text'


def test_lengths_count_clean_characters() -> None:
    assert reason('  ab  ', min_length=3) == 'caption_too_short'
    assert clean_captions([' a\n\n b '], min_length=3, max_length=3) == ['a b']
    assert reason('abcd', max_length=3) == 'caption_too_long'
    assert clean_captions(['e\u0301' * 3], max_length=3) == ['ééé']


def test_100_kb_are_refused_by_default() -> None:
    assert reason('x' * 100_000) == 'caption_too_long'


def test_accents_in_the_worst_order_take_no_minutes() -> None:
    start = time.monotonic()
    assert reason('a' + '\u0301\u0316' * 50_000) == 'caption_too_long'
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ('raw', 'clean'),
    [
        ('a\0b\x07c\x1b[31m', 'abc[31m'),
        ('a\r\n b\t\tc\x0b\x0c\x85d\u2028e\u00a0f', 'a b c d e f'),
        ('cafe\u0301', 'café'),
        ('a\ud800b', 'a\ufffdb'),
        ('zero\u200bwidth\ufeff\u2060', 'zerowidth'),
        ('\u202eright\u202c \u2066left\u2069', 'right left'),
        ('soft\u00adhyphen', 'softhyphen'),
        ('👩\u200d🚀', '👩\u200d🚀'),
        ('می\u200cخواهم', 'می\u200cخواهم'),
    ],
)
def test_control_and_widthless_characters_go(raw: str, clean: str) -> None:
    assert clean_captions([raw]) == [clean]


@given(st.text(alphabet=st.characters(), max_size=200))
def test_clean_text_is_clean_and_stays_as_it_is(text: str) -> None:
    clean = clean_text(text)
    clean.encode('utf-8')
    assert clean_text(clean) == clean
    assert clean == ' '.join(clean.split())
    assert unicodedata.is_normalized('NFC', clean)
    assert not any(unicodedata.category(character) in ('Cc', 'Cs') for character in clean)


def test_of_several_captions_the_fit_ones_are_kept_once_in_order() -> None:
    assert clean_captions(['b ', None, 'a', 7, 'b', '\0', 'a b c'], max_length=3) == ['b', 'a']


def test_when_none_is_fit_the_first_that_holds_something_is_the_reason() -> None:
    assert reason(None, '', 7, 'x' * 50_000) == 'caption_not_text'
    assert reason(None, 'x' * 50_000, 7) == 'caption_too_long'
