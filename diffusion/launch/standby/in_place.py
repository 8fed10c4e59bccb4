"""Restart of an attempt in place: the node entry points keep running, and standby processes become the new ranks.

A standby process is started like a rank: as a child of the node entry point in a session of its own, with the
environment of its rank. It runs `python -m diffusion.launch.standby.process`, which, while the ranks train, imports
torch, Composer and the modules of the recipe's components, and then waits. At a restart it receives the environment of
the next attempt and runs run.py as a new process would. Standby processes of 8 ranks need about 4 GB of memory. Forking
them from one process would save memory, but would require that no imported library starts a thread or touches a GPU.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from diffusion.config import registry
from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.launch.exit_file import NodeExit
from diffusion.launch.node_link import Agreement, NodeLink
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import RANK_VARIABLES, NodePosition
from diffusion.launch.workers import TICK_SECONDS, Outcome, Workers, die_with_parent, start_rank
from diffusion.runs import environment
from diffusion.runs.attempts import Attempt
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit
from diffusion.runs.heartbeats import Beat

CAUSES = ('crash', 'killed')
"""Causes of an attempt's end after which the ranks may restart on the same nodes without another preflight. After a
hang or bad hardware, the nodes are checked first, or other nodes are used."""
PORT_SECONDS = 10.0
STANDBY = 'diffusion.launch.standby.process'
ANSWER_SECONDS = 3.0
"""Maximum time to wait until a standby process agrees to take over. It first checks if the files of its modules have
changed, which takes milliseconds on a local disk."""
STANDBY_AFTER_BATCHES = 2
"""Number of batches after which an attempt starts its standby processes, so that they do not slow down its startup."""
_OWN_PACKAGES = ('diffusion', 'torch', 'composer')
MAY_CHANGE = (*RANK_VARIABLES, 'TORCH_NCCL_DEBUG_INFO_TEMP_FILE', 'TORCH_NCCL_DEBUG_INFO_PIPE_FILE')
"""Variables that may differ between attempts, because no library reads them before it creates a process group. This
package's own variables, DIFFUSION_*, may differ too. Others may be read at import (OMP_NUM_THREADS, MKL_*,
CUDA_VISIBLE_DEVICES, HF_*, TORCH_*) or at Python's start (PYTHONPATH, LD_PRELOAD)."""


