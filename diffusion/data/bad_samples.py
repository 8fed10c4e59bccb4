"""Samples that cannot be decoded: another of the same shard is served in their place, and that is counted.

To skip them would make the ranks' batches unequal. Which sample comes instead depends on the seed, the sample and the
epoch alone, so that batches are the same on any number of ranks and after a resume. What is served is the other
sample's content, its own crop and caption included, under the id of the sample that was asked for: noise, timestep and
caption dropout are that one's, and a batch that holds the other sample itself as well does not see the same twice.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import DataError
from diffusion.models.randomness import Purpose, philox

MAX_ATTEMPTS = 8
MIN_REPLACED = 8
"""So many replaced samples stop no run, whatever their share: one in the first batch is no rate."""


class BadSample(DataError):
    """A sample that was read and cannot be decoded."""


def replacement(seed: int, sample_id: int, epoch: int, attempt: int, *, samples: int) -> int:
    """The row, of a shard with so many, that replaces a sample at the n-th attempt."""
    word, *_ = philox((attempt, sample_id & 0xFFFFFFFF, epoch & 0xFFFFFFFF, 0), (seed, int(Purpose.REPLACEMENT)))
    return word * samples >> 32


@dataclass
class Tally:
    """Samples that a run has served, over all ranks.

    Attributes:
        served: All of them.
        replaced: Those of them that stand for a bad one.
    """

    served: int = 0
    replaced: int = 0

    def problem(self, max_rate: float) -> str | None:
        """What is wrong where too many were replaced, or None."""
        if self.replaced <= MIN_REPLACED or self.replaced <= max_rate * self.served:
            return None
        rate = self.replaced / self.served
        return (
            f'loader.max_bad_samples: {self.replaced} of {self.served} samples could not be decoded, a share of '
            f'{rate:.1e}, and {max_rate:.1e} is allowed'
        )


def quarantine(path: Path, notes: Sequence[str], batch: int) -> None:
    """Add notes on replaced samples to a file, a line each; for one process of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', encoding='utf-8') as file:
        file.write(''.join(json.dumps(json.loads(note) | {'batch_in_epoch': batch}) + '\n' for note in notes))
