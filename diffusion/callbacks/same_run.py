"""Verify on resume that the run has the same seed and training data as when it started."""

import logging
from collections.abc import Mapping
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.errors import UserError
from diffusion.storage.shard_writer import differences

log = logging.getLogger(__name__)

DATA = 'data'
"""Key of the part of an identity that may change if `allow_data_change` is set."""


class SameRun(Callback):
    """Callback that saves a run's identity (seed and data settings) in each checkpoint and compares it on resume.

    If the data has changed, training resumes at the saved epoch and position; the recipe then determines the order of
    samples (`BucketedDataset.load_state_dict`).

    Args:
        identity: The values to compare, with those of the data under the key `data` (`diffusion.data.streams`).
        allow_data_change: Log a warning about changed data instead of raising an error.
    """

    def __init__(self, identity: Mapping[str, Any], *, allow_data_change: bool) -> None:
        self.identity = dict(identity)
        self.allow_data_change = allow_data_change
        self._compared = False

    def state_dict(self) -> dict[str, Any]:
        return self.identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the identity (seed and data settings) in a checkpoint with this run's, on resume.

        Raises:
            UserError: The identities differ; a difference in data is allowed if `allow_data_change` is set.
        """
        self._compared = True
        if not state:
            return self._warn_unknown()
        data = differences(state.get(DATA, {}), self.identity.get(DATA, {}))
        fixed = [
            f'{key}: {self.identity.get(key)}, but the run was started with {state.get(key)}'
            for key in self.identity.keys() | state.keys()
            if key != DATA and self.identity.get(key) != state.get(key)
        ]
        if fixed:
            way_out = 'set it back to resume, or start a new run under another name'
            raise UserError(f'{"; ".join(sorted(fixed))}; {way_out}{_listed(data)}')
        if data and not self.allow_data_change:
            raise UserError(
                'streams, dataset, loader: the data differs from when the run was started; set allow_data_change: true '
                f'to resume with other data, or start a new run under another name{_listed(data)}'
            )
        if data and dist.get_global_rank() == 0:
            log.warning('the run resumes with other data than it was started with%s', _listed(data))

    def after_load(self, state: State, logger: Logger) -> None:
        # Composer does not call load_state_dict for a callback without a state in the checkpoint.
        if state.timestamp.batch.value and not self._compared:
            self._warn_unknown()

    def _warn_unknown(self) -> None:
        if dist.get_global_rank() == 0:
            log.warning('the checkpoint does not record its seed and data; they cannot be compared with this run')


def _listed(lines: list[str]) -> str:
    return ''.join(f'\n  {line}' for line in lines)
