"""Local launch backend: each node of a job is a process on this machine, with its own ranks."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from diffusion.config.schema import Gatherer, Problem
from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch.backends.base import Rendered, environment_of
from diffusion.launch.job_spec import Job
from diffusion.launch.workers import TICK_SECONDS, die_with_parent, discarding_lost_output
from diffusion.runs import attempts, environment
from diffusion.runs.stop_signals import RepeatedInterrupt, handled_signals
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE, working_root
from diffusion.storage.places import is_url

GRACE_SECONDS = 15.0
"""Time that the other nodes have to end after one node has failed."""
ORDERLY = {PREEMPTED, BAD_HARDWARE}
"""Exit statuses of nodes whose ranks saved a checkpoint together before they ended."""


def node_environment(job: Job, rank: int) -> dict[str, str]:
    variables = environment_of(job, 'local', NODE_RANK=str(rank), MASTER_ADDR='127.0.0.1')
    if job.nodes > 1 and is_url(job.run_dir):
        # Nodes share this machine, so give each its own working folder for runs in an object store.
        variables[WORKING_FOLDER_VARIABLE] = str(working_root() / f'node{rank}')
    return variables


class LocalJob:
    def __init__(self, job: Job) -> None:
        self.job = job
        self._stop_requested = False
        self._end_requested = False
        self._interrupts = RepeatedInterrupt()
        self._failures = 0
        self._nodes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Run the job's nodes as processes on this machine, with restarts; return the last attempt's exit status."""
        restart, count = self.job.spec.restart, 0
        handlers = {number: signal.signal(number, self._request_stop) for number in handled_signals()}
        try:
            while True:
                status = self._attempt(count)
                action = restart.actions().get(status, restart.otherwise)
                if status == 0 or self._stop_requested or action == 'stop':
                    return status
                if restart.max_restarts == 0:
                    self._print(f'exited with status {status}; restarts are turned off')
                    return status
                if self._restarts_used(status) > restart.max_restarts:
                    self._print(f'exited with status {status}; all {restart.max_restarts} restarts are used')
                    return status
                count += 1
                self._print(f'exited with status {status}; starting restart {count}')
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _restarts_used(self, status: int) -> int:
        """Return the number of consecutive attempts without progress, given the exit status of the last attempt."""
        self._failures += status != PREEMPTED
        # Prefer the recorded attempts of a training run, because only they show which attempts made progress.
        with contextlib.suppress(UserError, OSError):
            run = self.job.run_dir
            run = run if is_url(run) else Path(self.job.spec.workdir or '', run)
            return attempts.restarts_used(attempts.read_attempts(run))
        return self._failures

    def _attempt(self, count: int) -> int:
        """Start all nodes of the job once, wait for them, and return the job's exit status."""
        # Create a new exit file per attempt, because an earlier attempt's lines do not explain the end of a later one.
        with tempfile.TemporaryDirectory(prefix='diffusion-job-') as folder:
            exits = Path(folder, 'exits')
            variables = {environment.ATTEMPT: str(count), environment.EXIT_FILE: str(exits)}
            self._nodes = [self._start(rank, variables) for rank in range(self.job.nodes)]
            try:
                self._wait()
            finally:
                for node in self._nodes:
                    if node.poll() is None:
                        node.kill()  # the kernel then kills its workers; see die_with_parent
                    node.wait()
            reported = [int(line.split()[0]) for line in exits.read_text().splitlines()] if exits.exists() else []
        return job_exit_status(reported, [node.returncode for node in self._nodes])

    def _start(self, rank: int, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        environ = os.environ | node_environment(self.job, rank) | variables
        command = [sys.executable, *self.job.command[1:]]
        # Start a new session, so that Ctrl-C in the terminal reaches only this process, which forwards it.
        folder = self.job.spec.workdir
        return subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, preexec_fn=die_with_parent)

    def _wait(self) -> None:
        """Wait until all nodes have ended or have exceeded their time to stop; forward stop requests to the nodes."""
        deadline, forwarded, interrupted = float('inf'), False, False
        while any(node.poll() is None for node in self._nodes):
            now = time.monotonic()
            if self._stop_requested and not forwarded:
                forwarded = True
                deadline = now + self.job.spec.schedule.notice_seconds
                self._terminate()
                self._print('stopping: the ranks finish their batch and save a checkpoint')
            if self._end_requested:
                # On SIGINT, the nodes print what is lost and end at once. They ignore a SIGINT that comes shortly after
                # the SIGTERM, which this process may have forwarded late, so send SIGINT in every iteration.
                deadline = deadline if interrupted else now + GRACE_SECONDS
                interrupted = True
                self._terminate(signal.SIGINT)
            # Like a scheduler, end all nodes when one fails. If it was preempted or has a hardware fault, all nodes are
            # saving a checkpoint together, and the others get `notice_seconds` to finish. After any other failure, they
            # cannot save.
            failed = {node.returncode for node in self._nodes} - {None, 0}
            if failed and deadline == float('inf'):
                deadline = now + (self.job.spec.schedule.notice_seconds if failed <= ORDERLY else GRACE_SECONDS)
                self._terminate()
            if now > deadline:
                return
            time.sleep(TICK_SECONDS)

    def _terminate(self, number: int = signal.SIGTERM) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.send_signal(number)

    def _print(self, text: str) -> None:
        print(f'{self.job.name}: {text}', file=sys.stderr, flush=True)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True
        self._end_requested |= self._interrupts.is_repeated() and number == signal.SIGINT


