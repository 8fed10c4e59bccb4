"""Node entry point, `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]`, run on every node of a job.

It determines the rank of the node, starts one process per GPU, forwards signals to them, and ends them if they hang.
Its exit status tells the scheduler how to continue: 0 done, 75 retry, 76 retry on other nodes, 78 do not retry, 1
crash.
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
from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import attempts, environment, heartbeat_file, liveness, run_lock
from diffusion.launch.attempts import Attempt
from diffusion.launch.aws_secrets import fetch_secrets
from diffusion.launch.rank_discovery import NodePosition, find_position, rank_environment
from diffusion.launch.watchdog import HANG_SECONDS, Watchdog
from diffusion.storage.atomic import write_atomically

TICK_SECONDS = 0.1
CHECK_EVERY_SECONDS = 1.0
"""Interval at which heartbeats are checked."""
RECORD_EVERY_SECONDS = 30.0
"""Interval at which progress is recorded, for the case that this process is killed before it can record the end."""
GRACE_SECONDS = 5.0
"""Time for the other ranks to end after one has failed. They wait for it in a collective, but may still report an
error."""
MARGIN_SECONDS = 5.0
"""Time reserved for cleanup between the end of the workers and the SIGKILL of the scheduler."""
KILL_SECONDS = 60.0
"""Time after which a killed process that still exists counts as stuck in a device or disk operation."""
PREFLIGHT_SECONDS = {'fast': 900.0, 'deep': 3600.0}
"""Maximum duration of the preflight by level. The slowest node may start five minutes late."""
PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Outcome:
    """Result of one attempt of a job on this node: exit status, cause and detail."""

    status: int
    cause: str
    """A key of `attempts.CAUSES`."""
    detail: str = ''


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe on this node and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    environ = dict(os.environ)
    if words[:1] != ['--'] or len(words) < 3:
        print('usage: python -m diffusion.launch.node -- run.py RECIPE [key=value ...]', file=sys.stderr)
        return _report_exit(2, environ)
    try:
        position = find_position(environ)
        settings = Settings.from_environ(environ)
        # Loaded here too, so that a mistake in the recipe ends the job before any process is started.
        recipe = load(words[2], words[3:])
        environ |= fetch_secrets(environ)
    except (UserError, ExternalError) as error:
        print(f'error: {error}', file=sys.stderr)
        return _report_exit(error.exit_status, environ)
    node = Node(position, settings, words[1:], recipe, environ)
    return _report_exit(node.run(), environ, node.outcome)


def run_node_preflight(recipe_words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the preflight on this node, together with all nodes of the job that run it now; return the exit status.

    Args:
        recipe_words: The recipe and its overrides.
        environ: The environment that a launch backend would set: preflight level, GPU model, number of processes.

    Raises:
        UserError: The recipe is wrong, or the variables contradict each other.
        ExternalError: The scheduler does not respond.
    """
    position, recipe = find_position(environ), load(recipe_words[0], recipe_words[1:])
    return Node(position, Settings.from_environ(environ), ['run.py', *recipe_words], recipe, environ).check()


@dataclass(frozen=True)
class Settings:
    """Settings of a job that the node entry point reads from its environment variables."""

    actions: Mapping[str, str]
    """Action by exit status; `*` is the action for all others."""
    max_restarts: int
    in_place: bool
    """True if the node entry point restarts the workers itself because the scheduler does not."""
    notice_seconds: float
    hang_seconds: float
    preflight: str
    """Preflight level: none, fast or deep."""

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> 'Settings':
        """Return the settings of the job from the environment variables that a launch backend has set.

        Raises:
            UserError: A variable has an invalid value.
        """
        on_exit = environ.get(environment.ON_EXIT, f'{CONFIG_ERROR}=stop,*=retry')
        words = [entry.partition('=') for entry in on_exit.split(',')]
        actions = {status: action for status, _, action in words}
        level = environ.get(environment.PREFLIGHT, 'none')
        if level not in ('none', *PREFLIGHT_SECONDS):
            raise UserError(f'{environment.PREFLIGHT}: {level!r} is unknown; use none, {", ".join(PREFLIGHT_SECONDS)}')
        return Settings(
            actions,
            int(_number(environ, environment.MAX_RESTARTS, sys.maxsize)),
            environ.get(environment.RESTART_IN_PLACE) == '1',
            _number(environ, environment.NOTICE_SECONDS, 120),
            _number(environ, environment.HANG_SECONDS, HANG_SECONDS),
            level,
        )

    def action_after(self, status: int) -> str:
        """Return the action of the job after an exit status: retry, elsewhere (retry on other nodes) or stop."""
        return self.actions.get(str(status), self.actions.get('*', 'retry'))


