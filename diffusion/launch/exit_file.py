"""Exit file of a job's attempt: one line per ended node; the first failure tells why the attempt ended."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, PREEMPTED
from diffusion.launch import liveness
from diffusion.launch.workers import Outcome
from diffusion.runs import environment
from diffusion.runs.bounded_call import STORAGE_SECONDS, call_with_limit, storage_problem

BEGIN = 'begin'
"""Cause in the line that the first node writes when it has recorded the beginning of an attempt."""
LOCAL_CAUSES = ('crash', 'killed', 'hardware')
"""Causes of an attempt's end that are due to the machine on which they were found."""


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


def failure_elsewhere(environ: Mapping[str, str]) -> NodeExit | None:
    """Return the exit record of the node whose failure ended this attempt, or None if no node has failed."""
    records = map(NodeExit.parse, _read_lines(Path(environ.get(environment.EXIT_FILE, os.devnull))))
    first = next((each for each in records if each is not None and each.status), None)
    return None if first is None or first.cause == 'preempted' else first


def end_of_attempt(outcome: Outcome, environ: Mapping[str, str], first: NodeExit | None = None) -> NodeExit:
    """Return how an attempt ended: the exit record of the node that failed first, or this node's own.

    Its machine is empty unless the cause is due to that machine.

    Args:
        first: Exit record of the node that failed first, if it is known; None looks into the exit file.
    """
    first = first or failure_elsewhere(environ)
    # This node is stopped or crashes in a collective when another node fails. The cause that it observes is then only a
    # consequence, and would be misleading in attempts.jsonl.
    if first is None or outcome.cause not in ('preempted', 'crash') or first.cause == outcome.cause:
        machine = environment.machine_name(environ) if outcome.cause in LOCAL_CAUSES else ''
        return NodeExit(outcome.status, machine, outcome.cause, outcome.detail)
    machine = first.machine if first.cause in LOCAL_CAUSES else ''
    detail = first.detail or f'status {first.status}'
    # A hardware fault names its machine already.
    detail = detail if detail.startswith(f'{first.machine}: ') else f'{first.machine}: {detail}'
    return NodeExit(first.status, machine, first.cause, detail)


def earlier_attempt_has_begun(environ: Mapping[str, str]) -> bool | None:
    """Return True if the first node began an earlier attempt of this job, False if it began none, None if unknown.

    Only Slurm keeps the exit files of all attempts.
    """
    path, attempt = environ.get(environment.EXIT_FILE, ''), environ.get(environment.ATTEMPT, '')
    stem, numbered, _ = path.rpartition(f'.{attempt}.exits')
    if not numbered or not attempt.isdigit():
        return None
    files = [_read_lines(Path(f'{stem}.{number}.exits')) for number in range(int(attempt))]
    # A node that ended before it started its ranks writes no cause, and one that failed the preflight `hardware`. Any
    # other cause shows that an attempt began: the line `begin` is missing if attempts.jsonl could not be written.
    causes = {line.split()[2] for lines in files for line in lines if len(line.split()) > 2}
    if causes - {'hardware'}:
        return True
    return False if all(files) else None


def report_exit(status: int, environ: Mapping[str, str], outcome: Outcome | None = None) -> int:
    """Append the exit record of this node to the exit file that all nodes share; return the exit status."""
    liveness.remove_heartbeat()
    cause = '' if outcome is None or outcome.status != status else f' {outcome.cause} {outcome.detail}'.rstrip()
    append_exit_line(environ, f'{status} {environment.machine_name(environ)}{cause}')
    return status


def append_exit_line(environ: Mapping[str, str], line: str) -> None:
    """Append a line to the exit file that all nodes of the job share, if there is one."""
    path = environ.get(environment.EXIT_FILE)
    if path is None:
        return

    def append() -> None:
        with open(path, 'a', encoding='utf-8') as file:
            # Write one line per node: a line break in a name would be read as the record of another node.
            file.write(' '.join(line.split()) + '\n')

    problem = storage_problem(append)
    if problem:
        print(f'{path} cannot be written ({problem})', file=sys.stderr)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read in time."""

    def read() -> list[str]:
        try:
            return path.read_text(encoding='utf-8').splitlines()
        except OSError:
            return []

    return call_with_limit(read, STORAGE_SECONDS, [])
