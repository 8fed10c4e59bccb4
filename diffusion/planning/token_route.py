"""Route of TREAD as the planner sees it: blocks of a transformer that a fraction of the image tokens skips."""

from dataclasses import dataclass

from diffusion.config import registry
from diffusion.config.algorithm_checks import UNROUTED_BLOCKS
from diffusion.config.recipe import Recipe


@dataclass(frozen=True)
class TokenRoute:
    """Blocks `start` to `end` - 1, which `fraction` of the image tokens skip in training."""

    start: int
    end: int
    fraction: float

    def __str__(self) -> str:
        return f'tread={self.start}:{self.end}:{self.fraction}'

    def fraction_after(self, block: int) -> float:
        """Return the fraction of the image tokens in the output of a block."""
        return 1 - self.fraction if self.start <= block < self.end else 1.0


def route_of(recipe: Recipe, blocks: int) -> TokenRoute | None:
    """Return the route of a recipe's TREAD, for a denoiser with this number of blocks, or None if it has none."""
    for algorithm in recipe.algorithms.values():
        if algorithm.name == 'tread':
            settings = registry.settings_of('algorithm', algorithm)
            end = blocks - UNROUTED_BLOCKS if settings['end'] is None else settings['end']
            return TokenRoute(settings['start'], end, settings['fraction'])
    return None