class Node:
    """One node of a job, which runs the attempts of the job in sequence.

    Args:
        position: Rank of the node in the job.
        settings: Settings of the job spec.
        command: run.py, the recipe and its overrides.
        recipe: The loaded recipe.
        environ: Environment of the processes.
    """

    def __init__(
        self,
        position: NodePosition,
        settings: Settings,
        command: Sequence[str],
        recipe: Recipe,
        environ: Mapping[str, str],
    ) -> None:
        self.position, self.settings, self.command = position, settings, list(command)
        self.run_dir = recipe.run_dir
        self.trains = recipe.task == 'train'
        self.owns_run = self.trains and position.rank == 0
        """True on the first node of a training run, which holds the lock of the run folder and records the attempts
        there."""
        # Without HELD, the first rank would try to take the lock that this process holds.
        self.environ = {**environ, run_lock.LOCK_HELD_VARIABLE: '1'} if self.trains else environ
        self.stop_requested = False
        self.outcome: Outcome | None = None
        """Outcome of the last attempt, or None before its end."""
        self._epoch = time.time() - time.monotonic()
        """Offset from time.monotonic() to the wall clock, fixed at start: recorded times must not jump when the system
        clock is set."""

    def run(self) -> int:
        """Run the job on this node, and return the exit status of the last attempt.

        There is one attempt, because the scheduler restarts a failed job by its exit status. Only SageMaker does not;
        there a failed attempt is repeated here if its status allows it, up to the maximum number of restarts.
        """
        # Installed before the lock is taken: the wait for an earlier attempt can take minutes and must react to
        # SIGTERM.
        self._install_signal_handlers()
        with contextlib.ExitStack() as stack:
            try:
                if self.owns_run:
                    stack.enter_context(
                        run_lock.hold_run_lock(self.run_dir, self.environ, stopped=self._poll_while_waiting)
                    )
            except run_lock.RunLocked as error:
                self._print(str(error))
                return PREEMPTED if self.stop_requested else FAILED if error.retry else CONFIG_ERROR
            except OSError as error:
                self._print(f'{self.run_dir} cannot be written ({error}); check that it is mounted and has free space')
                return FAILED
            return self._run_attempts()

    def check(self) -> int:
        """Run only the preflight checks, without training; return the exit status."""
        # No lock and no record of an attempt: nothing is trained.
        self.owns_run = False
        self._install_signal_handlers()
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            outcome = self._preflight(Path(folder), Attempt(0, self._now()))
        if outcome.status:
            self._print(attempts.describe_attempt(outcome.cause, outcome.detail))
        return outcome.status

    def _run_attempts(self) -> int:
        """Run attempts, while this process holds the run lock; return the exit status of the last one."""
        restarts = 0
        while True:
            earlier = self._earlier_attempts()
            problem = attempts.reason_to_give_up(earlier, self.settings.max_restarts)
            if problem is not None:
                self._print(f'{self.run_dir / attempts.ATTEMPTS}: {problem}')
                return CONFIG_ERROR
            outcome = self._attempt(len(earlier))
            # Only SageMaker needs restarts in place; every other scheduler acts on the exit status.
            restart = self.settings.in_place and self.settings.action_after(outcome.status) == 'retry'
            if outcome.status == 0 or self.stop_requested or not restart or restarts == self.settings.max_restarts:
                return outcome.status
            restarts += 1

    def _poll_while_waiting(self) -> bool:
        """Write a heartbeat while waiting for the run lock; return True if a stop was requested."""
        liveness.update_heartbeat()
        return self.stop_requested

    def _earlier_attempts(self) -> list[Attempt]:
        """Return the recorded earlier attempts of the run on its first node; an empty list on all other nodes."""
        with contextlib.suppress(UserError):  # the run has no attempts.jsonl yet
            return attempts.read_attempts(self.run_dir) if self.owns_run else []
        return []

    def _attempt(self, number: int) -> Outcome:
        """Run the preflight, then the recipe, once; record the attempt and return its outcome on this node."""
        attempt = Attempt(number, self._now())
        self._record('begin', attempt)
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            outcome = self._preflight(Path(folder), attempt)
            if outcome.status == 0:
                outcome = self._run_workers(self.command, Path(folder), attempt)
        attempt.end, attempt.status = self._now(), outcome.status
        attempt.cause, attempt.detail = self._cause_of_end(outcome)
        self.outcome = outcome
        self._record('end', attempt)
        if outcome.status:
            self._print(attempts.describe_attempt(attempt.cause, attempt.detail))
        return outcome

    def _cause_of_end(self, outcome: Outcome) -> tuple[str, str]:
        """Return the cause and detail of the end of an attempt, taken from another node if that node failed first."""
        first = self._failure_elsewhere()
        # When another node fails, this one is stopped or crashes in a collective. The cause that it observes is then
        # only a consequence, and would be misleading in attempts.jsonl.
        if first is None or outcome.cause not in ('preempted', 'crash') or first.cause == outcome.cause:
            return outcome.cause, outcome.detail
        return first.cause, f'{first.machine}: {first.detail or f"status {first.status}"}'

    def _failure_elsewhere(self) -> 'NodeExit | None':
        """Return the exit record of the node whose failure ended this attempt, or None if no node has failed."""
        first = first_failed_node(self.environ)
        return None if first is None or first.cause == 'preempted' else first

    def _preflight(self, folder: Path, attempt: Attempt) -> Outcome:
        """Run the preflight checks of the job, if enabled, before training; return the outcome."""
        level = self.settings.preflight
        if level == 'none':
            return Outcome(0, 'done')
        command = ['-m', 'diffusion.preflight', level, *self.command[1:]]
        outcome = self._run_workers(command, folder, attempt, limit_seconds=PREFLIGHT_SECONDS[level])
        if self.stop_requested:
            return Outcome(PREEMPTED, 'preempted')
        if outcome.status == PREEMPTED:
            # The first line of the exit file gives the reason for the end, so the faulty node must write it before this
            # one, which ends with 75 only because of it.
            time.sleep(GRACE_SECONDS)
        return replace(outcome, detail=f'preflight: {outcome.detail or "see the table of findings"}')

    def _run_workers(
        self, command: Sequence[str], folder: Path, attempt: Attempt, *, limit_seconds: float | None = None
    ) -> Outcome:
        """Run a program with one process per GPU, for at most `limit_seconds` if set; return the outcome."""
        workers = Workers(
            self.position, command, {**self.environ, heartbeat_file.ATTEMPT_FOLDER_VARIABLE: str(folder)}, folder
        )
        try:
            outcome = self._watch(workers, attempt, limit_seconds)
        finally:
            # Also after a normal end: a rank may leave data loader workers behind in its process group.
            stuck = workers.kill()
            self._take_beats(workers, attempt)
        if stuck:
            # Not even SIGKILL ends a process in an uninterruptible system call, on a device or disk that does not
            # respond. No restart on this node can work.
            detail = f'process {", ".join(map(str, stuck))} cannot be killed'
            return Outcome(BAD_HARDWARE, 'hardware', detail)
        return outcome

    def _watch(self, workers: 'Workers', attempt: Attempt, limit_seconds: float | None) -> Outcome:
        """Monitor the worker processes until all have ended, and return the outcome of the attempt.

        Returns early if they hang, exceed the time limit, or have not ended some time after a stop signal or a failure.
        """
        begin = time.monotonic()
        watchdog = Watchdog(begin, self.settings.hang_seconds) if self.trains and limit_seconds is None else None
        last_check, last_record = 0.0, begin
        deadline, forwarded = float('inf'), False
        while not workers.ended():
            now = time.monotonic()
            if self.stop_requested and not forwarded:
                forwarded = True
                workers.signal(signal.SIGTERM)
                # SIGTERM whichever signal came: it is one that the workers handle by saving. If another node has
                # failed, no collective save can succeed, and the scheduler kills this node sooner than the notice says.
                notice = max(1.0, self.settings.notice_seconds - MARGIN_SECONDS)
                deadline = min(deadline, now + (GRACE_SECONDS if self._failure_elsewhere() else notice))
            if deadline == float('inf') and workers.any_failed():
                # The first rank that fails starts the deadline. Ranks that were asked to stop end with PREEMPTED one
                # after the other, each after it has saved its part, so they get the full notice. After a failure the
                # others only wait for the failed rank in a collective.
                stopping = set(workers.codes()) <= {None, 0, PREEMPTED}
                deadline = now + (self.settings.notice_seconds if stopping else GRACE_SECONDS)
            if now > deadline:
                return workers.outcome(stop_requested=self.stop_requested, late=True)
            if now - last_check > CHECK_EVERY_SECONDS:
                last_check = now
                liveness.update_heartbeat()
                beats = heartbeat_file.last_beats(workers.folder)
                if beats and attempt.first is None:
                    # Record the first batch immediately: if this node is lost soon after, the startup time is known.
                    last_record = -RECORD_EVERY_SECONDS
                problem = None if watchdog is None else watchdog.check(beats, now)
                if limit_seconds is not None and now - begin > limit_seconds:
                    problem = f'did not finish in {limit_seconds:.0f} s'
                if problem is not None:
                    # The stacks must be copied now: the folder of the attempt is temporary, and the workers are killed
                    # next.
                    workers.write_stacks()
                    self._keep_stacks(workers)
                    # 75 retries on any nodes: the node that caused the hang is unknown, so none is excluded.
                    return Outcome(PREEMPTED, 'hang', problem)
            if now - last_record > RECORD_EVERY_SECONDS:
                last_record = now
                self._take_beats(workers, attempt)
                self._record('progress', attempt)
            workers.reap_orphans()
            time.sleep(TICK_SECONDS)
        return workers.outcome(stop_requested=self.stop_requested)

    def _take_beats(self, workers: 'Workers', attempt: Attempt) -> None:
        """Copy the batch numbers and times from the last heartbeat of a rank to the record of the attempt."""
        beats = heartbeat_file.last_beats(workers.folder)
        if beats:
            # One rank represents the node, since all ranks are at the same batch up to one.
            first = beats[min(beats)]
            attempt.first, attempt.first_at = first.first, self._epoch + first.first_at
            attempt.last, attempt.last_at = first.batch, self._epoch + first.at

    def _keep_stacks(self, workers: 'Workers') -> None:
        """Copy the thread stacks of the ranks to a file in the run's folder."""
        found = heartbeat_file.read_stacks(workers.folder)
        path = self.run_dir / f'stacks-{time.strftime("%Y%m%d-%H%M%S")}-node{self.position.rank}.txt'
        with contextlib.suppress(OSError):
            write_atomically(path, ''.join(f'--- rank {rank}\n{text}\n' for rank, text in found.items()))
            self._print(f'wrote the stacks of {len(found)} of {self.position.processes} ranks to {path}')

    def _record(self, event: str, attempt: Attempt) -> None:
        """Append an attempt to attempts.jsonl, on the first node of a training run."""
        if not self.owns_run:
            return
        try:
            attempts.append_attempt(self.run_dir, event, attempt)
        except OSError as error:
            self._print(f'{self.run_dir / attempts.ATTEMPTS} cannot be written ({error}); continuing without it')

    def _now(self) -> float:
        return self._epoch + time.monotonic()

    def _print(self, text: str) -> None:
        print(f'node {self.position.rank}: {text}', file=sys.stderr, flush=True)

    def _install_signal_handlers(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._request_stop)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True


