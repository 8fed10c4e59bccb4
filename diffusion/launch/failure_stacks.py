"""Save the stacks of all ranks of a failed attempt to a shared folder, and name the ranks that differ from the others.

Each node writes `stacks-nodeN.txt` for people and `nodeN.json` for the first node, which writes `summary.txt`. NCCL's
flight recorder writes `nccl-rank-N` to the same folder. If the run is in an object store, the recorder writes to the
node's working folder, and the node uploads the files.
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

from diffusion.launch.stack_report import RankReport, describe_hang, find_place, main_thread
from diffusion.launch.workers import Workers, process_problem
from diffusion.runs import environment, heartbeats
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit, within_limit
from diffusion.runs.run_lock import job_id
from diffusion.storage.local_files import LAUNCH, working_folder
from diffusion.storage.places import FileVersion, LocalPlace, files_of_run, is_url

STACKS = 'stacks'
SUMMARY = 'summary.txt'
NCCL_PREFIX = 'nccl-rank-'
KEPT_ATTEMPTS = 5
OTHERS_SECONDS = 15.0
"""Maximum time that the first node waits for the other nodes' stacks, and the others for the first node's summary."""
NCCL_DUMP_SECONDS = 10.0
"""Maximum time to wait for the files of NCCL's flight recorder after a hang."""
NCCL_UPLOAD_SECONDS = 20.0
"""Maximum time to upload the flight recorder's files to an object store."""
POLL_SECONDS = 0.5
"""Interval at which a node looks for reports of other nodes."""
BUCKET_POLL_SECONDS = 5.0
"""POLL_SECONDS for an object store, which charges for requests (S3: 720 LIST per hour and node, 0.0036 USD)."""


@dataclass(frozen=True)
class NodeReport:
    node: int
    cause: str
    """Cause of the failure: a key of `attempts.CAUSES`."""
    problem: str
    ranks: Sequence[RankReport]

    @staticmethod
    def parse(content: bytes | None) -> 'NodeReport | None':
        """Parse the content of a report file; return None if the file is missing or invalid."""
        try:
            values = json.loads(content or b'')
            values.pop('at', None)
            ranks = [RankReport(**each) for each in values.pop('ranks')]
            return NodeReport(**values, ranks=ranks)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def attempt_name(environ: Mapping[str, str], restarts: int) -> str:
    """Return this attempt's name on all nodes, such as `4711-2-1`: job id, job restarts, and any restarts in place."""
    # A local job has no id, but its exit file is in a temporary folder with a unique name.
    exits = environ.get(environment.EXIT_FILE)
    job = job_id(environ) or (Path(exits).parent.name if exits else environ.get(environment.JOB, ''))
    parts = [job or 'job', environ.get(environment.ATTEMPT) or '0', *([str(restarts)] if restarts else [])]
    return re.sub(r'[^A-Za-z0-9._-]', '_', '-'.join(parts)).lstrip('.')


