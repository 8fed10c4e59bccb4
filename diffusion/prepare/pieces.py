"""Pieces of the input that one job converts each: parts of the plan, or of an input with few parts some images of one.

A folder of 1,000 images is one part, which would keep one core busy. The division depends on the plan alone, so that
it is the same on every machine and at every start; the dataset is the same as without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from diffusion.prepare.input_plan import InputPlan
from diffusion.prepare.source import DivisibleSource, Part, Source

FEW_PARTS = 64
"""Number of parts from which on they are converted as a whole."""
PIECES = 256
"""Number of pieces of an input with few parts, if its parts have enough images."""


class Piece(NamedTuple):
    """Piece of the input; its folder has its name."""

    name: str
    """The number of its part, such as 000003; for the fifth of several pieces 000003.004."""
    number: int
    """Number of its part."""
    part: Part
    """What to convert; without `where` if it is a whole part."""
    is_whole: bool

    def content(self, plan: InputPlan) -> Part:
        """Return what to convert, with `where`."""
        return plan.parts[self.number] if self.is_whole else self.part


def pieces_of(plan: InputPlan, source: Source) -> list[Piece]:
    """Return the pieces of a plan in order."""
    divisible = source if len(plan.parts) < FEW_PARTS and isinstance(source, DivisibleSource) else None
    found = []
    for number, head in enumerate(plan.parts.heads):
        whole = Piece(f'{number:06}', number, head, is_whole=True)
        divided: Sequence[Part] = ()
        if divisible is not None:
            divided = divisible.divide(plan.parts[number], PIECES // len(plan.parts))
        if len(divided) < 2:
            found.append(whole)
            continue
        for index, part in enumerate(divided):
            # What the report has of a part is counted once.
            part = part if index == 0 else replace(part, passed_over={}, notes=(), license=None)
            found.append(Piece(f'{whole.name}.{index:03}', number, part, is_whole=False))
    return found