def modules_of(recipe: Recipe) -> list[str]:
    """Return the modules of this package and its libraries that training with a recipe imports."""
    # Exclude the user's modules in `imports`: they may change between attempts, and may have side effects.
    named = [('model', recipe.model), ('dataset', recipe.dataset), ('eval_dataset', recipe.eval_dataset)]
    named += [('optimizer', recipe.optimizer), ('scheduler', recipe.scheduler)]
    for kind in ('algorithm', 'callback', 'logger', 'evaluator'):
        named += [(kind, each) for each in getattr(recipe, f'{kind}s').values()]
    found = ['diffusion.tasks.run_recipe', 'diffusion.training.train']
    for kind, component in named:
        target = None if component is None else registry.TARGETS[kind.removeprefix('eval_')].get(component.name)
        if isinstance(target, str) and target.partition('.')[0] in _OWN_PACKAGES:
            found.append(target.partition(':')[0])
    return list(dict.fromkeys(found))


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the sorted names of changed variables that a library may have read when it was imported."""
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in differing if name not in MAY_CHANGE and not name.startswith('DIFFUSION_'))


class Standby:
    """Process that imports a rank's modules and then waits to become that rank.

    Call the constructor in the main thread: the kernel kills the process when the thread that started it ends.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], modules: Sequence[str]) -> None:
        self.environ = dict(environ)
        self.ready = False
        """True once the imports are done."""
        self.channel, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, '-m', STANDBY, str(theirs.fileno()), ','.join(modules), '--', *command],
                    env=self.environ,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                self.channel.close()
                raise
        self.channel.setblocking(False)

    def poll(self) -> str:
        """Check if the process is ready; return why it cannot become ready, or an empty string."""
        if not self.ready:
            answer = self._answer(0)
            self.ready = answer == 'ready'
            if answer not in ('', 'ready'):
                return answer
        code = self.process.poll()
        return '' if code is None else f'ended with {code}'

    def take_over(self, environ: Mapping[str, str], output: IO[bytes] | None) -> str:
        """Turn the process into a rank with stdout `output` (None: this process's); return why this fails, or ''."""
        problem = self.poll()
        if problem or not self.ready:
            return problem or 'has not imported everything yet'
        if changed := changed_variables(self.environ, environ):
            return f'was started with another value of {", ".join(changed)}'
        text = json.dumps({'environ': dict(environ)}).encode()
        try:
            self.channel.settimeout(ANSWER_SECONDS)
            descriptors = [] if output is None else [output.fileno()]
            socket.send_fds(self.channel, [len(text).to_bytes(4, 'big')], descriptors)
            self.channel.sendall(text)
            answer = self._answer(ANSWER_SECONDS)
        except OSError:  # the process has just ended
            answer = ''
        self.channel.close()
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                answer = f'ended with {self.process.wait(TICK_SECONDS)}'
        return '' if answer == 'taken' else answer or f'does not respond within {ANSWER_SECONDS:.0f} s'

    def signal_end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.signal_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ANSWER_SECONDS)
        self.channel.close()

    def _answer(self, seconds: float) -> str:
        self.channel.settimeout(seconds)
        with contextlib.suppress(OSError):  # no line yet, or the process has ended
            return self.channel.recv(4096).decode(errors='replace').partition('\n')[0]
        return ''


