"""Results that all ranks contribute to, and results that rank 0 computes for all ranks."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from composer.utils import dist
from torch import Tensor

from diffusion.errors import UserError

Result = TypeVar('Result')


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


def from_rank_zero(compute: Callable[[], Result]) -> Result:
    """Return on all ranks what a function returns on rank 0, which must be small and can be pickled; a collective.

    Raises:
        UserError: The function raised it on rank 0.
    """
    answer: list[Result | UserError | None] = [None]
    if dist.get_global_rank() == 0:
        try:
            answer = [compute()]
        except UserError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], UserError):
        raise answer[0]
    return answer[0]  # type: ignore[return-value]
