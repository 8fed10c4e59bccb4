"""Restart of an attempt in place: the node entry points keep running, and standby processes become the new ranks."""

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.launch.exit_file import NodeExit
from diffusion.launch.node_link import Agreement, NodeLink
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.standby import STANDBY_AFTER_BATCHES, StandbyPool, modules_of
from diffusion.launch.workers import TICK_SECONDS, Outcome, Workers
from diffusion.runs import environment
from diffusion.runs.attempts import Attempt
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit
from diffusion.runs.heartbeat_file import Beat

CAUSES = ('crash', 'killed')
"""Causes of an end after which the ranks may start again on the same nodes without another preflight. After a hang and
bad hardware, the nodes are checked first, or other nodes are used."""

PORT_SECONDS = 10.0


class InPlaceRestarts:
    """In-place restarts of one node.

    Args:
        command: run.py, the recipe and its overrides.
        say: Function that prints a line for the operator.
    """

    def __init__(
        self,
        position: NodePosition,
        settings: Settings,
        command: Sequence[str],
        recipe: Recipe,
        environ: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._command, self._recipe = settings, command, recipe
        self._environ, self._say = environ, say
        self.standbys = StandbyPool(command, modules_of(recipe), say)
        self._position = position
        self._link: NodeLink | None = None
        if position.nodes > 1:
            self._link = NodeLink(position, environ.get(environment.JOB, ''), say)
        self._furthest: int | None = None
        """Batches completed at the end of the last attempt of this process."""
        self._number = 0
        """Index of the current attempt among those of this process, the same on all nodes."""
        self._started = False
        self._reported = False

    def poll(self, workers: Workers, beats: Mapping[int, Beat]) -> None:
        """Start standby processes once all ranks of an attempt train, and drop those that have ended."""
        trains = len(beats) == len(workers.processes) and all(
            beat.batch >= beat.first + STANDBY_AFTER_BATCHES for beat in beats.values()
        )
        if trains and not self._started:
            self._started = True
            self.standbys.start(workers.environs())
        self.standbys.poll()

    def report_failure(self, outcome: Outcome) -> None:
        """Tell the other nodes, once per attempt, that a rank of this node has failed."""
        if self._link is not None and not self._reported:
            self._link.report_failure(self._number, self._exit_of(outcome))
        self._reported = True

    def failure_elsewhere(self) -> NodeExit | None:
        """Return the first failure of another node in the current attempt, or None."""
        return None if self._link is None else self._link.failure(self._number)

    def agree(self, outcome: Outcome, attempt: Attempt, stopped: Callable[[], bool]) -> Agreement:
        """Return the decision of all nodes about a restart in place; call it when the ranks of this node have ended.

        Args:
            stopped: Polled while waiting for the other nodes; the wait ends when it returns True.
        """
        problem = self._problem(outcome, attempt)
        agreement = Agreement(not problem, reason=problem)
        if self._link is not None:
            agreement = self._link.agree(self._number, self._exit_of(outcome), problem, stopped)
        if not agreement.restart and outcome.cause in CAUSES:
            self._say(f'no restart in place: {agreement.reason}')
        if agreement.restart and self._position.rank == 0:
            wait_for_port(self._position.master_port)
        self._number += 1
        self._started = self._reported = False
        return agreement

    def close(self) -> None:
        """Leave the job, and end the standby processes."""
        if self._link is not None:
            self._link.close()
        self.standbys.close()

    def _problem(self, outcome: Outcome, attempt: Attempt) -> str:
        """Return why this node cannot start its ranks again in place, or an empty string."""
        furthest, self._furthest = self._furthest, attempt.last
        if outcome.cause not in CAUSES or self._settings.action_after(outcome.status) != 'retry':
            return f'ended with {outcome.status}, {outcome.cause}'
        if self._settings.max_restarts == 0:
            return 'restarts are turned off'
        if attempt.last is None:
            return 'the ranks have begun no batch'
        if furthest is not None and attempt.last <= furthest:
            return f'two attempts in a row ended at batch {attempt.last} or before'
        # The next ranks read the recipe again, but this process keeps the folder and the settings of the old recipe.
        path, *overrides = self._command[1:]
        try:
            recipe = call_with_limit(lambda: load(path, overrides, environ=self._environ), STORAGE_SECONDS, None)
        except (UserError, OSError):  # OSError: the storage of the recipe's file fails, perhaps with that of the ranks
            recipe = None
        return '' if recipe == self._recipe else f'{path} has changed, or cannot be read'

    def _exit_of(self, outcome: Outcome) -> NodeExit:
        return NodeExit(outcome.status, environment.machine_name(self._environ), outcome.cause, outcome.detail)


def wait_for_port(port: int) -> None:
    """Wait until no process listens on a port of this machine, at most PORT_SECONDS."""
    # The data loader workers of the first rank inherit the socket of its rendezvous, and end shortly after it.
    until = time.monotonic() + PORT_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_server(('', port)):
            return
        time.sleep(TICK_SECONDS / 5)