class StandbyPool:
    """Standby processes of a node, one per rank; `say` prints a line for the operator."""

    def __init__(self, command: Sequence[str], modules: Sequence[str], say: Callable[[str], None]) -> None:
        self.command, self.modules, self.say = list(command), list(modules), say
        self._waiting: list[tuple[int, Mapping[str, str]]] = []
        self._standbys: dict[int, Standby] = {}
        self._begin = 0.0
        self.taken = 0
        """Number of standby processes that have become ranks of the current attempt."""

    @property
    def pids(self) -> set[int]:
        return {standby.process.pid for standby in self._standbys.values()}

    def start(self, environs: Sequence[Mapping[str, str]]) -> None:
        """Queue the missing standby processes, in the order of local ranks; `poll` starts them one after the other."""
        self._waiting = [(rank, each) for rank, each in enumerate(environs) if rank not in self._standbys]
        self._begin, self.taken = time.monotonic(), 0

    def poll(self) -> None:
        """Start the next process once the previous one has imported everything; drop processes that have ended."""
        for rank, standby in list(self._standbys.items()):
            ready = standby.ready
            if problem := standby.poll():
                self.say(f'standby of local rank {rank} {problem}; a restart will start a new process instead')
                self._standbys.pop(rank).kill()
            elif standby.ready and not ready and not self._waiting:
                self.say(f'standby processes: {len(self._standbys)} ready after {time.monotonic() - self._begin:.0f} s')
        # Start one at a time, because the ranks need the CPU cores.
        if self._waiting and all(standby.ready for standby in self._standbys.values()):
            rank, environ = self._waiting.pop(0)
            try:
                self._standbys[rank] = Standby(self.command, environ, self.modules)
            except (OSError, subprocess.SubprocessError) as error:  # no processes or memory left
                self._waiting = []
                problem = f'cannot be started ({error}); a restart will start a new process'
                self.say(f'standby of local rank {rank} {problem}')

    def start_rank(
        self, local_rank: int, command: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        """Turn a standby process into the rank, or else start a process; arguments as for `workers.start_rank`."""
        if local_rank == 0:
            self.taken = 0
        self._waiting = []
        standby = self._standbys.pop(local_rank, None)
        if standby is not None:
            problem = standby.take_over(environ, output)
            if not problem:
                self.taken += 1
                return standby.process
            self.say(f'standby of local rank {local_rank} {problem}; starting a new process')
            standby.kill()
        return start_rank(local_rank, command, environ, output)

    def close(self) -> None:
        self._waiting = []
        for standby in self._standbys.values():
            standby.signal_end()  # signal all before waiting, since each may end only when its file system responds
        while self._standbys:
            self._standbys.popitem()[1].kill()


class InPlaceRestarts:
    """In-place restarts of one node; `say` prints a line for the operator."""

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
        self._environ, self._say, self._position = environ, say, position
        self.standbys = StandbyPool(command, modules_of(recipe), say)
        self._link = NodeLink(position, environ.get(environment.JOB, ''), say) if position.nodes > 1 else None
        self._furthest: int | None = None
        """Number of batches completed at the end of this process's last attempt; None during the first."""
        self._number = 0
        """Index of the current attempt in this process; it is the same on all nodes."""
        self._started = False
        self._reported = False

    def poll(self, workers: Workers, beats: Mapping[int, Beat]) -> None:
        """Start standby processes once all ranks of an attempt are training; drop standby processes that have ended."""
        trains = len(beats) == len(workers.processes) and all(
            beat.batch >= beat.first + STANDBY_AFTER_BATCHES for beat in beats.values()
        )
        if trains and not self._started:
            self._started = True
            self.standbys.start(workers.environs())
        self.standbys.poll()

    def report_failure(self, outcome: Outcome) -> None:
        """Report to the other nodes, once per attempt, that a rank of this node has failed."""
        if self._link is not None and not self._reported:
            self._link.report_failure(self._number, self._exit_of(outcome))
        self._reported = True

    def failure_elsewhere(self) -> NodeExit | None:
        """Return the first failure on another node in the current attempt, or None."""
        return None if self._link is None else self._link.failure(self._number)

    def agree(self, outcome: Outcome, attempt: Attempt, stopped: Callable[[], bool]) -> Agreement:
        """Report that this node's ranks have ended, and return the decision of all nodes about a restart in place.

        If `stopped` returns True, do not wait for the decision: the ranks are not restarted.
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
        if self._link is not None:
            self._link.close()
        self.standbys.close()

    def _problem(self, outcome: Outcome, attempt: Attempt) -> str:
        """Return why this node cannot restart its ranks in place, or an empty string."""
        furthest, self._furthest = self._furthest, attempt.last
        if outcome.cause not in CAUSES or self._settings.action_after(outcome.status) != 'retry':
            return f'ended with {outcome.status}, {outcome.cause}'
        if self._settings.max_restarts == 0:
            return 'restarts are turned off'
        if attempt.last is None:
            return 'the ranks have begun no batch'
        if furthest is not None and attempt.last <= furthest:
            return f'two attempts in a row ended at batch {attempt.last} or before'
        # Refuse if the recipe has changed: the new ranks would use the new one, but this process the old one.
        path, *overrides = self._command[1:]
        try:
            recipe = call_with_limit(lambda: load(path, overrides, environ=self._environ), STORAGE_SECONDS, None)
        except (UserError, OSError):  # OSError: the recipe file's storage fails
            recipe = None
        return '' if recipe == self._recipe else f'{path} has changed, or cannot be read'

    def _exit_of(self, outcome: Outcome) -> NodeExit:
        return NodeExit(outcome.status, environment.machine_name(self._environ), outcome.cause, outcome.detail)


def wait_for_port(port: int) -> None:
    """Wait at most PORT_SECONDS until no process on this machine listens on a port."""
    # The port may stay in use briefly: rank 0's loader workers inherit its socket and exit shortly after rank 0.
    until = time.monotonic() + PORT_SECONDS
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_server(('', port)):
            return
        time.sleep(TICK_SECONDS / 5)
