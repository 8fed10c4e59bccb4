"""Callbacks for a run's recipe: verify on resume that seed and data are unchanged, and log all changes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.config.resume_rules import Change, history_lines
from diffusion.errors import UserError
from diffusion.storage.atomic import write_atomically
from diffusion.storage.shard_writer import differences

log = logging.getLogger(__name__)

DATA = 'data'
"""Key of the data settings in a run's identity; they may change if `allow_data_change` is set."""


class SameRun(Callback):
    """Callback that saves a run's identity (seed and data settings) in each checkpoint and compares it on resume.

    If the data has changed, training resumes at the saved epoch and position; the recipe then determines the order of
    samples (`BucketedDataset.load_state_dict`).

    Args:
        identity: The values to compare; data settings are under the key `data` (`diffusion.data.streams`).
        allow_data_change: Log a warning about changed data instead of raising an error.
    """

    def __init__(self, identity: Mapping[str, Any], *, allow_data_change: bool) -> None:
        self.identity = dict(identity)
        self.allow_data_change = allow_data_change
        self._compared = False

    def state_dict(self) -> dict[str, Any]:
        return self.identity

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raise UserError if a checkpoint has another seed, or has other data and `allow_data_change` is not set."""
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
        # Composer does not call load_state_dict for a callback that has no state in the checkpoint.
        if state.timestamp.batch.value and not self._compared:
            self._warn_unknown()

    def _warn_unknown(self) -> None:
        if dist.get_global_rank() == 0:
            log.warning('the checkpoint does not record its seed and data; they cannot be compared with this run')


def _listed(lines: list[str]) -> str:
    return ''.join(f'\n  {line}' for line in lines)


MAX_LOGGED_CHARACTERS = 200
"""Maximum number of characters of a changed setting in a log line; recipe.yaml keeps the whole text."""


@dataclass(frozen=True)
class ResumedRecipe:
    """Changes between a resumed run's recipe and the recipe its checkpoint was trained with."""

    changes: tuple[Change, ...] = ()
    """The changed settings, all of which the run applies; changes that it cannot apply have raised an error before."""
    history: tuple[str, ...] = ()
    """Comment lines about earlier changes, from the end of the run's recipe file."""


class RecipeKeeper(Callback):
    """Callback that writes the resolved recipe next to the checkpoints, for export and other tasks.

    The file is written when training starts, once the recipe has been accepted. If a run resumes with other settings,
    each change is logged and added to the history at the end of the file, as a comment: `# changed at batch 1200
    (2026-11-22T10:00:00+00:00): optimizer.weight_decay 0.01 -> 0.5`.

    Args:
        resumed: Changes and history of a run that resumes; None for a new run.
    """

    def __init__(self, path: Path, text: str, resumed: ResumedRecipe | None = None) -> None:
        self.path = path
        self.text = text
        self.resumed = resumed
        self._history: list[str] | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        resumed = self.resumed or ResumedRecipe()
        if self._history is None:  # add changes only once, even if `fit` is called again
            self._history = [*resumed.history, *history_lines(resumed.changes, state.timestamp.batch.value)]
            if resumed.changes:
                applied = [f'{_shortened(str(change))} (applied)' for change in resumed.changes]
                log.info('resumed with other settings: %s', '; '.join(applied))
        write_atomically(self.path, self.text + ''.join(f'{line}\n' for line in self._history), create_folder=False)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LOGGED_CHARACTERS else f'{text[: MAX_LOGGED_CHARACTERS - 3]}...'
