"""Cleaning of captions, and filters for images: sides, aspect ratio, caption length and metadata columns."""

import time
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.prepare.filters import Filters, ValueRange, clean_text, usable_captions
from diffusion.prepare.image_decoding import Unfit


def problem(filters: Filters, width: int = 99, height: int = 99, **columns: Any) -> Any:
    return filters.size_problem(width, height) or filters.column_problem(columns)


def test_limits_on_sides_aspect_and_columns() -> None:
    filters = Filters(min_side=64, max_aspect=2.0)
    sizes = [(64, 64), (63, 500), (500, 63), (64, 128), (128, 64), (64, 129), (129, 64)]
    expected = [None, 'too_small', 'too_small', None, None, 'too_elongated', 'too_elongated']
    assert [problem(filters, *size) for size in sizes] == expected
    assert problem(Filters(), 1, 5000, score=None) is None
    filters = Filters(columns={'aesthetic_score': ValueRange(min=4.5), 'PUNSAFE': ValueRange(max=0.5)})
    assert problem(filters, AESTHETIC_SCORE=4.5, punsafe=0.5) is None
    assert problem(filters, aesthetic_score=4.49, punsafe=0.9) == 'aesthetic_score_below_4.5'
    assert problem(filters, aesthetic_score='5.1', pUnsafe=0.51) == 'punsafe_above_0.5'
    answers = Filters(columns={'watermark': ValueRange(0, 1)}), Filters(columns={'watermark': ValueRange(1, 1)})
    assert [problem(each, watermark=' Yes. ') for each in answers] == [None, None]
    assert [problem(each, watermark='NO') for each in answers] == [None, 'watermark_below_1']


@pytest.mark.parametrize('value', [None, float('nan'), float('inf'), 'high', '', [1], 10**400])
def test_values_that_are_not_numbers_count_as_missing(value: Any) -> None:
    columns = {'score': ValueRange(min=1)}
    assert problem(Filters(columns=columns), score=value) == 'score_missing'
    assert problem(Filters(columns=columns, missing='keep'), score=value) is None
    assert problem(Filters(columns=columns)) == 'score_missing'


def test_column_that_no_image_has_is_reported() -> None:
    filters = Filters(columns={'aesthetic': ValueRange(min=1), 'PUNSAFE': ValueRange(max=1)})
    assert filters.columns_in({'punsafe': None, 'aesthetic_score': 1}) == ['PUNSAFE']
    (note,) = filters.unknown_column_notes({'PUNSAFE'}, available={'punsafe', 'aesthetic_score'})
    assert note.startswith('filters.columns.aesthetic: no image has this column') and note.endswith("'punsafe']")
    assert filters.unknown_column_notes({'PUNSAFE', 'aesthetic'}) == []


def reason(*raw: Any, **limits: int) -> str:
    with pytest.raises(Unfit) as rejection:
        usable_captions(raw, **limits)
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
    assert reason('\x04abc') == 'caption_not_utf8'
    assert list(usable_captions([text])) == [unicodedata.normalize('NFC', text)]


def test_lengths_count_characters_after_cleaning() -> None:
    assert reason('  ab  ', min_length=3) == 'caption_too_short'
    assert list(usable_captions([' a\n\n b '], min_length=3, max_length=3)) == ['a b']
    assert reason('abcd', max_length=3) == 'caption_too_long'
    assert list(usable_captions(['e\u0301' * 3], max_length=3)) == ['ééé']


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
    assert list(usable_captions([raw])) == [clean]


@given(st.text(alphabet=st.characters(), max_size=200))
def test_cleaning_is_idempotent(text: str) -> None:
    clean = clean_text(text)
    clean.encode('utf-8')
    assert clean_text(clean) == clean
    assert clean == ' '.join(clean.split())
    assert unicodedata.is_normalized('NFC', clean)
    assert not any(unicodedata.category(character) in ('Cc', 'Cs') for character in clean)


def test_usable_captions_are_kept_once_in_order_or_the_first_with_content_gives_the_reason() -> None:
    assert list(usable_captions(['b ', None, 'a', 7, 'b', '\0', 'a b c'], max_length=3)) == ['b', 'a']
    assert reason(None, '', 7, 'x' * 50_000) == 'caption_not_text'
    assert reason(None, 'x' * 50_000, 7) == 'caption_too_long'