@dataclass
class Workers:
    """Worker processes of a node, one per GPU, each in a process group with its children.

    Args:
        position: Rank of the node in the job.
        command: run.py and its arguments.
        environ: Environment of all processes.
        folder: Folder for the heartbeats, stacks and output of the processes.
    """

    position: NodePosition
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Composer's launcher is not used: it leaves its workers behind when it receives SIGTERM, its exit status does
        # not reflect theirs, and its import takes half a minute. The workers get the environment that it would set.
        for local_rank in range(self.position.processes):
            # The output of one rank is enough to follow a run, but errors (stderr) are shown for all ranks.
            output = None if local_rank == 0 else (self.folder / f'output-{local_rank}.txt').open('wb')
            # A new session makes each rank the leader of a process group. kill() can then end it together with its data
            # loader workers, and Ctrl-C reaches only this process, which forwards it once.
            process = subprocess.Popen(
                [sys.executable, *self.command],
                env=rank_environment(self.position, local_rank, self.environ),
                stdout=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            self.processes.append(process)
            if output is not None:
                output.close()

    def codes(self) -> list[int | None]:
        """Return the exit status of each worker process: negative for a signal, None if it still runs."""
        return [process.poll() for process in self.processes]

    def ended(self) -> bool:
        return None not in self.codes()

    def any_failed(self) -> bool:
        return any(code for code in self.codes())

    def outcome(self, *, stop_requested: bool, late: bool = False) -> Outcome:
        """Combine the exit statuses of all worker processes into one outcome."""
        first = self.position.rank * self.position.processes
        codes = {first + local: code for local, code in enumerate(self.codes())}
        # A user error or bad hardware on one rank explains all other statuses: the other ranks fail because of it.
        for status, cause in ((CONFIG_ERROR, 'mistake'), (BAD_HARDWARE, 'hardware')):
            if status in codes.values():
                return Outcome(status, cause)
        killed = [f'rank {rank} by {signal.Signals(-code).name}' for rank, code in codes.items() if code and code < 0]
        failed = [f'rank {rank} with {code}' for rank, code in codes.items() if code and code > 0 and code != PREEMPTED]
        if stop_requested and not failed:
            detail = 'did not save in time' if late or killed else ''
            done = set(codes.values()) == {0}
            return Outcome(0, 'done') if done else Outcome(PREEMPTED, 'preempted', detail)
        if killed:  # for example by the OOM killer; the other ranks then fail in a collective with misleading errors
            return Outcome(FAILED, 'killed', ', '.join(killed))
        if failed:
            return Outcome(FAILED, 'crash', ', '.join(failed))
        return Outcome(PREEMPTED, 'preempted') if PREEMPTED in codes.values() else Outcome(0, 'done')

    def signal(self, number: int) -> None:
        """Send a signal to every worker process that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def write_stacks(self) -> None:
        """Make every responsive worker process write the stacks of its threads, and wait for the files."""
        self.signal(heartbeat_file.STACK_DUMP_SIGNAL)
        until = time.monotonic() + GRACE_SECONDS
        while len(heartbeat_file.read_stacks(self.folder)) < len(self.processes) and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
        time.sleep(CHECK_EVERY_SECONDS)  # the files may still be incomplete

    def kill(self) -> list[int]:
        """Kill all worker processes with their children; return the ids of workers that exist after KILL_SECONDS."""
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
        """Reap orphaned processes if this process is PID 1 of a container, as it then inherits them."""
        if os.getpid() != 1:
            return
        # Without waitpid() orphans stay zombies until the container runs out of process ids. The status of a worker
        # belongs to Popen.poll(): WNOWAIT looks at an ended child without reaping it. It reports the same worker until
        # poll() has taken its status, so the orphans behind it wait for the next call.
        worker_pids = {process.pid for process in self.processes}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in worker_pids:
                    return
                os.waitpid(ended.si_pid, 0)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform == 'linux':
        # No signal handler runs after SIGKILL of the parent, and orphaned ranks would keep the GPUs and the port.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the number in an environment variable, or the default if the variable is not set."""
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise UserError(f'{name}: {environ[name]!r} is not a number; set it to a number or unset it') from None


@dataclass(frozen=True)
class NodeExit:
    """Exit record of a node: its line in the exit file that all nodes of a job share, written when the node ends."""

    status: int
    machine: str
    cause: str
    """A key of `attempts.CAUSES`."""
    detail: str

    @staticmethod
    def parse(line: str) -> 'NodeExit | None':
        """Return the exit record in a line of the exit file, or None if the line is incomplete."""
        status, machine, cause, detail = (*line.split(' ', 3), '', '', '')[:4]
        if not status.isdigit():
            return None
        default_causes = {0: 'done', PREEMPTED: 'preempted', BAD_HARDWARE: 'hardware', CONFIG_ERROR: 'mistake'}
        return NodeExit(int(status), machine, cause or default_causes.get(int(status), 'crash'), detail)


def first_failed_node(environ: Mapping[str, str]) -> NodeExit | None:
    """Return the exit record of the node that failed first in this attempt, or None if none has failed."""
    try:
        lines = Path(environ[environment.EXIT_FILE]).read_text(encoding='utf-8').splitlines()
    except (KeyError, OSError):
        return None
    return next((found for found in map(NodeExit.parse, lines) if found is not None and found.status), None)


def _report_exit(status: int, environ: Mapping[str, str], outcome: Outcome | None = None) -> int:
    """Append the exit record of this node to the exit file that all nodes share; return the exit status."""
    liveness.remove_heartbeat()
    cause = '' if outcome is None or outcome.status != status else f' {outcome.cause} {outcome.detail}'.rstrip()
    path = environ.get(environment.EXIT_FILE)
    if path is not None:
        try:
            with open(path, 'a', encoding='utf-8') as file:
                file.write(f'{status} {environment.machine_name(environ)}{cause}\n')
        except OSError as error:
            print(f'{path} cannot be written ({error})', file=sys.stderr)
    return status


if __name__ == '__main__':
    sys.exit(main())
