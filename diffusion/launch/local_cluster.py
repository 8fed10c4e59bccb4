"""Jobs on this machine: each node is a node entry point here; what a scheduler would do is done by this process."""

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
from diffusion.launch.backends.local import node_environment
from diffusion.launch.job_spec import Job
from diffusion.launch.node import die_with_parent

TICK_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""Left to the other nodes when one has ended badly."""


def run_local_jobs(jobs: Sequence[Job]) -> int:
    """Run jobs one after the other, each again for as long as its spec says; the first status that is not 0."""
    for job in jobs:
        status = LocalJob(job).run()
        if status:
            return status
    return 0


class LocalJob:
    """A job whose nodes are processes of this machine."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._told = False
        self._nodes: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """Start it until it is done, or until nothing but stopping is left; its exit status."""
        restart, count = self.job.spec.restart, 0
        earlier = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                status = self._attempt(count)
                follows = restart.actions().get(status, restart.otherwise)
                if status == 0 or self._told or follows == 'stop':
                    return status
                if count == restart.max_restarts:
                    self._say(f'ended with {status}, and all {count} restarts are used up')
                    return status
                count += 1
                self._say(f'ended with {status}; restart {count}')
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
                        node.kill()  # its workers follow, see `_wait`
                    node.wait()
            said = [int(line.split()[0]) for line in exits.read_text().splitlines()] if exits.exists() else []
        return job_exit_status(said, [node.returncode for node in self._nodes])

    def _start(self, rank: int, more: dict[str, str]) -> subprocess.Popen[bytes]:
        environ = os.environ | node_environment(self.job, rank) | more
        command = [sys.executable, *self.job.command[1:]]
        # A group of its own: Ctrl-C comes here, and is handed on once.
        folder = self.job.spec.workdir
        return subprocess.Popen(command, env=environ, cwd=folder, start_new_session=True, preexec_fn=die_with_parent)

    def _wait(self) -> None:
        deadline, handed_on = float('inf'), False
        while any(node.poll() is None for node in self._nodes):
            now = time.monotonic()
            if self._told and not handed_on:
                handed_on = True
                deadline = now + self.job.spec.schedule.notice_seconds
                self._signal()
            bad = {node.returncode for node in self._nodes} - {None, 0}
            if bad and deadline == float('inf'):
                notice = self.job.spec.schedule.notice_seconds if bad == {PREEMPTED} else GRACE_SECONDS
                deadline = now + notice
                self._signal()
            if now > deadline:
                return
            time.sleep(TICK_SECONDS)

    def _signal(self) -> None:
        for node in self._nodes:
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)

    def _say(self, text: str) -> None:
        print(f'{self.job.name}: {text}', file=sys.stderr, flush=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told = True


def job_exit_status(said: Sequence[int], codes: Sequence[int]) -> int:
    """How a job ended, by what its nodes said, in that order, and by how their processes ended.

    The first that ended badly is why, unless there is a mistake. A node that could not even say so was killed.
    """
    if CONFIG_ERROR in said:
        return CONFIG_ERROR
    return next((status for status in said if status), FAILED if any(codes) else 0)
