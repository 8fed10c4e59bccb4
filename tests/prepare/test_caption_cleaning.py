"""Caption cleaning: raw column values to clean captions."""

import time
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.prepare.filters import clean_captions, clean_text
from diffusion.prepare.image_decoding import Unfit


def reason(*raw: Any, **limits: int) -> str:
    with pytest.raises(Unfit) as rejection:
        clean_captions(list(raw), **limits)
    assert rejection.value.detail
    return str(rejection.value)


@pytest.mark.parametrize(
    'raw', [None, float('nan'), np.float64('nan'), '', ' \n\t\u3000', '\u200b\ufeff', '\u200d\u200c']
)
def test_empty_values_are_no_caption(raw: Any) -> None:
    assert reason(raw) == 'no_caption'
    assert reason() == 'no_caption'


@pytest.mark.parametrize('raw', [3, 2.5, True, b'a cat', ['a cat'], {'a': 'cat'}])
def test_values_that_are_not_text_are_rejected(raw: Any) -> None:
    assert reason(raw) == 'caption_not_text'


@pytest.mark.parametrize('text', ['a red cat', 'красный', 'κόκκινο', 'a'])
@pytest.mark.parametrize('encoding', ['utf-16-le', 'utf-16-be', 'utf-32-le'])
def test_text_in_another_encoding_is_rejected(text: str, encoding: str) -> None:
    assert reason(text.encode(encoding).decode('utf-8', 'surrogateescape')) == 'caption_not_utf8'
    assert clean_captions([text]) == [unicodedata.normalize('NFC', text)]


def test_lengths_count_characters_after_cleaning() -> None:
    assert reason('  ab  ', min_length=3) == 'caption_too_short'
    assert clean_captions([' a\n\n b '], min_length=3, max_length=3) == ['a b']
    assert reason('abcd', max_length=3) == 'caption_too_long'
    assert clean_captions(['e\u0301' * 3], max_length=3) == ['ééé']


def test_caption_of_100_kb_is_rejected_by_default() -> None:
    assert reason('x' * 100_000) == 'caption_too_long'


def test_worst_case_accents_are_rejected_quickly() -> None:
    start = time.monotonic()
    assert reason('a' + '\u0301\u0316' * 50_000) == 'caption_too_long'
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ('raw', 'clean'),
    [
        ('a bell\x07 and \x1b[31m', 'a bell and [31m'),
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
def test_control_and_zero_width_characters_are_removed(raw: str, clean: str) -> None:
    assert clean_captions([raw]) == [clean]


@given(st.text(alphabet=st.characters(), max_size=200))
def test_cleaning_is_idempotent(text: str) -> None:
    clean = clean_text(text)
    clean.encode('utf-8')
    assert clean_text(clean) == clean
    assert clean == ' '.join(clean.split())
    assert unicodedata.is_normalized('NFC', clean)
    assert not any(unicodedata.category(character) in ('Cc', 'Cs') for character in clean)


def test_usable_captions_are_kept_once_and_in_order() -> None:
    assert clean_captions(['b ', None, 'a', 7, 'b', '\0', 'a b c'], max_length=3) == ['b', 'a']


def test_reason_is_that_of_the_first_caption_with_content() -> None:
    assert reason(None, '', 7, 'x' * 50_000) == 'caption_not_text'
    assert reason(None, 'x' * 50_000, 7) == 'caption_too_long'
