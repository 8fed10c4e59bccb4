"""Write the recipe that a run is trained with to its folder, with a history of the changes made on resume."""

import logging
from dataclasses import dataclass
from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.config.resume_rules import Change, history_lines
from diffusion.storage.atomic import write_atomically

log = logging.getLogger(__name__)

MAX_LOGGED_CHARACTERS = 200
"""Longest text of a change in the log; the history has the whole text."""


@dataclass(frozen=True)
class ResumedRecipe:
    """Recipe of a run that resumes, compared with the one that its checkpoint was trained with."""

    changes: tuple[Change, ...] = ()
    """The values that have changed; all of them are applied."""
    history: tuple[str, ...] = ()
    """Lines of the history so far."""


class RecipeKeeper(Callback):
    """Callback that writes the resolved recipe beside the checkpoints; export and other tasks need only this folder.

    The file is written when training starts, after the recipe was accepted. If a run resumes with other settings, each
    change is logged and added to the history at the end of the file, as a comment: `# changed at batch 1200
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
        if self._history is None:  # once, although `fit` may be called several times
            self._history = [*resumed.history, *history_lines(resumed.changes, state.timestamp.batch.value)]
            if resumed.changes:
                applied = [f'{_shortened(str(change))} (applied)' for change in resumed.changes]
                log.info('resumed with other settings: %s', '; '.join(applied))
        write_atomically(self.path, self.text + ''.join(f'{line}\n' for line in self._history), create_folder=False)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LOGGED_CHARACTERS else f'{text[: MAX_LOGGED_CHARACTERS - 3]}...'
