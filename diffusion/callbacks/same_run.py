"""A run goes on as what it was begun as: the same seed, and the same data unless it is said that it may change."""

import logging
from collections.abc import Mapping
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.errors import UserError
from diffusion.storage.differences import differences

log = logging.getLogger(__name__)

DATA = 'data'
"""Part of an identity that may change."""


class SameRun(Callback):
    """Save in every checkpoint what a run is, and compare it when the run goes on.

    Where data may change, Streaming's own state still says the epoch and the place in it; the order after that is the
    recipe's (see `BucketedDataset.load_state_dict`).

    Args:
        identity: Plain values, `data` among them (see `diffusion.data.fingerprint`).
        allow_data_change: Warn of other data instead of refusing it.
    """

    def __init__(self, identity: Mapping[str, Any], *, allow_data_change: bool) -> None:
        self.identity = dict(identity)
        self.allow_data_change = allow_data_change
        self._compared = False

    def state_dict(self) -> dict[str, Any]:
        return self.identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare the identity of a checkpoint with this run's.

        Raises:
            UserError: They differ in more than what may change.
        """
        self._compared = True
        if not state:
            return self._warn_of_none()
        data = differences(state.get(DATA, {}), self.identity.get(DATA, {}))
        fixed = [
            f'{key}: {self.identity.get(key)}, the run was started with {state.get(key)}'
            for key in self.identity.keys() | state.keys()
            if key != DATA and self.identity.get(key) != state.get(key)
        ]
        if fixed:
            way_out = 'set it back to go on, or start a new run under another name'
            raise UserError(f'{"; ".join(sorted(fixed))}; {way_out}{_listed(data)}')
        if data and not self.allow_data_change:
            raise UserError(
                'streams, dataset, loader: the data is not what the run was started with; set allow_data_change: true '
                f'to go on with other data, or start a new run under another name{_listed(data)}'
            )
        if data and dist.get_global_rank() == 0:
            log.warning('the run goes on with other data than it was started with%s', _listed(data))

    def after_load(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value and not self._compared:
            self._warn_of_none()

    def _warn_of_none(self) -> None:
        if dist.get_global_rank() == 0:
            log.warning(
                'the checkpoint does not say which seed and data it is of; whether they are the same is unknown'
            )


def _listed(lines: list[str]) -> str:
    return ''.join(f'\n  {line}' for line in lines)