class StackFolder:
    """Folder for the stacks of one attempt; see the module's docstring."""

    def __init__(self, run: Path | str, name: str, node: int, nodes: int) -> None:
        self.node, self.nodes = node, nodes
        self.in_bucket = is_url(run)
        """True if nodes share the files through an object store, and each node has a local folder of its own."""
        self.path = (working_folder(str(run), LAUNCH) if self.in_bucket else Path(run)) / STACKS / name
        """The folder, which all nodes share unless `in_bucket`."""
        self._folder = f'{STACKS}/{name}'
        self._shared, self._local = files_of_run(run), LocalPlace(self.path)
        self._reports: dict[str, tuple[FileVersion, NodeReport | None]] = {}
        self._written = False
        # The folder may contain files of an earlier attempt of the same name, if the scheduler does not count restarts.
        self._earlier: dict[str, FileVersion] | None = None
        self._earlier_dumps = self._dumps()
        self._new_files()

    @property
    def place(self) -> str:
        """Path or URL of the shared folder, for messages."""
        return self._shared.locate(self._folder)

    def write(self, report: NodeReport, stacks: Mapping[int, str]) -> None:
        self._written = True
        text = ''
        for each in report.ranks:
            heartbeat = f'{each.batch} batches completed, last heartbeat {each.silent_seconds:.0f} s ago'
            text += f'--- rank {each.rank} {each.problem or "is in " + each.place}; {heartbeat}\n'
            text += f'{stacks.get(each.rank, "")}\n'
        self._write(f'stacks-node{self.node}.txt', text)
        # Write the report after the stacks: other nodes take it as the sign that this node's stacks are complete.
        self._write(f'node{self.node}.json', json.dumps(asdict(report) | {'at': time.time()}) + '\n')

    def read(self) -> dict[int, NodeReport]:
        found = {}
        for name, version in self._new_files().items():
            if not name.startswith('node'):
                continue
            if name not in self._reports or self._reports[name][0] != version:
                try:
                    content = self._shared.read(f'{self._folder}/{name}')
                except OSError:
                    continue
                self._reports[name] = version, NodeReport.parse(content)
            report = self._reports[name][1]
            if report is not None:
                found[report.node] = report
        return dict(sorted(found.items()))

    def wait_for_all(self) -> dict[int, NodeReport]:
        """Wait at most OTHERS_SECONDS for the reports of all nodes; return the reports found, by node."""
        _poll(lambda: len(self.read()) == self.nodes, OTHERS_SECONDS, self.poll_seconds / 5)
        return self.read()

    def write_summary(self, sentence: str, reports: Mapping[int, NodeReport]) -> None:
        """Write the summary: a sentence about all ranks, and the problem that each node reported."""
        problems = [f'node {node}: {report.problem}\n' for node, report in reports.items() if report.problem]
        self._write(SUMMARY, f'{sentence}\n{"".join(problems)}')

    def wait_for_summary(self) -> None:
        """Wait at most OTHERS_SECONDS until the first node has written the summary."""
        _poll(lambda: SUMMARY in self._new_files(), OTHERS_SECONDS, self.poll_seconds / 5)

    def wait_for_nccl(self, ranks: Sequence[int], seconds: float) -> None:
        """Wait at most `seconds` until NCCL's flight recorder has written the files of `ranks`."""
        names = {f'{NCCL_PREFIX}{rank}' for rank in ranks}
        _poll(lambda: names <= self._new_dumps(), seconds, POLL_SECONDS / 5)

    def upload_nccl(self) -> None:
        """Upload the files of NCCL's flight recorder on this node, if the run is in an object store."""
        if self.in_bucket:
            for name in sorted(self._new_dumps()):
                self._write(name, self._local.read(name) or b'')

    @property
    def nccl_prefix(self) -> str:
        """Absolute path of the flight recorder's files, to which NCCL appends the rank."""
        return str((self.path / NCCL_PREFIX).absolute())

    def create(self) -> None:
        """Create the folder, since NCCL does not. Unless `in_bucket`, the run folder that contains it must exist."""
        if self.in_bucket:
            self.path.mkdir(parents=True, exist_ok=True)
            return
        # Do not create parents: if the run's folder is not mounted, a new folder would look like a run.
        self.path.parent.mkdir(exist_ok=True)
        self.path.mkdir(exist_ok=True)

    def clean_up(self) -> None:
        """Remove the folder if it is empty, and the folders of all but the newest `KEPT_ATTEMPTS` attempts."""
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()
        if self.path.exists():
            folders = [each for each in self.path.parent.iterdir() if each.is_dir() and each != self.path]
            folders.sort(key=lambda each: each.stat().st_mtime)
            for folder in folders[: max(0, len(folders) - KEPT_ATTEMPTS + 1)]:
                shutil.rmtree(folder, ignore_errors=True)
        if self.in_bucket and self._written and self.node == 0:
            self._delete_old_objects()

    def _delete_old_objects(self) -> None:
        """Delete the objects of all but the newest `KEPT_ATTEMPTS` attempts from the store."""
        ended_at = {}
        for name in self._shared.list(STACKS).folders - {self.path.name}:
            names = self._shared.list(f'{STACKS}/{name}').files
            # The first node's report contains the time of writing, which the store does not provide.
            content = self._shared.read(f'{STACKS}/{name}/node0.json')
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                ended_at[name] = float(json.loads(content or b'{}').get('at', 0.0)), names
        for name in sorted(ended_at, key=lambda name: ended_at[name][0])[: max(0, len(ended_at) - KEPT_ATTEMPTS + 1)]:
            self._shared.delete(f'{STACKS}/{name}/{file}' for file in ended_at[name][1])

    def _write(self, name: str, content: str | bytes) -> None:
        self._shared.write(f'{self._folder}/{name}', content)

    def _new_files(self) -> dict[str, FileVersion]:
        """Return the shared files written in this attempt and their versions; empty while the storage fails."""
        try:
            found = self._shared.list(self._folder).files
        except OSError:
            return {}
        if self._earlier is None:
            # Ignore files in the first successful listing: an earlier attempt's reports must not end this one.
            self._earlier = found
        return {name: version for name, version in found.items() if self._earlier.get(name) != version}

    def _dumps(self) -> dict[str, FileVersion]:
        """Return the flight recorder's files that this node sees and their versions; empty while the storage fails."""
        try:
            return self._local.list().files
        except OSError:
            return {}

    def _new_dumps(self) -> set[str]:
        dumps = self._dumps().items()
        return {each for each, tag in dumps if each.startswith(NCCL_PREFIX) and self._earlier_dumps.get(each) != tag}

    @property
    def poll_seconds(self) -> float:
        return BUCKET_POLL_SECONDS if self.in_bucket else POLL_SECONDS


