"""The node entry point: `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]`, on every node of a job.

It finds out where the node stands, starts a process for each GPU, hands signals on to them, notices when they hang, and
ends with a status that says what should follow: 0 done, 75 try again, 76 try elsewhere, 78 do not try again, 1 a crash.

The processes are started here, as Composer's launcher would start them, and not by it: told to stop, it leaves them
behind; its exit status says little of theirs; and importing it takes half a minute.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from diffusion.config.load import Recipe, load
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import attempts, environment, heartbeat, liveness, run_lock
from diffusion.launch.attempts import Attempt
from diffusion.launch.aws_secrets import fetch_secrets
from diffusion.launch.rank_discovery import NodePlace, find_place, rank_environment
from diffusion.launch.watchdog import PATIENCE_SECONDS, Watchdog
from diffusion.storage.atomic import write_whole

TICK_SECONDS = 0.1
LOOK_EVERY_SECONDS = 1.0
"""How often beats are read."""
NOTE_EVERY_SECONDS = 30.0
"""How often progress is noted, for the case that this process does not live to write its last line."""
GRACE_SECONDS = 5.0
"""Left to the others when one has failed: they wait for it in a collective, but may still say why."""
MARGIN_SECONDS = 5.0
"""Before the scheduler's SIGKILL comes, for what follows the workers' end."""
KILL_SECONDS = 60.0
"""In which a process that was killed is gone, unless a device or a disk holds it."""
PREFLIGHT_SECONDS = {'fast': 900.0, 'deep': 3600.0}
"""The slowest node may come after five minutes."""
PR_SET_PDEATHSIG = 1
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Outcome:
    """How the processes of an attempt ended."""

    status: int
    cause: str
    """A key of `attempts.CAUSES`."""
    detail: str = ''


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe on this node; its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    environ = dict(os.environ)
    if words[:1] != ['--'] or len(words) < 3:
        print('usage: python -m diffusion.launch.node -- run.py RECIPE [key=value ...]', file=sys.stderr)
        return _leave(2, environ)
    try:
        place = find_place(environ)
        settings = Settings.of(environ)
        recipe = load(words[2], words[3:])
        environ |= fetch_secrets(environ)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return _leave(CONFIG_ERROR, environ)
    node = Node(place, settings, words[1:], recipe, environ)
    return _leave(node.run(), environ, node.outcome)


def run_node_preflight(recipe_words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Check this node, and all others of a job that do the same now, without training; the exit status.

    Args:
        recipe_words: The recipe and its overrides.
        environ: As a back end makes it: level, kind of GPU, number of processes.

    Raises:
        UserError: The recipe is wrong, or the environment contradicts itself.
    """
    place, recipe = find_place(environ), load(recipe_words[0], recipe_words[1:])
    return Node(place, Settings.of(environ), ['run.py', *recipe_words], recipe, environ).check()


@dataclass(frozen=True)
class Settings:
    """What the job spec says of beginnings and endings."""

    actions: Mapping[str, str]
    """What follows an exit status; `*` for all others."""
    max_restarts: int
    in_place: bool
    """Nobody else starts the processes again."""
    notice_seconds: float
    patience_seconds: float
    preflight: str
    """none, fast or deep."""

    @staticmethod
    def of(environ: Mapping[str, str]) -> 'Settings':
        """From the environment that a back end has made.

        Raises:
            UserError: A variable is not what it should be.
        """
        said = environ.get(environment.ON_EXIT, f'{CONFIG_ERROR}=stop,*=retry')
        words = [entry.partition('=') for entry in said.split(',')]
        actions = {status: action for status, _, action in words}
        level = environ.get(environment.PREFLIGHT, 'none')
        if level not in ('none', *PREFLIGHT_SECONDS):
            raise UserError(f'{environment.PREFLIGHT}: {level!r} is none of none, {", ".join(PREFLIGHT_SECONDS)}')
        return Settings(
            actions,
            int(_number(environ, environment.MAX_RESTARTS, sys.maxsize)),
            environ.get(environment.RESTART_IN_PLACE) == '1',
            _number(environ, environment.NOTICE_SECONDS, 120),
            _number(environ, environment.HANG_SECONDS, PATIENCE_SECONDS),
            level,
        )

    def follows(self, status: int) -> str:
        """retry, elsewhere or stop."""
        return self.actions.get(str(status), self.actions.get('*', 'retry'))