def job_exit_status(reported: Sequence[int], codes: Sequence[int]) -> int:
    """Return a job's exit status, given those `reported` in the exit file and the node processes' own `codes`."""
    # Prefer a user error on any node, which would recur on every retry. Otherwise use the first failed node's status:
    # the others ended because of that node. If no failed node has reported a status, nodes were killed: use FAILED.
    if CONFIG_ERROR in reported:
        return CONFIG_ERROR
    return next((status for status in reported if status), FAILED if any(codes) else 0)


@dataclass(frozen=True)
class Options:
    """Settings of the local launch backend (none)."""


class JobFailed(ExternalError):
    """Raised when a local job fails; `diffusion launch` then exits with the status of the job."""

    def __init__(self, name: str, exit_status: int) -> None:
        super().__init__(f'{name}: exited with status {exit_status}')
        self.exit_status = exit_status


def problems(jobs: Sequence[Job]) -> list[Problem]:
    spec, gather = jobs[0].spec, Gatherer()
    if spec.image is not None:
        gather.problem('image', 'the local backend does not use a container image; remove it')
    if spec.mounts:
        gather.problem('mounts', 'the local backend does not mount folders; remove them')
    schedule = spec.schedule
    settings = {
        'queue': schedule.queue is not None,
        'priority': schedule.priority is not None,
        'preemptible': schedule.preemptible,
        'time_limit': any(job.time_limit_seconds for job in jobs),
    }
    for key in (key for key, given in settings.items() if given):
        gather.problem(f'schedule.{key}', 'the local backend has no scheduler; remove it')
    for name, source in spec.secrets.items():
        if source is not None:
            gather.problem(f'secrets.{name}', 'the local backend reads secrets from the environment; set it to null')
    return gather.problems


def render(jobs: Sequence[Job]) -> Rendered:
    """Return shell scripts that show the commands of the jobs; `submit` runs the commands without a shell."""
    return Rendered({f'{job.name}.sh': _script(job) for job in jobs}, tuple(('bash', f'{job.name}.sh') for job in jobs))


def validate(rendered: Rendered) -> list[Problem]:
    return []


def submit(jobs: Sequence[Job], rendered: Rendered, folder: Path) -> str:
    """Run the jobs in sequence on this machine, with their restarts; raise JobFailed if one fails."""
    with discarding_lost_output():  # if the terminal is closed, stop the jobs so that they save
        for job in jobs:
            if status := LocalJob(job).run():
                raise JobFailed(jobs[0].spec.name, status)
    return f'{jobs[0].spec.name}: done'


def status(jobs: Sequence[Job]) -> str:
    raise UserError(f'status: a local job has no scheduler; use diffusion status {jobs[0].run_dir}')


def logs(jobs: Sequence[Job]) -> str:
    raise UserError('logs: a local job has no log file; see the terminal in which it was launched')


def cancel(jobs: Sequence[Job]) -> str:
    raise UserError('cancel: press Ctrl-C in the terminal in which the local job was launched')


def _script(job: Job) -> str:
    folder = [] if job.spec.workdir is None else [f'cd {shlex.quote(job.spec.workdir)} || exit 78']
    nodes = []
    for rank in range(job.nodes):
        variables = [f'{name}={shlex.quote(value)}' for name, value in node_environment(job, rank).items()]
        nodes.append(' \\\n    '.join([*variables, f'{job.shell_command} &']))
    waiting = ['status=0', 'for node in $(jobs -p); do wait "$node" || status=$?; done', 'exit "$status"', '']
    return '\n'.join(['#!/bin/bash', *folder, *nodes, *waiting])