class HangListener:
    """Thread that waits for another node's report of a hang.

    This is a separate thread because the storage may not respond, and this node must still be able to end its ranks.
    """

    def __init__(self, folder: StackFolder) -> None:
        self._folder = folder
        self._done = threading.Event()
        self.found: NodeReport | None = None
        """Report of the first other node that found a hang, or None."""
        if folder.nodes > 1:
            threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        while self.found is None and not self._done.wait(self._folder.poll_seconds):
            with contextlib.suppress(OSError):
                hangs = [each for each in self._folder.read().values() if each.cause == 'hang']
                self.found = next((each for each in hangs if each.node != self._folder.node), None)


def _poll(condition: Callable[[], bool], seconds: float, interval: float) -> None:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(interval)


def keep_stacks(
    cause: str,
    problem: str,
    workers: Workers,
    stacks: StackFolder,
    *,
    environ: Mapping[str, str],
    begin: float,
    say: Callable[[str], None],
) -> str:
    """Write the stacks of this node's ranks to the run's folder; the first node returns a sentence about all ranks.

    The scheduler ends all nodes when one node entry point ends. After a hang, the first node therefore waits for the
    stacks of the other nodes, and they wait for its summary. Nodes other than the first return an empty string.

    Args:
        begin: Start time of the workers, on the clock of time.monotonic().
    """
    position = workers.position
    texts = workers.write_stacks()
    reports = rank_reports(workers, texts, machine=environment.machine_name(environ), begin=begin)
    report = NodeReport(position.rank, cause, problem, reports)
    if not within_limit(lambda: stacks.write(report, texts)):
        # Continue: the file system may be what hangs, and the sentence about this node's ranks is still useful.
        say(f'{stacks.place} cannot be written; continuing without the stacks of the ranks')
        return describe_hang(reports) if position.rank == 0 else ''
    say(f'wrote the stacks of {len(texts)} of {position.processes} ranks to {stacks.place}')
    found: dict[int, NodeReport] = {position.rank: report}
    asked: list[int] = []
    if cause == 'hang':
        asked = workers.request_nccl_dumps()
        if position.rank:
            within_limit(stacks.wait_for_summary, OTHERS_SECONDS + STORAGE_SECONDS)
        else:
            found |= call_with_limit(stacks.wait_for_all, OTHERS_SECONDS + STORAGE_SECONDS, found)
    elif position.rank == 0:
        found |= call_with_limit(stacks.read, STORAGE_SECONDS, found)
    sentence = ''
    if position.rank == 0:
        missing = [node for node in range(position.nodes) if node not in found] if cause == 'hang' else []
        sentence = describe_hang([rank for each in found.values() for rank in each.ranks], missing)
        # Write the summary before waiting for NCCL, because the other nodes wait for it.
        within_limit(lambda: stacks.write_summary(sentence, found))
        sentence = f'{sentence}; stacks in {stacks.place}'
    within_limit(lambda: stacks.wait_for_nccl(asked, NCCL_DUMP_SECONDS), NCCL_DUMP_SECONDS + STORAGE_SECONDS)
    within_limit(stacks.upload_nccl, NCCL_UPLOAD_SECONDS)
    return sentence


def rank_reports(workers: Workers, texts: Mapping[int, str], *, machine: str, begin: float) -> list[RankReport]:
    """Return the state of each of this node's ranks, from its last heartbeat, its stack and its process."""
    beats, now, reports = heartbeats.last_beats(workers.folder), time.monotonic(), []
    for rank, process in workers.by_rank().items():
        beat = beats.get(rank)
        batch, beat_at = (-1, begin) if beat is None else (beat.batch, beat.at)
        place = find_place(main_thread(texts.get(rank, '')))
        code = process.poll()
        problem = '' if place.label else process_problem(process.pid)
        problem = problem if code is None else f'has ended with {code}'
        where = (rank, workers.position.rank, machine)
        state = (batch, now - beat_at, place.label, place.waits, problem, code is not None)
        reports.append(RankReport(*where, *state))
    return reports
