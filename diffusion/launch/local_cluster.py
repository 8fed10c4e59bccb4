"""Jobs whose nodes are processes of this machine; this process does what a scheduler would do on a cluster."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from diffusion.exit_codes import CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch import environment
from diffusion.launch.backends.base import environment_of
from diffusion.launch.job_spec import Job
from diffusion.launch.node import die_with_parent

TICK_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""Time for the other nodes when one has failed."""


def run_local_jobs(jobs: Sequence[Job]) -> int:
    """Run jobs one after the other, each with the restarts of its spec; return the first status that is not 0."""
    for job in jobs:
        status = LocalJob(job).run()
        if status:
            return status
    return 0


def node_environment(job: Job, rank: int) -> dict[str, str]:
    """Return the environment variables of one node of a job."""
    return environment_of(job, 'local', NODE_RANK=str(rank), MASTER_ADDR='127.0.0.1')


class LocalJob:
    """A job whose nodes are processes of this machine."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._stop_requested = False
        self._nodes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Run the job, with the restarts of its spec; return the exit status."""
        restart, count = self.job.spec.restart, 0
        earlier = {number: signal.signal(number, self._request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                status = self._attempt(count)
                action = restart.actions().get(status, restart.otherwise)
                if status == 0 or self._stop_requested or action == 'stop':
                    return status
                if count == restart.max_restarts:
                    self._print(f'ended with {status}, and all {count} restarts are used up')
                    return status
                count += 1
                self._print(f'ended with {status}; restart {count}')
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _attempt(self, count: int) -> int:
        with tempfile.TemporaryDirectory(prefix='diffusion-job-') as folder:
            exits = Path(folder, 'exits')
            more = {environment.ATTEMPT: str(count), environment.EXIT_FILE: str(exits)}
            self._nodes = [self._start(rank, more) for rank in range(self.job.nodes)]
            try:
                self._wait()
            finally:
                for node in self._nodes:
                    if node.poll() is None:
                        node.kill()  # the kernel then kills its workers, see die_with_parent
                    node.wait()
            reported = [int(line.split()[0]) for line in exits.read_text().splitlines()] if exits.exists() else []
        return job_exit_status(reported, [node.returncode for node in self._nodes])

    def _start(self, rank: int, more: dict[str, str]) -> subprocess.Popen[bytes]:
        environ = os.environ | node_environment(self.job, rank) | more
        command = [sys.executable, *self.job.command[1:]]
        # A session of its own: Ctrl-C reaches this process alone, which forwards it once.
        folder = self.job.spec.workdir
        return subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, preexec_fn=die_with_parent)

    def _wait(self) -> None:
        deadline, forwarded = float('inf'), False
        while any(node.poll() is None for node in self._nodes):
            now = time.monotonic()
            if self._stop_requested and not forwarded:
                forwarded = True
                deadline = now + self.job.spec.schedule.notice_seconds
                self._terminate()
            failed = {node.returncode for node in self._nodes} - {None, 0}
            if failed and deadline == float('inf'):
                notice = self.job.spec.schedule.notice_seconds if failed == {PREEMPTED} else GRACE_SECONDS
                deadline = now + notice
                self._terminate()
            if now > deadline:
                return
            time.sleep(TICK_SECONDS)

    def _terminate(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)

    def _print(self, text: str) -> None:
        print(f'{self.job.name}: {text}', file=sys.stderr, flush=True)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True


def job_exit_status(reported: Sequence[int], codes: Sequence[int]) -> int:
    """Combine the exit statuses of a job's nodes.

    The first node that failed is the reason, unless another reports a mistake. A node that could not report was killed.

    Args:
        reported: Statuses in the file that the nodes share, in the order of their ends.
        codes: Exit statuses of the nodes' processes.
    """
    if CONFIG_ERROR in reported:
        return CONFIG_ERROR
    return next((status for status in reported if status), FAILED if any(codes) else 0)
