"""Replace undecodable samples with others of the same shard; count, log and limit the replacements.

Skipping bad samples would give ranks batches of different sizes. The choice of the replacement depends only on the
seed, the sample id, the epoch and the attempt, so batches are the same on any number of ranks and after a resume. The
replacement's image, crop and caption are served under the id of the bad sample, which seeds noise, timestep and caption
dropout. So even if a batch has an image twice, as itself and as a replacement, the two inputs differ.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

from diffusion.errors import DataError
from diffusion.models.randomness import Purpose, philox
from diffusion.storage.local_files import append_text

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
MIN_REPLACED = 8
"""A run may always replace this many samples, whatever `max_bad_samples` is: they are too few to estimate a rate."""


class BadSample(DataError):
    """Raised for a sample that was read but cannot be decoded."""


def replacement(seed: int, sample_id: int, epoch: int, attempt: int, *, samples: int) -> int:
    """Return the row, in [0, samples), to try in place of an undecodable sample at this attempt (1, 2, ...)."""
    word, *_ = philox((attempt, sample_id & 0xFFFFFFFF, epoch & 0xFFFFFFFF, 0), (seed, int(Purpose.REPLACEMENT)))
    return word * samples >> 32


@dataclass
class SampleCounts:
    """Number of samples that a run has loaded so far, and how many of these it replaced, summed over all ranks."""

    served: int = 0
    replaced: int = 0

    def problem(self, max_rate: float) -> str | None:
        """Return an error message if more than the fraction `max_rate` of the samples was replaced, otherwise None."""
        if self.replaced <= MIN_REPLACED or self.replaced <= max_rate * self.served:
            return None
        rate = self.replaced / self.served
        return (
            f'loader.max_bad_samples: {self.replaced} of {self.served} samples could not be decoded ({rate:.1e}); '
            f'the limit is {max_rate:.1e}'
        )


def quarantine(path: Path, notes: Sequence[str], batch: int) -> None:
    """Append one line per replaced sample to a JSON Lines file; call this on one rank only.

    Each note is a JSON object about one sample, to which the line adds `batch` as `batch_in_epoch`. The folder is not
    created: a missing folder may mean a lost mount. If the file cannot be written, a warning is logged.
    """
    try:
        with append_text(path) as file:
            file.write(''.join(json.dumps(json.loads(note) | {'batch_in_epoch': batch}) + '\n' for note in notes))
    except OSError as error:
        log.warning('%s: replaced samples are not recorded (%s)', path, error)


class ReplacedSamples(Callback):
    """Callback that logs `data/replaced_samples`, the number of samples replaced on all ranks since the run started."""

    def __init__(self, tally: SampleCounts) -> None:
        self.tally = tally

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.tally.replaced:
            logger.log_metrics({'data/replaced_samples': self.tally.replaced})

    def state_dict(self) -> dict[str, Any]:
        return {'served': self.tally.served, 'replaced': self.tally.replaced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.served, self.tally.replaced = state['served'], state['replaced']