class Node:
    """One node of a job.

    Args:
        place: Where it stands.
        settings: What follows an ending.
        command: run.py, the recipe and its overrides.
        recipe: What they say. Of a training, the first node has the lock of the run's folder, and keeps account there.
        environ: For the processes.
    """

    def __init__(
        self, place: NodePlace, settings: Settings, command: Sequence[str], recipe: Recipe, environ: Mapping[str, str]
    ) -> None:
        self.place, self.settings, self.command, self.run_dir = place, settings, list(command), recipe.run_dir
        self.trains = recipe.task == 'train'
        self.keeps = self.trains and place.rank == 0
        self.environ = {**environ, run_lock.HELD: '1'} if self.trains else environ
        self.told = False
        """Whether this node was told to stop."""
        self.outcome: Outcome | None = None
        """Of the last attempt."""

    def run(self) -> int:
        """Start the processes, again if that is this node's part; the exit status."""
        self._listen()
        with contextlib.ExitStack() as stack:
            try:
                if self.keeps:
                    stack.enter_context(run_lock.held(self.run_dir, self.environ, stopped=self._stops_waiting))
            except run_lock.Taken as error:
                self._say(str(error))
                return PREEMPTED if self.told else FAILED if error.again else CONFIG_ERROR
            except OSError as error:
                self._say(f'{self.run_dir}: cannot be written ({error}); is it mounted, and is there room?')
                return FAILED
            return self._attempts()

    def check(self) -> int:
        """Only see whether the nodes are fit; the exit status."""
        self.keeps = False
        self._listen()
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            outcome = self._preflight(Path(folder), Attempt(0, time.time()))
        if outcome.status:
            self._say(attempts.describe_attempt(outcome.cause, outcome.detail))
        return outcome.status

    def _attempts(self) -> int:
        restarts = 0
        while True:
            earlier = self._earlier()
            problem = attempts.hopeless(earlier, self.settings.max_restarts)
            if problem is not None:
                self._say(f'{self.run_dir / attempts.ATTEMPTS}: {problem}')
                return CONFIG_ERROR
            outcome = self._attempt(len(earlier))
            again = self.settings.in_place and self.settings.follows(outcome.status) == 'retry'
            if outcome.status == 0 or self.told or not again or restarts == self.settings.max_restarts:
                return outcome.status
            restarts += 1

    def _stops_waiting(self) -> bool:
        liveness.say_alive()
        return self.told

    def _earlier(self) -> list[Attempt]:
        """The attempts before; the first node alone looks, since it adds to them."""
        with contextlib.suppress(ValueError):
            return attempts.read_attempts(self.run_dir) if self.keeps else []
        return []

    def _attempt(self, number: int) -> Outcome:
        attempt = Attempt(number, time.time())
        self._account('begin', attempt)
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            outcome = self._preflight(Path(folder), attempt)
            if outcome.status == 0:
                outcome = self._start(self.command, Path(folder), attempt)
        attempt.end, attempt.status = time.time(), outcome.status
        attempt.cause, attempt.detail = self._why(outcome)
        self.outcome = outcome
        self._account('end', attempt)
        if outcome.status:
            self._say(attempts.describe_attempt(attempt.cause, attempt.detail))
        return outcome

    def _why(self, outcome: Outcome) -> tuple[str, str]:
        """The cause of an attempt's end, and its detail: a node may be told to stop, or fail, because of another."""
        first = self._failed_elsewhere()
        if first is None or outcome.cause not in ('preempted', 'crash') or first.cause == outcome.cause:
            return outcome.cause, outcome.detail
        return first.cause, f'{first.machine}: {first.detail or f"status {first.status}"}'

    def _failed_elsewhere(self) -> 'Ending | None':
        """How another node has failed, and so ended this attempt."""
        first = first_bad(self.environ)
        return None if first is None or first.cause == 'preempted' else first

    def _preflight(self, folder: Path, attempt: Attempt) -> Outcome:
        """See whether the nodes are fit, before anything is trained."""
        level = self.settings.preflight
        if level == 'none':
            return Outcome(0, 'done')
        command = ['-m', 'diffusion.preflight', level, *self.command[1:]]
        outcome = self._start(command, folder, attempt, limit_seconds=PREFLIGHT_SECONDS[level])
        if self.told:
            return Outcome(PREEMPTED, 'preempted')
        if outcome.status == PREEMPTED:
            time.sleep(GRACE_SECONDS)  # the node that is at fault says so first
        return replace(outcome, detail=f'preflight: {outcome.detail or "see its table"}')

    def _start(
        self, command: Sequence[str], folder: Path, attempt: Attempt, *, limit_seconds: float | None = None
    ) -> Outcome:
        """Start a program on all GPUs, and wait for its end, or for so long."""
        workers = Workers(self.place, command, {**self.environ, heartbeat.FOLDER: str(folder)}, folder)
        try:
            outcome = self._watch(workers, attempt, limit_seconds)
        finally:
            stuck = workers.kill()
            self._take_beats(workers, attempt)
        if stuck:
            # They wait for a device or a disk that does not answer.
            detail = f'process {", ".join(map(str, stuck))} cannot be killed'
            return Outcome(BAD_HARDWARE, 'hardware', detail)
        return outcome

    def _watch(self, workers: 'Workers', attempt: Attempt, limit_seconds: float | None) -> Outcome:
        """Wait for the end of the processes, or bring it about."""
        begin = time.time()
        watchdog = Watchdog(begin, self.settings.patience_seconds) if self.trains and limit_seconds is None else None
        looked, noted = 0.0, time.monotonic()
        deadline, handed_on = float('inf'), False
        while not workers.ended():
            now = time.monotonic()
            if self.told and not handed_on:
                handed_on = True
                workers.signal(signal.SIGTERM)
                # Where another node has failed, there is nobody left to save with, and the scheduler waits for less.
                notice = max(1.0, self.settings.notice_seconds - MARGIN_SECONDS)
                deadline = min(deadline, now + (GRACE_SECONDS if self._failed_elsewhere() else notice))
            if deadline == float('inf') and workers.any_ended_badly():
                # Of those who were told to stop, each saves its own part.
                stopping = set(workers.codes()) <= {None, 0, PREEMPTED}
                deadline = now + (self.settings.notice_seconds if stopping else GRACE_SECONDS)
            if now > deadline:
                return workers.outcome(told=self.told, late=True)
            if now - looked > LOOK_EVERY_SECONDS:
                looked = now
                liveness.say_alive()
                beats = heartbeat.last_beats(workers.folder)
                if beats and attempt.first is None:
                    noted = -NOTE_EVERY_SECONDS  # at once
                problem = None if watchdog is None else watchdog.look(beats, time.time())
                if limit_seconds is not None and time.time() - begin > limit_seconds:
                    problem = f'no end in {limit_seconds:.0f} s'
                if problem is not None:
                    workers.write_stacks()
                    self._keep_stacks(workers)
                    return Outcome(PREEMPTED, 'hang', problem)
            if now - noted > NOTE_EVERY_SECONDS:
                noted = now
                self._take_beats(workers, attempt)
                self._account('progress', attempt)
            workers.reap_orphans()
            time.sleep(TICK_SECONDS)
        return workers.outcome(told=self.told)

    def _take_beats(self, workers: 'Workers', attempt: Attempt) -> None:
        beats = heartbeat.last_beats(workers.folder)
        if beats:
            first = beats[min(beats)]
            attempt.first, attempt.first_at = first.first, first.first_at
            attempt.last, attempt.last_at = first.batch, first.at

    def _keep_stacks(self, workers: 'Workers') -> None:
        found = heartbeat.stacks(workers.folder)
        path = self.run_dir / f'stacks-{time.strftime("%Y%m%d-%H%M%S")}-node{self.place.rank}.txt'
        with contextlib.suppress(OSError):
            write_whole(path, ''.join(f'--- rank {rank}\n{text}\n' for rank, text in found.items()))
            self._say(f'the stacks of {len(found)} of {self.place.processes} ranks are in {path}')

    def _account(self, event: str, attempt: Attempt) -> None:
        if not self.keeps:
            return
        try:
            attempts.append_attempt(self.run_dir, event, attempt)
        except OSError as error:
            self._say(f'{self.run_dir / attempts.ATTEMPTS} cannot be written ({error}); going on without')

    def _say(self, text: str) -> None:
        print(f'node {self.place.rank}: {text}', file=sys.stderr, flush=True)

    def _listen(self) -> None:
        for number in STOPPING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.told = True


