"""Constraints in the annotations of components: messages, enforcement, and those of unpacked keywords."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypedDict

import numpy as np
import pytest
from golden import check_transcripts
from typing_extensions import Unpack

from diffusion.config import declarations
from diffusion.config.declarations import AtLeast, Default, MultipleOf, constrained, defaults
from diffusion.config.signatures import of_object, of_source
from diffusion.errors import UserError


def test_messages_have_the_wrong_value_and_the_nearest_ones():
    """The lines of the files are expressions, the results of which are messages or None."""

    names = vars(declarations) | {'np': np, 'part': part, 'typed': typed, 'Settings': Settings}

    def outcome(line: str) -> list[object]:
        try:
            return [eval(line, names)]
        except UserError as error:
            return [error]

    check_transcripts(Path(__file__).parent / 'golden' / 'constraints', outcome)


@constrained
def part(width: Annotated[int, MultipleOf(4)], *, levels: Annotated[Sequence[int], AtLeast(1)] = (1,)) -> int:
    return width * sum(levels)


def test_constrained_function_raises_user_errors_and_is_otherwise_unchanged():
    assert part(8, levels=[2, 3]) == 40
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
