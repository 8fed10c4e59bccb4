"""Folder in the run's folder where all nodes of an attempt write the stacks of their ranks when the attempt fails.

Each node writes `stacks-nodeN.txt` for people and `nodeN.json` for the first node, which writes `summary.txt`. NCCL's
flight recorder writes `nccl-rank-N` beside them.
"""

import contextlib
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion.launch import environment
from diffusion.launch.run_lock import job_id
from diffusion.launch.stack_report import RankReport
from diffusion.storage.atomic import write_atomically

STACKS = 'stacks'
SUMMARY = 'summary.txt'
NCCL_PREFIX = 'nccl-rank-'
KEPT_ATTEMPTS = 5
"""Number of attempts whose stacks are kept."""
OTHERS_SECONDS = 15.0
"""Maximum wait of the first node for the stacks of the others, and of the others for its summary."""
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class NodeReport:
    """Report of a node whose attempt failed."""

    node: int
    cause: str
    """A key of `attempts.CAUSES`."""
    problem: str
    ranks: Sequence[RankReport]

    @staticmethod
    def read(path: Path) -> 'NodeReport | None':
        """Read a report; return None if it is not there (any more) or cannot be parsed."""
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
            ranks = [RankReport(**each) for each in content.pop('ranks')]
            return NodeReport(**content, ranks=ranks)
        except (OSError, ValueError, TypeError, KeyError):
            return None


def attempt_name(environ: Mapping[str, str], restarts: int) -> str:
    """Return a name of this attempt that all of its nodes know, such as `4711-2`: the job and its number of restarts.

    Args:
        environ: Environment of the node entry point.
        restarts: Number of restarts in place, by the node entry point itself.
    """
    # A local job has no id, but an exit file in a temporary folder of its own.
    exits = environ.get(environment.EXIT_FILE)
    job = job_id(environ) or (Path(exits).parent.name if exits else environ.get(environment.JOB, ''))
    parts = [job or 'job', environ.get(environment.ATTEMPT) or '0', *([str(restarts)] if restarts else [])]
    return re.sub(r'[^A-Za-z0-9._-]', '_', '-'.join(parts)).lstrip('.')


class StackFolder:
    """The folder of one attempt; see the module.

    Args:
        run: The run's folder.
        name: Result of `attempt_name`.
        node: Rank of this node.
        nodes: Number of nodes.
    """

    def __init__(self, run: Path, name: str, node: int, nodes: int) -> None:
        self.path = run / STACKS / name
        self.node, self.nodes = node, nodes
        # Not every scheduler numbers its restarts, so the folder may have files of an earlier attempt.
        self._earlier = self._versions()

    def write(self, report: NodeReport, stacks: Mapping[int, str]) -> None:
        """Write the stacks of this node's ranks and its report.

        Raises:
            OSError: The folder cannot be written.
        """
        self.create()
        text = ''
        for each in report.ranks:
            heartbeat = f'{each.batch} batches completed, last heartbeat {each.silent_seconds:.0f} s ago'
            text += f'--- rank {each.rank} {each.problem or "is in " + each.place}; {heartbeat}\n'
            text += f'{stacks.get(each.rank, "")}\n'
        write_atomically(self.path / f'stacks-node{self.node}.txt', text)
        # After the stacks, since other nodes take this file as the sign that this node is done.
        write_atomically(self.path / f'node{self.node}.json', json.dumps(asdict(report)) + '\n')

    def read(self) -> dict[int, NodeReport]:
        """Return the reports of this attempt, by node."""
        found = {}
        for name in self._new_files():
            report = NodeReport.read(self.path / name) if name.startswith('node') else None
            if report is not None:
                found[report.node] = report
        return dict(sorted(found.items()))

    def wait_for_all(self) -> dict[int, NodeReport]:
        """Return the reports of all nodes, waiting for those that are missing at most OTHERS_SECONDS."""
        _poll(lambda: len(self.read()) == self.nodes, OTHERS_SECONDS)
        return self.read()

    def write_summary(self, sentence: str, reports: Mapping[int, NodeReport]) -> None:
        """Write the summary: a sentence about all ranks, and the problem that each node has reported."""
        problems = [f'node {node}: {report.problem}\n' for node, report in reports.items() if report.problem]
        write_atomically(self.path / SUMMARY, f'{sentence}\n{"".join(problems)}')

    def wait_for_summary(self) -> None:
        """Wait until the first node has written the summary, at most OTHERS_SECONDS."""
        _poll(lambda: SUMMARY in self._new_files(), OTHERS_SECONDS)

    def wait_for_nccl(self, ranks: Sequence[int], seconds: float) -> None:
        """Wait until NCCL's flight recorder has written the files of some ranks, at most some seconds."""
        _poll(lambda: {f'{NCCL_PREFIX}{rank}' for rank in ranks} <= self._new_files(), seconds)

    @property
    def nccl_prefix(self) -> str:
        """Absolute path to which NCCL's flight recorder appends the rank."""
        return str((self.path / NCCL_PREFIX).absolute())

    def create(self) -> None:
        """Create the folder, which NCCL's flight recorder does not do; the run's folder must exist."""
        # Not `parents=True`: without the mount of a run's folder, a new folder would look like that of a run.
        self.path.parent.mkdir(exist_ok=True)
        self.path.mkdir(exist_ok=True)

    def clean_up(self) -> None:
        """Remove the folder if it is empty, and the folders of older attempts than the newest `KEPT_ATTEMPTS`."""
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        if self.path.exists():
            folders = [each for each in self.path.parent.iterdir() if each.is_dir() and each != self.path]
            folders.sort(key=lambda each: each.stat().st_mtime)
            for folder in folders[: max(0, len(folders) - KEPT_ATTEMPTS + 1)]:
                shutil.rmtree(folder, ignore_errors=True)

    def _versions(self) -> dict[str, int]:
        """Return the modification time of each file in the folder; none while its storage fails."""
        found = {}
        with contextlib.suppress(OSError):
            for path in self.path.glob('[!.]*'):
                with contextlib.suppress(OSError):  # replaced just now
                    found[path.name] = path.stat().st_mtime_ns
        return found

    def _new_files(self) -> set[str]:
        """Return the names of the files that were written in this attempt."""
        return {name for name, time_ns in self._versions().items() if self._earlier.get(name) != time_ns}


class HangListener:
    """Thread that looks for the report of another node that found a hang.

    A thread of its own, since the storage may not respond, and this node must still end its ranks.
    """

    def __init__(self, folder: StackFolder) -> None:
        self._folder = folder
        self._done = threading.Event()
        self.found: NodeReport | None = None
        """Report of the first other node that has found a hang, or None."""
        if folder.nodes > 1:
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        while self.found is None and not self._done.wait(POLL_SECONDS):
            with contextlib.suppress(OSError):
                hangs = [each for each in self._folder.read().values() if each.cause == 'hang']
                self.found = next((each for each in hangs if each.node != self._folder.node), None)


def _poll(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(POLL_SECONDS / 5)
