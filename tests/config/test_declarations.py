"""Constraints in the annotations of components: messages, enforcement, and checks without importing the component."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import pytest
from typing_extensions import Unpack

from diffusion.config import registry
from diffusion.config.declarations import (
    AtLeast,
    Between,
    Default,
    Fraction,
    GreaterThan,
    MultipleOf,
    constrained,
    defaults,
)
from diffusion.config.registry import check_keywords, register
from diffusion.config.signatures import of_object, of_source
from diffusion.errors import UserError

PARTS = """
from typing import Annotated

from diffusion.config.declarations import AtLeast, MultipleOf

Side = Annotated[int, MultipleOf(16)]

raise RuntimeError('imported')


def strict(resolution: Side = 32, *, depth: Annotated[int | None, AtLeast(1), 'another annotation'] = None): ...
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(registry.TARGETS, 'model', dict(registry.TARGETS['model']))


@pytest.mark.parametrize(
    ('constraint', 'value', 'problem'),
    [
        (MultipleOf(8), 8, None),
        (MultipleOf(8), 12, '12 is not a positive multiple of 8; use 8 or 16'),
        (MultipleOf(8), 0, '0 is not a positive multiple of 8; use 8'),
        (MultipleOf(8), -8, '-8 is not a positive multiple of 8; use 8'),
        (MultipleOf(32), [64, 100], '100 is not a positive multiple of 32; use 96 or 128'),
        (MultipleOf(32), (), 'is empty; give at least one multiple of 32'),
        (AtLeast(1), 0, '0 is less than 1; use 1 or more'),
        (AtLeast(1), [1, 2], None),
        (AtLeast(1), None, None),
        (AtLeast(1), [True, False, 'x'], None),
        (AtLeast(2), [3, 1, 0], '1 is less than 2; use 2 or more'),
        (MultipleOf(8), 20.5, '20.5 is not a positive multiple of 8; use 16 or 24'),
        (GreaterThan(0.5), [0.6, 0.5], '0.5 is not greater than 0.5; use a larger number'),
        (Between(-1, 1), [-1, 0.9], None),
        (Between(-1, 1), 1, '1 is out of range; use at least -1 and less than 1'),
        (Between(0, 2.5), -0.1, '-0.1 is out of range; use at least 0 and less than 2.5'),
        (Fraction(), [0.1, 1], None),
        (Fraction(), 0, '0 is not a fraction in (0, 1], such as 0.4'),
        (Fraction(), 1.01, '1.01 is not a fraction in (0, 1], such as 0.4'),
    ],
)
def test_message_has_the_wrong_value_and_the_nearest_ones(constraint, value, problem):
    assert constraint.problem(value) == problem


@constrained
def part(width: Annotated[int, MultipleOf(4)], *, levels: Annotated[Sequence[int], AtLeast(1)] = (1,)) -> int:
    return width * sum(levels)


def test_constrained_function_raises_user_errors_and_is_otherwise_unchanged():
    assert part(8, levels=[2, 3]) == 40
    with pytest.raises(UserError, match='width: 6 is not a positive multiple of 4; use 4 or 8'):
        part(6)
    with pytest.raises(UserError, match='levels: 0 is less than 1'):
        part(4, levels=[1, 0])
    with pytest.raises(TypeError, match=r"part\(\) got an unexpected keyword argument 'level'; did you mean 'levels'"):
        part(4, level=[1])  # type: ignore[call-arg]


@dataclass
class Settings:
    """Value of a keyword below."""


@constrained
def typed(
    share: float = 0.0,
    *,
    mode: Literal['empty', 'zeros'] | None = None,
    settings: Settings | None = None,
    on: bool = True,
    sizes: list[int] | None = None,
    pair: tuple[int, str] = (1, 'a'),
    side: Annotated[int, AtLeast(1)] = 1,
) -> None:
    """Have keywords of the types that are checked."""


@pytest.mark.parametrize(
    ('given', 'problem'),
    [
        ({'share': '0.5'}, "share: '0.5' is not a number; pass a number without quotes"),
        ({'share': True}, 'share: True is not a number'),
        ({'mode': 'zero'}, "mode: 'zero' is not one of empty, zeros or None"),
        ({'settings': {}}, r'settings: \{\} is not Settings\(...\) or None'),
        ({'on': 'no'}, "on: 'no' is not True or False"),
        ({'on': 1}, 'on: 1 is not True or False'),
        ({'mode': 0}, 'mode: 0 is not one of empty, zeros or None'),
        ({'sizes': 5}, 'sizes: 5 is not a list, each an integer or None'),
        ({'sizes': b'ab'}, "sizes: b'ab' is not a list, each an integer or None"),
        ({'sizes': [1, 1.5]}, r'sizes: \[1, 1.5\] is not a list, each an integer or None'),
        ({'sizes': (True,)}, r'sizes: \(True,\) is not a list, each an integer or None'),
        ({'pair': 5}, 'pair: 5 is not a list, each an integer'),
        ({'side': '64'}, "^side: '64' is not an integer; pass a number without quotes, such as 64$"),
        ({'side': 1.0}, '^side: 1.0 is not an integer$'),
        ({'settings': 5}, r'settings: 5 is not Settings\(...\) or None$'),
    ],
)
def test_argument_of_another_type_is_a_user_error(given, problem):
    numpy_number: Any = np.float32(1)
    typed(numpy_number, mode='zeros', settings=Settings(), on=False, sizes=[np.int64(3)], pair=(2, 'b'))
    typed(sizes=iter('ab'), side=np.int64(3))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=problem):
        typed(**given)


class Shared(TypedDict, total=False):
    depth: Annotated[int, Default(2), AtLeast(1)]
    """Number of blocks."""


@constrained
@defaults(depth=3)
def deep(**shared: Unpack[Shared]) -> int:
    return shared['depth']


def test_unpacked_keywords_have_defaults_and_constraints():
    assert (deep(), deep(depth=1)) == (3, 1)
    assert inspect.signature(deep).parameters['depth'].default == 3
    with pytest.raises(UserError, match='depth: 0 is less than 1'):
        deep(depth=0)
    with pytest.raises(TypeError, match='unexpected keyword argument'):
        deep(deptth=1)  # type: ignore[call-arg]


def test_unpacked_keywords_are_read_from_the_source_too():
    of_file = {each.name: each for each in of_source('diffusion.models.families.prx.builder', 'prx').parameters}
    assert of_file['encoder_dtype'].default == 'bfloat16'
    assert of_file['posterior'].default == 'sample' and not of_file['posterior'].required
    assert of_file['seed'].doc.startswith('Seed for noise')
    assert not of_file['seed'].changes_architecture and of_file['depth'].changes_architecture
    (depth,) = of_object(deep).parameters
    assert (depth.annotation, depth.default, depth.constraints) == ('int', 3, (AtLeast(1),))


def test_constraints_are_checked_without_importing_the_component(tmp_path, monkeypatch):
    (tmp_path / 'constrained_parts.py').write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    register('model', 'strict', 'constrained_parts:strict')
    problems = check_keywords('model', 'model', 'strict', {'resolution': 40, 'depth': 0})
    assert [str(problem) for problem in problems] == [
        'model.resolution: 40 is not a positive multiple of 16; use 32 or 48',
        'model.depth: 0 is less than 1; use 1 or more',
    ]
    assert check_keywords('model', 'model', 'strict', {'resolution': 48, 'depth': None}) == []