@dataclass
class Workers:
    """The processes of a node, one a GPU, each with its children in a group of its own.

    Args:
        place: Of the node.
        command: run.py and its arguments.
        environ: For all of them.
        folder: For what they report.
    """

    place: NodePlace
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for local_rank in range(self.place.processes):
            # What the first rank prints is for people; what all complain of is.
            output = None if local_rank == 0 else (self.folder / f'output-{local_rank}.txt').open('wb')
            process = subprocess.Popen(
                [sys.executable, *self.command],
                env=rank_environment(self.place, local_rank, self.environ),
                stdout=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            self.processes.append(process)
            if output is not None:
                output.close()

    def codes(self) -> list[int | None]:
        """Exit statuses, negative for a signal, None for who still runs."""
        return [process.poll() for process in self.processes]

    def ended(self) -> bool:
        return None not in self.codes()

    def any_ended_badly(self) -> bool:
        return any(code for code in self.codes())

    def outcome(self, *, told: bool, late: bool = False) -> Outcome:
        """What these exit statuses mean together."""
        first = self.place.rank * self.place.processes
        codes = {first + local: code for local, code in enumerate(self.codes())}
        for status, cause in ((CONFIG_ERROR, 'mistake'), (BAD_HARDWARE, 'hardware')):
            if status in codes.values():
                return Outcome(status, cause)
        killed = [f'rank {rank} by {signal.Signals(-code).name}' for rank, code in codes.items() if code and code < 0]
        failed = [f'rank {rank} with {code}' for rank, code in codes.items() if code and code > 0 and code != PREEMPTED]
        if told and not failed:
            detail = 'it did not save in time' if late or killed else ''
            done = set(codes.values()) == {0}
            return Outcome(0, 'done') if done else Outcome(PREEMPTED, 'preempted', detail)
        if killed:  # which makes others fail, and those say nothing of use
            return Outcome(FAILED, 'killed', ', '.join(killed))
        if failed:
            return Outcome(FAILED, 'crash', ', '.join(failed))
        return Outcome(PREEMPTED, 'preempted') if PREEMPTED in codes.values() else Outcome(0, 'done')

    def signal(self, number: int) -> None:
        """Tell every process that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def write_stacks(self) -> None:
        """Have every process write what its threads are at, so far as it still can."""
        self.signal(heartbeat.SIGNAL)
        until = time.monotonic() + GRACE_SECONDS
        while len(heartbeat.stacks(self.folder)) < len(self.processes) and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
        time.sleep(LOOK_EVERY_SECONDS)  # so that they end what they have begun

    def kill(self) -> list[int]:
        """End all processes, and what they have started and left; those that even that does not end."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        stuck, until = [], time.monotonic() + KILL_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(process.pid)
        return stuck

    def reap_orphans(self) -> None:
        """As the first process of a container, take leave of whoever lost his parent."""
        if os.getpid() != 1:
            return
        own = {process.pid for process in self.processes}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in own:
                    return  # whose status is for poll(); the others' turn comes when it is fetched
                os.waitpid(ended.si_pid, 0)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is killed; elsewhere than on Linux it lives on."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise UserError(f'{name}: {environ[name]!r} is no number') from None


@dataclass(frozen=True)
class Ending:
    """What a node has said of its end."""

    status: int
    machine: str
    cause: str
    """A key of `attempts.CAUSES`."""
    detail: str

    @staticmethod
    def of(line: str) -> 'Ending | None':
        """From its line in the file; None for half of one."""
        status, machine, cause, detail = (*line.split(' ', 3), '', '', '')[:4]
        if not status.isdigit():
            return None
        usual = {0: 'done', PREEMPTED: 'preempted', BAD_HARDWARE: 'hardware', CONFIG_ERROR: 'mistake'}
        return Ending(int(status), machine, cause or usual.get(int(status), 'crash'), detail)


def first_bad(environ: Mapping[str, str]) -> Ending | None:
    """The first node of this attempt that ended badly, so far as they say."""
    try:
        lines = Path(environ[environment.EXIT_FILE]).read_text(encoding='utf-8').splitlines()
    except (KeyError, OSError):
        return None
    return next((ending for ending in map(Ending.of, lines) if ending is not None and ending.status), None)


def _leave(status: int, environ: Mapping[str, str], outcome: Outcome | None = None) -> int:
    """Say to the other nodes how this one ended."""
    liveness.forget()
    why = '' if outcome is None or outcome.status != status else f' {outcome.cause} {outcome.detail}'.rstrip()
    path = environ.get(environment.EXIT_FILE)
    if path is not None:
        try:
            with open(path, 'a', encoding='utf-8') as file:
                file.write(f'{status} {environment.machine_name(environ)}{why}\n')
        except OSError as error:
            print(f'{path}: cannot be written ({error})', file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main())
