"""Conditions of a denoiser: text embeddings with their mask, pooled text, and image sizes.

Shapes: B batch, L text tokens, D text width, P width of the pooled text.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = 6
"""Numbers per image in `Condition.sizes`."""


@dataclass(frozen=True)
class Condition:
    """Inputs that a denoiser gets besides the noisy latents and the timestep."""

    embeds: Tensor
    """Text embeddings, [B, L, D]."""
    mask: Tensor | None = None
    """True for tokens, False for padding, bool [B, L]; None attends to everything."""
    pooled: Tensor | None = None
    """One embedding per caption, [B, P]; None for families without it."""
    sizes: Tensor | None = None
    """Original height and width, top and left of the crop, and target height and width in pixels, int64 [B, 6]
    (Podell et al. 2023, section 2.2); None for families without it. They are not floats, since FSDP would cast them to
    the dtype of the parameters, and bfloat16 rounds sizes above 256."""

    def __len__(self) -> int:
        return len(self.embeds)

    def followed_by(self, other: 'Condition') -> 'Condition':
        """Return a condition whose batch is this one's followed by the other's, as guidance needs it."""

        def joined(first: Any, second: Any) -> Any:
            return None if first is None or second is None else torch.cat([first, second])

        return Condition(*(joined(first, second) for first, second in zip(self._all(), other._all(), strict=True)))

    def _all(self) -> tuple[Tensor | None, ...]:
        return self.embeds, self.mask, self.pooled, self.sizes
