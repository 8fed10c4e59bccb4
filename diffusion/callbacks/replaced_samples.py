"""Callback that logs the number of undecodable samples that were replaced, and keeps the count across restarts."""

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

from diffusion.data.bad_samples import SampleCounts


class ReplacedSamples(Callback):
    """Callback that logs `data/replaced_samples`: undecodable samples replaced on all ranks since the run started.

    Args:
        tally: Counts that the training loader keeps; the loader stops the run if too many samples are replaced.
    """

    def __init__(self, tally: SampleCounts) -> None:
        self.tally = tally

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.tally.replaced:
            logger.log_metrics({'data/replaced_samples': self.tally.replaced})

    def state_dict(self) -> dict[str, Any]:
        return {'served': self.tally.served, 'replaced': self.tally.replaced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tally.served, self.tally.replaced = state['served'], state['replaced']
