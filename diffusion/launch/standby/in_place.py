"""Restart of an attempt in place: the node entry points keep running, and standby processes become the new ranks.

A standby process is started like a rank: as a child of the node entry point in a session of its own, with the
environment of its rank. It runs `python -m diffusion.launch.standby.process`, which imports torch, Composer and the
modules of the recipe's components while the run trains, and then waits. At a restart it gets the environment of the
next attempt and runs run.py as a new process would. Forks of one imported process would need less memory (8 ranks need
about 4 GB of standby processes), but then no imported library may have started a thread or touched a GPU.
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
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.workers import TICK_SECONDS, Outcome, Workers, die_with_parent, start_rank
from diffusion.runs import environment
from diffusion.runs.attempts import Attempt
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit
from diffusion.runs.heartbeats import Beat

CAUSES = ('crash', 'killed')
"""Causes of an end after which the ranks may start again on the same nodes without another preflight. After a hang and
bad hardware, the nodes are checked first, or other nodes are used."""
PORT_SECONDS = 10.0
STANDBY = 'diffusion.launch.standby.process'
ANSWER_SECONDS = 3.0
"""Maximum wait for the answer of a standby process. It first checks the files of its modules, which takes milliseconds
on a local disk."""
STANDBY_AFTER_BATCHES = 2
"""Number of batches of an attempt after which its standby processes are started, so that they do not slow its start."""
_OWN_PACKAGES = ('diffusion', 'torch', 'composer')
MAY_CHANGE = (
    'RANK',
    'WORLD_SIZE',
    'LOCAL_RANK',
    'LOCAL_WORLD_SIZE',
    'NODE_RANK',
    'MASTER_ADDR',
    'MASTER_PORT',
    'TORCH_NCCL_DEBUG_INFO_TEMP_FILE',
    'TORCH_NCCL_DEBUG_INFO_PIPE_FILE',
)
"""Variables that no library reads before it creates a process group; those of this package (DIFFUSION_*) are read when
they are needed. Any other variable may be read at import, as OMP_NUM_THREADS, MKL_*, CUDA_VISIBLE_DEVICES, HF_* and
TORCH_* are, or at the start of Python, as PYTHONPATH and LD_PRELOAD are."""


def modules_of(recipe: Recipe) -> list[str]:
    """Return the modules of this package and its libraries that a training run of a recipe imports."""
    # Exclude the modules of `imports`: the user may change them between two attempts, and they may do anything.
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
    """Return the sorted names of variables that differ and that a library may have read at its import."""
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return sorted(name for name in differing if name not in MAY_CHANGE and not name.startswith('DIFFUSION_'))


class Standby:
    """Process that imports the modules of a rank, and waits to become that rank.

    Call the constructor in the main thread: the kernel kills the process when the thread that started it ends.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], modules: Sequence[str]) -> None:
        self.environ = dict(environ)
        self.ready = False
        """True after the imports."""
        self.channel, theirs = socket.socketpair()
        with theirs:
            number = str(theirs.fileno())
            try:
                self.process = subprocess.Popen(
                    [sys.executable, '-m', STANDBY, number, ','.join(modules), '--', *command],
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
        """Check if the process is ready; return why it never will be, or an empty string."""
        if not self.ready:
            answer = self._answer(0)
            self.ready = answer == 'ready'
            if answer not in ('', 'ready'):
                return answer
        code = self.process.poll()
        return '' if code is None else f'ended with {code}'

    def take_over(self, environ: Mapping[str, str], output: IO[bytes] | None) -> str:
        """Make the process the rank of a new attempt; return why it cannot be, or an empty string.

        Args:
            environ: Environment of the rank in the new attempt.
            output: File of its stdout; None for this process's.
        """
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
        except OSError:  # it has just ended
            answer = ''
        self.channel.close()
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                answer = f'ended with {self.process.wait(TICK_SECONDS)}'
        return '' if answer == 'taken' else answer or f'does not respond within {ANSWER_SECONDS:.0f} s'

    def signal_end(self) -> None:
        """Send the process SIGKILL."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.signal_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ANSWER_SECONDS)
        self.channel.close()

    def _answer(self, seconds: float) -> str:
        """Return the next line of the process, or an empty string if there is none in time."""
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
        """Queue the standby processes that are missing, by local rank; `poll` starts them one after the other."""
        self._waiting = [(rank, each) for rank, each in enumerate(environs) if rank not in self._standbys]
        self._begin, self.taken = time.monotonic(), 0

    def poll(self) -> None:
        """Start the next process when the one before has imported everything; drop those that have ended."""
        for rank, standby in list(self._standbys.items()):
            ready = standby.ready
            if problem := standby.poll():
                self.say(f'standby of local rank {rank} {problem}; a restart will start a new process instead')
                self._standbys.pop(rank).kill()
            elif standby.ready and not ready and not self._waiting:
                seconds = time.monotonic() - self._begin
                self.say(f'standby processes: {len(self._standbys)} ready after {seconds:.0f} s')
        # Start one at a time, since the ranks need the cores.
        if self._waiting and all(standby.ready for standby in self._standbys.values()):
            rank, environ = self._waiting.pop(0)
            try:
                self._standbys[rank] = Standby(self.command, environ, self.modules)
            except (OSError, subprocess.SubprocessError) as error:  # no more processes or memory
                self._waiting = []
                self.say(
                    f'standby of local rank {rank} cannot be started ({error}); a restart will start a new process'
                )

    def start_rank(
        self, local_rank: int, command: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None
    ) -> subprocess.Popen[bytes]:
        """Make a standby process the rank, or start a new process if that is not possible; see `workers.start_rank`."""
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
        """Kill all standby processes."""
        self._waiting = []
        for standby in self._standbys.values():
            standby.signal_end()  # all at once, since one may not end before its file system responds
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
