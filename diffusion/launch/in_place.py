"""Restart of an attempt in place: the node entry points stay, and standby processes become the new ranks."""

from collections.abc import Callable, Mapping, Sequence

from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.launch.attempts import Attempt
from diffusion.launch.heartbeat_file import Beat
from diffusion.launch.node_settings import Settings
from diffusion.launch.standby import STANDBY_AFTER_BATCHES, StandbyPool, modules_of
from diffusion.launch.workers import Outcome, Workers

CAUSES = ('crash', 'killed')
"""Causes of an end after which the ranks may start again on the same nodes without another preflight. After a hang and
bad hardware, the nodes are checked first, or other nodes are used."""


class InPlaceRestarts:
    """Restarts in place of one node.

    Args:
        settings: Settings of the job spec.
        command: run.py, the recipe and its overrides.
        recipe: The loaded recipe.
        environ: Environment of the node entry point.
        say: Function that prints a line for the operator.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        recipe: Recipe,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._command, self._recipe = settings, command, recipe
        self._environ, self._say = environ, say
        self.standbys = StandbyPool(command, modules_of(recipe), say)
        self._furthest: int | None = None
        self._number = -1

    def poll(self, workers: Workers, attempt: Attempt, beats: Mapping[int, Beat]) -> None:
        """Start standby processes once all ranks of an attempt train, and look after them."""
        trains = len(beats) == len(workers.processes) and all(
            beat.batch >= beat.first + STANDBY_AFTER_BATCHES for beat in beats.values()
        )
        if trains and self._number != attempt.number:
            self._number = attempt.number
            self.standbys.start(workers.environs())
        self.standbys.poll()

    def agree(self, outcome: Outcome, attempt: Attempt) -> bool:
        """Return True if the ranks of all nodes start again in place after an attempt."""
        problem = self._problem(outcome, attempt)
        if problem:
            self._say(f'no restart in place, since {problem}')
        return not problem

    def close(self) -> None:
        self.standbys.close()

    def _problem(self, outcome: Outcome, attempt: Attempt) -> str:
        """Return why this node cannot start its ranks again in place, or an empty string."""
        if attempt.last is None:
            return 'the ranks have begun no batch'
        furthest, self._furthest = self._furthest, attempt.last
        if furthest is not None and attempt.last <= furthest:
            return f'two attempts in a row ended at batch {attempt.last}'
        # The next ranks read the recipe again. This process would keep the folder and the settings of the old one.
        try:
            changed = load(self._command[1], self._command[2:], environ=self._environ) != self._recipe
        except UserError:
            changed = True
        return f'{self._command[1]} has changed' if changed else ''

    def may_restart(self, outcome: Outcome) -> bool:
        """Return True if the cause of an end, and the settings, allow a restart in place."""
        allowed = self._settings.max_restarts > 0 and self._settings.action_after(outcome.status) == 'retry'
        return allowed and outcome.cause in CAUSES
