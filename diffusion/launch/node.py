"""Node entry point, `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]`, run on every node of a job.

It determines the node's rank, starts one process per GPU, forwards signals to these processes, and ends them if they
hang. Its exit status tells the scheduler what to do: 0 done, 1 crash, 75 retry, 76 retry on other nodes, 78 stop.
"""

import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

from diffusion.config.load import Recipe, load
from diffusion.config.recipe import NOTIFY_EVENTS, NotifyConfig
from diffusion.errors import ExternalError, UserError, exit_status
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, INTERRUPTED, PREEMPTED
from diffusion.launch import liveness
from diffusion.launch.exit_file import earlier_attempt_has_begun, end_of_attempt, failure_elsewhere, report_exit
from diffusion.launch.failure_stacks import HangListener, StackFolder, attempt_name, keep_stacks
from diffusion.launch.node_records import NodeRecords
from diffusion.launch.node_settings import PREFLIGHT_SECONDS, Settings, fetch_secrets
from diffusion.launch.rank_discovery import NodePosition, count_gpus, find_position, free_port, nccl_environment
from diffusion.launch.standby.in_place import InPlaceRestarts
from diffusion.launch.workers import TICK_SECONDS, Outcome, Workers, discarding_lost_output
from diffusion.runs import attempts, environment, heartbeats, run_lock
from diffusion.runs.attempts import Attempt
from diffusion.runs.bounded_call import within_limit
from diffusion.runs.heartbeats import Watchdog, early_timeout_warning
from diffusion.runs.node_status import NODE_VARIABLE
from diffusion.runs.notify import NUMBER_VARIABLE, TRAINING_EVENTS, Notifier
from diffusion.runs.stop_signals import RepeatedInterrupt, handled_signals
from diffusion.storage.places import files_of_run, is_url

Environ = Mapping[str, str]
CHECK_EVERY_SECONDS = 1.0
"""Interval at which heartbeats are checked."""
RECORD_EVERY_SECONDS = 30.0
"""Interval at which progress is recorded, in case this process is killed before it can record the attempt's end."""
GRACE_SECONDS = 5.0
"""Time that the other ranks have to end after one rank has failed. They wait for it in a collective, but may still
report an error."""
KILLED_GRACE_SECONDS = 0.2
"""GRACE_SECONDS if the first rank was killed by SIGKILL, for example by the OOM killer. Errors that other ranks report
are then only consequences; the wait is for ranks that are killed along with the first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a recipe on this node and return the exit status."""
    with discarding_lost_output():
        try:
            return _main(list(sys.argv[1:] if argv is None else argv), dict(os.environ))
        except KeyboardInterrupt:  # a signal came before `Node` installed its handlers
            print('interrupted before the start', file=sys.stderr)
            return PREEMPTED


def _main(words: list[str], environ: dict[str, str]) -> int:
    if words[:1] != ['--'] or len(words) < 3:
        print('usage: python -m diffusion.launch.node -- run.py RECIPE [key=value ...]', file=sys.stderr)
        return report_exit(2, environ)
    try:
        position = find_position(environ)
        settings = Settings.from_environ(environ)
        # Fetch the secrets before the recipe is loaded: it may refer to them as ${oc.env:NAME}.
        environ |= fetch_secrets(environ)
        # Load the recipe here too, so that mistakes end the job before any process is started.
        recipe = load(words[2], words[3:], environ=environ)
    except (UserError, ExternalError) as error:
        print(f'error: {error}', file=sys.stderr)
        return report_exit(exit_status(error), environ)
    node = Node(position, settings, words[1:], recipe, environ)
    status = report_exit(node.run(), environ, node.outcome)
    # Send messages last: a slow web server must not delay this node's line in the exit file. The file's first line is
    # taken for the first failure.
    node.notifier.close()
    return status


