"""Results that all ranks contribute to, and results that rank 0 computes for all ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from composer.utils import dist
from torch import Tensor

Result = TypeVar('Result')
RaiseTogether = Callable[[str], AbstractContextManager[None]]
"""Context, given a text for messages, that raises an error of one rank on all of them; a collective."""


def gather_rows(parts: Sequence[Tensor], indices: Sequence[int]) -> Tensor:
    """Return the rows of all ranks, in the order of their indices; a collective.

    Args:
        parts: Rows of this rank on the CPU, tensors [n, D] of any number of rows; none if it has no rows.
        indices: Index of each row among those of all ranks, 0, 1, 2, ...
    """
    own = torch.cat(list(parts)) if parts else None
    if dist.get_world_size() == 1:
        assert own is not None
        gathered: list[tuple[list[int], Tensor | None]] = [(list(indices), own)]
    else:
        gathered = dist.all_gather_object((list(indices), own))
    where = torch.tensor([index for order, _ in gathered for index in order])
    assert sorted(where.tolist()) == list(range(len(where))), 'each row belongs to one rank'
    return torch.cat([rows for _, rows in gathered if rows is not None])[where.argsort()]


def from_rank_zero(compute: Callable[[], Result], raise_together: RaiseTogether) -> Result:
    """Return on all ranks what a function returns on rank 0, which must be small and can be pickled; a collective.

    Args:
        compute: The function; an error that it raises is raised on all ranks.
        raise_together: As in `EvaluatedCheckpoint`.
    """
    answer: list[Result | None] = [None]
    with raise_together('rank 0'):
        if dist.get_global_rank() == 0:
            answer = [compute()]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]  # type: ignore[return-value]
