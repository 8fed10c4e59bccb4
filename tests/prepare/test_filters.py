"""Filters for images: sides, aspect ratio, caption length and metadata columns."""

from typing import Any

import pytest

from diffusion.prepare.filters import Filters, ValueRange


def problem(
    filters: Filters, width: int = 100, height: int = 100, caption: str = 'a cat', **columns: Any
) -> str | None:
    return filters.image_problem(width, height, [caption]) or filters.column_problem(columns)


def test_defaults_keep_everything() -> None:
    assert problem(Filters(), 1, 5000, 'x', score=None) is None


def test_limits_on_sides_and_aspect() -> None:
    filters = Filters(min_side=64, max_aspect=2.0)
    sizes = [(64, 64), (63, 500), (500, 63), (64, 128), (128, 64), (64, 129), (129, 64)]
    assert [problem(filters, *size) for size in sizes] == [
        *(None, 'too_small', 'too_small', None, None, 'too_elongated', 'too_elongated')
    ]


def test_limits_on_caption_length() -> None:
    filters = Filters(min_caption=3, max_caption=5)
    assert [problem(filters, caption='x' * n) for n in (2, 3, 5, 6)] == [
        *('caption_too_short', None, None, 'caption_too_long')
    ]
    assert filters.image_problem(9, 9, ['xx', 'xxxx', 'x' * 50]) is None


def test_limits_on_numeric_columns() -> None:
    filters = Filters(columns={'aesthetic_score': ValueRange(min=4.5), 'PUNSAFE': ValueRange(max=0.5)})
    assert problem(filters, AESTHETIC_SCORE=4.5, punsafe=0.5) is None
    assert problem(filters, aesthetic_score=4.49, punsafe=0.9) == 'aesthetic_score_below_4.5'
    assert problem(filters, aesthetic_score='5.1', pUnsafe=0.51) == 'punsafe_above_0.5'


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
    assert (
        note == "filters.columns.aesthetic: no image has this column; available columns: ['aesthetic_score', 'punsafe']"
    )
    assert filters.unknown_column_notes({'PUNSAFE', 'aesthetic'}) == []


@pytest.mark.parametrize(
    ('filters', 'message'),
    [
        (Filters(max_aspect=0.5), r'filters\.max_aspect: 0\.5 is below 1'),
        (Filters(min_side=0), r'filters\.min_side: 0 is not positive'),
        (Filters(min_caption=9, max_caption=3), r'filters\.min_caption: 9 is not between 1 and max_caption=3'),
        (Filters(columns={'a': ValueRange()}), r'filters\.columns\.a: has no limit'),
        (Filters(columns={'a': ValueRange(2, 1)}), r'filters\.columns\.a: max 1 is below min 2'),
        (Filters(columns={'a': ValueRange(1), 'A': ValueRange(2)}), 'contains a column twice'),
    ],
)
def test_limits_that_nothing_can_pass_are_errors(filters: Filters, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filters.check()
    Filters(min_side=5, max_aspect=1.0, columns={'a': ValueRange(1, 1)}).check()