def run_node_preflight(recipe_words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the preflight on this node, together with all other nodes of the job; return the exit status."""
    position, recipe = find_position(environ), load(recipe_words[0], recipe_words[1:])
    return Node(position, Settings.from_environ(environ), ['run.py', *recipe_words], recipe, environ).check()


def run_on_this_machine(command: Sequence[str], recipe: Recipe, processes: int) -> int:
    """Run a recipe once on this machine alone, for somebody at a terminal; return the exit status.

    After a signal to stop, the ranks may take as long as they need to save.

    Args:
        command: Arguments of Python that run the recipe.
    """
    position = NodePosition('local', 0, 1, processes, '127.0.0.1', free_port())
    settings = replace(Settings.from_environ({}), notice_seconds=math.inf)
    node = Node(position, settings, command, recipe, os.environ, interactive=True)
    status = node.run()
    node.notifier.close()
    return status


class Node:
    """One node of a job, which runs the job's attempts in sequence.

    Args:
        command: Arguments of Python that run the recipe: run.py with its arguments.
        interactive: Somebody at a terminal runs this node alone: messages do not name the node, and Ctrl-C is forwarded
            as SIGINT instead of SIGTERM.
    """

    def __init__(
        self,
        position: NodePosition,
        settings: Settings,
        command: Sequence[str],
        recipe: Recipe,
        environ: Environ,
        *,
        interactive: bool = False,
    ) -> None:
        self.position, self.settings, self.command = position, settings, list(command)
        self.interactive = interactive
        self.home = recipe.run_place
        """The run's folder, which all nodes share, or the run's URL in an object store."""
        self._notify_config = recipe.notify
        self.trains = recipe.task == 'train'
        self.saves_to_folder = self.trains and 'save_folder' not in recipe.trainer
        """True if checkpoints are saved to the run's folder, False if Composer's own saver writes them elsewhere."""
        self.owns_run = self.trains and position.rank == 0
        """True on the first node of a training run, which holds the run folder's lock and records the attempts."""
        # LOCK_HELD_VARIABLE tells the first rank not to take the lock, because this process holds it.
        self.environ = {**environ, run_lock.LOCK_HELD_VARIABLE: '1'} if self.trains else environ
        self.environ = {**self.environ, NODE_VARIABLE: f'{position.rank}/{position.nodes}'}
        self.stop_requested = False
        self.interrupted = False
        """True after Ctrl-C."""
        self.end_requested = False
        """True after a second Ctrl-C, which ends the workers without a checkpoint."""
        self._interrupts = RepeatedInterrupt()
        self.notifier = Notifier(NotifyConfig(), self.home)
        self.outcome: Outcome | None = None
        """Outcome of the last attempt, or None before its end."""
        self._restarts = 0
        self._recipe = recipe
        self._in_place: InPlaceRestarts | None = None
        self._restart_agreed = False
        """True if all nodes have agreed to repeat the last attempt in place with standby processes."""
        timeout, hang = recipe.trainer.get('dist_timeout') if self.trains else None, settings.hang_seconds
        self._timeout_warning = early_timeout_warning(timeout, hang) if isinstance(timeout, int | float) else None
        self._records = NodeRecords(self.home, self.environ, owns_run=False, say=self._print)

    def run(self) -> int:
        """Run the job on this node, and return the exit status of the last attempt.

        Usually there is one attempt, because the scheduler restarts failed jobs according to the exit status. In two
        cases this function repeats the attempt itself, if the status allows it and restarts are left: on SageMaker,
        which does not restart jobs, and with standby processes if all nodes agree.
        """
        # Install the handlers before taking the lock: waiting for an earlier attempt can take minutes and must react to
        # SIGTERM.
        self._install_signal_handlers()
        with contextlib.ExitStack() as stack:
            try:
                if status := self._status_of_missing_run():
                    return status
                if self.owns_run:
                    stack.enter_context(
                        run_lock.hold_run_lock(self.home, self.environ, stopped=self._poll_while_waiting)
                    )
            except run_lock.RunLocked as error:
                self._print(str(error))
                return PREEMPTED if self.stop_requested else FAILED if error.retry else CONFIG_ERROR
            except UserError as error:  # the run's object store refuses access
                # In a later attempt, access worked before: the credentials have expired, or the service that issues
                # them does not respond.
                self._print(f'runs_dir: {error}')
                return FAILED if self.environ.get(environment.ATTEMPT, '0') not in ('', '0') else CONFIG_ERROR
            except OSError as error:
                folder_problem = 'check that it is mounted and has free space'
                way_out = 'a later attempt may succeed' if is_url(self.home) else folder_problem
                self._print(f'{self.home} cannot be written ({error}); {way_out}')
                return FAILED
            if self.trains and self.settings.standby:
                self._in_place = InPlaceRestarts(
                    self.position, self.settings, self.command, self._recipe, self.environ, self._print
                )
                stack.callback(self._in_place.close)
            return self._run_attempts()

    def check(self) -> int:
        # Nothing is trained, so do not take the lock or record an attempt.
        self.owns_run = False
        self._install_signal_handlers()
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            outcome = self._preflight(Path(folder), Attempt(1, self._records.clock.now()))
        if outcome.status:
            self._print(attempts.describe_attempt(outcome.cause, outcome.detail))
        return outcome.status

    def _run_attempts(self) -> int:
        """Run attempts while this process holds the run lock; return the exit status of the last one."""
        self._records = NodeRecords(self.home, self.environ, owns_run=self.owns_run, say=self._print)
        if self.position.rank == 0 and self._timeout_warning is not None:
            self._print(f'warning: {self._timeout_warning}')
        failures = 0
        while True:
            try:
                if self._restarts and (status := self._status_of_missing_run(self._restarts)):
                    return status
                earlier = self._earlier_attempts()
            except OSError as error:
                self._print(f'{self.home}: the record of earlier attempts cannot be read ({error})')
                return FAILED
            problem = attempts.reason_to_give_up(earlier, self.settings.max_restarts)
            if problem is not None:
                self._print(f'{files_of_run(self.home).locate(attempts.ATTEMPTS)}: {problem}')
                return CONFIG_ERROR
            self._records.furthest = max((each.first for each in earlier if each.first is not None), default=None)
            outcome = self._attempt(attempts.next_number(earlier))
            if self._restart_agreed and not self.stop_requested:
                self._restarts += 1
                continue
            # From here on, repeat attempts only on SageMaker: every other scheduler acts on the exit status.
            restart = self.settings.in_place and self.settings.action_after(outcome.status) == 'retry'
            if outcome.status == 0 or self.stop_requested or not restart or self.settings.max_restarts == 0:
                return outcome.status
            # Count failures here for tasks other than training: `reason_to_give_up` needs recorded attempts.
            failures += outcome.status != PREEMPTED
            if not self.trains and failures > self.settings.max_restarts:
                return outcome.status
            self._restarts += 1

    def _status_of_missing_run(self, restarts: int = 0) -> int:
        """Print a message and return an exit status if a later attempt finds the run's folder empty; else return 0."""
        # Without this check, a node with a missing file system would silently start from batch 0.
        scheduled = self.environ.get(environment.ATTEMPT, '')
        earlier = max(restarts, int(scheduled) if scheduled.isdigit() else 0)
        if not self.saves_to_folder or not earlier or attempts.has_begun(self.home):
            return 0
        missing = f'{self.home} is empty although this is attempt {earlier + 1}'
        machine = environment.machine_name(self.environ)
        question, remedy = f'is it mounted on {machine}', f'it is not mounted on {machine}, mount it'
        if is_url(self.home):
            question = f'does S3_ENDPOINT_URL on {machine} lead to another store'
            remedy = f'{machine} reaches another store, correct its endpoint and credentials'
        begun = True if restarts else earlier_attempt_has_begun(self.environ)
        if begun:
            self._print(f'{missing}, and an earlier attempt has begun: {question}?')
            return FAILED
        # The ranks compare the folders of all nodes, and end with FAILED if only some see a run that has begun. If
        # all folders are empty, the job goes on: an attempt may have ended before the first node could record it.
        if self.position.rank or begun is False:
            return 0
        # The scheduler also counts attempts that ended before this program started, for example if a pod was evicted
        # while it pulled its image. Do not retry: every retry would end here too, until all restarts are used.
        self._print(
            f'{missing}. If {remedy} and start the job again. If no earlier attempt has begun, submit it as a new job, '
            f'or create {files_of_run(self.home).locate(attempts.ATTEMPTS)} to start from batch 0'
        )
        return CONFIG_ERROR

    def _poll_while_waiting(self) -> bool:
        """Write a heartbeat while this node waits for the run lock; return True if a stop was requested."""
        liveness.update_heartbeat()
        return self.stop_requested

    def _make_notifier(self, number: int) -> Notifier:
        events = tuple(event for event in NOTIFY_EVENTS if event not in TRAINING_EVENTS)
        config = self._notify_config if self.owns_run else NotifyConfig()
        return Notifier(config, self.home, self.environ, events=events, attempt=number)

    def _earlier_attempts(self) -> list[Attempt]:
        """Return the recorded earlier attempts of a training run; empty on nodes that do not decide about restarts."""
        with contextlib.suppress(UserError):  # the run has no attempts.jsonl yet
            # On SageMaker, each node decides on restarts by itself, from the records that the first node writes.
            if self.owns_run or (self.trains and self.settings.in_place):
                return attempts.read_attempts(self.home)
        return []

    def _attempt(self, number: int) -> Outcome:
        """Run the preflight and then the recipe once; record the attempt and return its outcome on this node."""
        records = self._records
        gpu = {'any': '', 'none': 'cpu'}.get(kind := self.environ.get(environment.GPU, ''), kind)
        attempt = Attempt(number, records.clock.now(), devices=self.position.world_size, gpu=gpu)
        records.append('begin', attempt)
        notifier = self.notifier = self._make_notifier(number)
        nodes = f'{self.position.nodes} node{"s" * (self.position.nodes > 1)}'
        notifier.send('started', f'started attempt {number} on {nodes}', nodes=self.position.nodes)
        with tempfile.TemporaryDirectory(prefix='diffusion-node-') as folder:
            # Skip the preflight after a restart in place: these nodes were checked, and no machine fault occurred
            # since.
            checked = self._restart_agreed and not self.settings.in_place
            outcome = Outcome(0, 'done') if checked else self._preflight(Path(folder), attempt)
            self._restart_agreed = False
            if outcome.status == 0:
                outcome = self._run_workers(self.command, Path(folder), attempt)
        if self.interrupted and outcome.cause == 'preempted':
            outcome = replace(outcome, cause='stopped')
        ended_at = records.clock.now()
        first = None
        if self._in_place is not None and outcome.status and not self.stop_requested:
            agreement = self._in_place.agree(outcome, attempt, self._poll_while_waiting)
            self._restart_agreed, first = agreement.restart, agreement.first
        end = end_of_attempt(outcome, self.environ, first)
        attempt.end, attempt.status, attempt.machine = ended_at, end.status, end.machine
        attempt.cause, attempt.detail = end.cause, end.detail
        nothing_begun = self.trains and attempt.first is None and not attempt.detail.startswith('preflight')
        if nothing_begun and attempt.cause in ('preempted', 'stopped'):
            attempt.detail = 'before the first batch, so there was nothing to save'
        self.outcome = outcome
        records.report_progress(attempt)
        if self.trains and not self.owns_run and outcome.status == BAD_HARDWARE:
            records.add_fault(outcome.detail)
        records.append('end', attempt)
        notifier.send_end(attempt)
        within_limit(notifier.check_goodput)
        # At a terminal, a rank has printed the user's mistake or what it saved, unless a second Ctrl-C killed it.
        has_printed = outcome.cause == 'mistake' or (outcome.cause == 'stopped' and outcome.status == PREEMPTED)
        if outcome.status and not (self.interactive and has_printed):
            self._print(attempts.describe_attempt(attempt.cause, attempt.detail))
        return outcome

    def _preflight(self, folder: Path, attempt: Attempt) -> Outcome:
        level = self.settings.preflight
        if level == 'none':
            return Outcome(0, 'done')
        command = ['-m', 'diffusion.preflight', level, *self.command[1:]]
        outcome = self._run_workers(command, folder, attempt, limit_seconds=PREFLIGHT_SECONDS[level])
        if self.stop_requested:
            return Outcome(PREEMPTED, 'preempted')
        if outcome.status == PREEMPTED:
            # The first line of the exit file is taken for the cause. Let the faulty node write it: this node ends with
            # 75 only because of that node's fault.
            time.sleep(GRACE_SECONDS)
        return replace(outcome, detail=f'preflight: {outcome.detail or "see the table of findings"}')

    def _run_workers(
        self, command: Sequence[str], folder: Path, attempt: Attempt, *, limit_seconds: float | None = None
    ) -> Outcome:
        """Run a program with one process per GPU, for at most `limit_seconds` if set; return the outcome."""
        name = attempt_name(self.environ, self._restarts)
        stacks = StackFolder(self.home, name, self.position.rank, self.position.nodes)
        environ = {**self.environ, heartbeats.ATTEMPT_FOLDER_VARIABLE: str(folder)}
        if self.trains:
            environ[NUMBER_VARIABLE] = str(attempt.number)
            if count_gpus(self.environ):  # torch 2.14 prints a warning about one of these variables
                environ |= nccl_environment(self.environ, folder, stacks.nccl_prefix)
            if self.position.rank == 0 or stacks.in_bucket:
                # Only the first node creates a shared folder: other nodes would create a run folder of their own where
                # the shared folder is not mounted.
                within_limit(stacks.create)
        in_place = self._in_place if limit_seconds is None else None
        workers = Workers(
            self.position, command, environ, folder, None if in_place is None else in_place.standbys.start_rank
        )
        if in_place is not None and self._restarts:
            taken = f'{in_place.standbys.taken} of {self.position.processes}'
            self._print(f'restarted in place; {taken} ranks are standby processes')
        listener = HangListener(stacks)
        try:
            outcome = self._watch(workers, attempt, limit_seconds, stacks, listener)
        finally:
            listener.stop()
            # Kill process groups after a normal end too, because a rank may leave data loader workers behind.
            stuck = workers.kill()
            self._records.take_beats(workers.folder, attempt)
            if self.position.rank == 0 or (self.trains and stacks.in_bucket):
                within_limit(stacks.clean_up)
        if stuck:
            # SIGKILL cannot end a process in an uninterruptible system call to a device or disk that does not respond.
            # A restart on this node could not use that device or disk.
            detail = f'process {", ".join(map(str, stuck))} cannot be killed'
            return Outcome(BAD_HARDWARE, 'hardware', detail)
        fault = heartbeats.reported_hardware_fault(folder)
        if fault and outcome.cause == 'hardware':
            return replace(outcome, detail=fault)
        if fault and outcome.cause == 'preempted' and self.position.nodes > 1:
            # The first line of the exit file is taken for the cause. Let the faulty node write it: this node ends with
            # 75 only because of that node's fault.
            until = time.monotonic() + GRACE_SECONDS
            while failure_elsewhere(self.environ) is None and time.monotonic() < until:
                time.sleep(TICK_SECONDS)
            return replace(outcome, detail=fault)
        return outcome

    def _watch(
        self, workers: Workers, attempt: Attempt, limit: float | None, stacks: StackFolder, listener: HangListener
    ) -> Outcome:
        """Monitor the worker processes until all have ended, and return the outcome of the attempt.

        Return early, after saving the stacks of running ranks, if workers hang, exceed the time limit, or have not
        ended some time after a stop signal or a failure.
        """
        # No step of the loop may block for long: this process must be able to end hanging ranks, and a container
        # without a heartbeat is restarted. The run's storage may never respond, so each access has a time limit
        # (`within_limit`, `NodeRecords`) or a separate thread (`HangListener`).
        begin = time.monotonic()
        keep = partial(keep_stacks, workers=workers, stacks=stacks, environ=self.environ, begin=begin, say=self._print)
        watchdog = Watchdog(begin, self.settings.hang_seconds) if self.trains and limit is None else None
        last_check, last_record = 0.0, begin
        # Ranks that still run at the deadline are killed. Events may only move it earlier: otherwise a stop signal
        # after a failure, for example, would give hanging ranks more time than the scheduler gives this node.
        deadline, forwarded, failed_at = float('inf'), False, 0.0
        in_place = None if limit is not None else self._in_place
        while not workers.ended():
            now = time.monotonic()
            if self.end_requested:
                workers.kill()  # read heartbeats first: listing the checkpoints may block
                self._records.take_beats(workers.folder, attempt)
                return Outcome(
                    INTERRUPTED, 'preempted', f'ended by a second Ctrl-C: {self._records.describe_loss(attempt)}'
                )
            if self.stop_requested and not forwarded:
                forwarded = True
                if in_place is not None:
                    in_place.standbys.close()  # end the standby processes, which would slow down the save
                if self.interactive and self.interrupted:
                    workers.signal(signal.SIGINT)  # rank 0 prints what a second Ctrl-C would lose
                else:
                    workers.signal(signal.SIGTERM)  # whichever signal came, send SIGTERM, on which workers save
                    self._announce_save(workers, attempt)
                deadline = min(deadline, now + self._seconds_to_save())
            if deadline == float('inf') and any(workers.codes()):
                # The first rank that fails sets the deadline. Ranks that were asked to stop get `notice_seconds`: each
                # ends with PREEMPTED or BAD_HARDWARE after it has saved and uploaded its part. After a failure, the
                # others only wait for the failed rank in a collective.
                stopping = set(workers.codes()) <= {None, 0, PREEMPTED, BAD_HARDWARE}
                grace = KILLED_GRACE_SECONDS if -signal.SIGKILL in workers.codes() else GRACE_SECONDS
                deadline = now + (self.settings.notice_seconds if stopping else grace)
                if in_place is not None and not stopping:
                    in_place.report_failure(workers.outcome(stop_requested=False))
            # If a rank failed on another node, end this node's ranks, which would wait in a collective until its
            # timeout. Do not end them after a stop signal: they may be saving.
            elsewhere = None if in_place is None or self.stop_requested else in_place.failure_elsewhere()
            if elsewhere is not None:
                grace = KILLED_GRACE_SECONDS if elsewhere.cause == 'killed' else GRACE_SECONDS
                failed_at = failed_at or now
                deadline = min(deadline, failed_at + grace)
            if now > deadline:
                outcome = workers.outcome(stop_requested=self.stop_requested, late=True)
                if outcome.status == 0 and elsewhere is not None:
                    # `Workers.outcome` takes ranks that still run, without an exit status, for successful ones.
                    outcome = Outcome(FAILED, 'crash', f'because of {elsewhere.machine}')
                sentence = keep(outcome.cause, outcome.detail)
                return replace(outcome, detail='; '.join(filter(None, [outcome.detail, sentence])))
            if now - last_check > CHECK_EVERY_SECONDS:
                last_check = now
                liveness.update_heartbeat()
                beats = heartbeats.last_beats(workers.folder)
                if beats and attempt.first is None:
                    # Record the first batch immediately, so that the startup time is known if this node is lost.
                    last_record = -RECORD_EVERY_SECONDS
                if in_place is not None and not self.stop_requested:
                    in_place.poll(workers, beats)
                problem = None if watchdog is None else watchdog.check(beats, now)
                if limit is not None and now - begin > limit:
                    problem = f'did not finish in {limit:.0f} s'
                if problem is None and listener.found is not None:
                    # Another node may detect a hang first: a node has a longer time limit during slow work.
                    problem = f'node {listener.found.node}: {listener.found.problem}'
                if problem is not None:
                    # Copy the stacks now: the workers are killed next, and the attempt's folder is temporary.
                    sentence = keep('hang', problem)
                    # Let the scheduler retry on any nodes (75): the node of a rank that differs need not be faulty.
                    detail = '; '.join(filter(None, [problem, sentence]))
                    self.notifier.send('hang', f'hangs: {detail}')
                    return Outcome(PREEMPTED, 'hang', detail)
            if now - last_record > RECORD_EVERY_SECONDS:
                last_record = now
                self._records.take_beats(workers.folder, attempt)
                self._records.report_progress(attempt)
                self._records.append('progress', attempt)
                within_limit(self.notifier.check_goodput)
            workers.reap_orphans(() if self._in_place is None else self._in_place.standbys.pids)
            time.sleep(TICK_SECONDS)
        return workers.outcome(stop_requested=self.stop_requested)

    def _announce_save(self, workers: Workers, attempt: Attempt) -> None:
        """Print on the first node's terminal what a second Ctrl-C would lose."""
        if self.owns_run and sys.stderr.isatty():
            self._records.take_beats(workers.folder, attempt)
            loss = self._records.describe_loss(attempt)
            self._print(
                f'saving a checkpoint after this batch; press Ctrl-C again to end at once without saving (then {loss})'
            )

    def _seconds_to_save(self) -> float:
        """Return the number of seconds that the ranks have to save a checkpoint after a stop signal."""
        # After another node has failed, the ranks cannot save together, and the scheduler soon kills this node. But a
        # node with bad hardware ends only after all nodes have saved: this node may still be uploading and needs the
        # full time.
        first = failure_elsewhere(self.environ)
        failed = first is not None and first.cause != 'hardware'
        return GRACE_SECONDS if failed else max(1.0, self.settings.notice_seconds - environment.MARGIN_SECONDS)

    def _print(self, text: str) -> None:
        name = '' if self.interactive else f'node {self.position.rank}: '
        print(f'{name}{text}', file=sys.stderr, flush=True)

    def _install_signal_handlers(self) -> None:
        for number in handled_signals():
            signal.signal(number, self._request_stop)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        # `diffusion launch` forwards the first Ctrl-C as SIGTERM, and the second as SIGINT.
        repeated = self._interrupts.is_repeated()
        self.interrupted |= number == signal.SIGINT
        self.end_requested |= repeated and number == signal.SIGINT
        self.stop_requested = True


if __name__ == '__main__':
    sys.exit(main())
