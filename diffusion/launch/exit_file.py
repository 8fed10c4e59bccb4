"""Exit file of a job's attempt: one line per node that has ended. The first failure tells why the attempt ended."""

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
"""Value of `cause` in the line that the first node writes when an attempt starts."""
LOCAL_CAUSES = ('crash', 'killed', 'hardware')
"""Causes of an attempt's end for which the machine that reports them is to blame."""


@dataclass(frozen=True)
class NodeExit:
    """Exit record of a node: the line that it appends to the job's shared exit file when it ends."""

    status: int
    machine: str
    cause: str
    """Cause of the exit: a key of `attempts.CAUSES`."""
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
    """Return the exit record of the first node that failed; None if none has, or if the first was only preempted."""
    records = map(NodeExit.parse, _read_lines(Path(environ.get(environment.EXIT_FILE, os.devnull))))
    first = next((each for each in records if each is not None and each.status), None)
    return None if first is None or first.cause == 'preempted' else first


def end_of_attempt(outcome: Outcome, environ: Mapping[str, str], first: NodeExit | None = None) -> NodeExit:
    """Return the exit record that explains the end of an attempt: this node's own, or the first failed node's.

    The record names a machine only if its cause is one of LOCAL_CAUSES. If `first` is None, the first failed node's
    record is read from the exit file.
    """
    first = first or failure_elsewhere(environ)
    # When another node fails, this node is stopped or crashes in a collective. Record the other node's cause then: this
    # node's cause is only a consequence, and would be misleading in attempts.jsonl.
    if first is None or outcome.cause not in ('preempted', 'crash') or first.cause == outcome.cause:
        machine = environment.machine_name(environ) if outcome.cause in LOCAL_CAUSES else ''
        return NodeExit(outcome.status, machine, outcome.cause, outcome.detail)
    machine = first.machine if first.cause in LOCAL_CAUSES else ''
    detail = first.detail or f'status {first.status}'
    # The detail of a hardware fault already names the machine.
    detail = detail if detail.startswith(f'{first.machine}: ') else f'{first.machine}: {detail}'
    return NodeExit(first.status, machine, first.cause, detail)


def earlier_attempt_has_begun(environ: Mapping[str, str]) -> bool | None:
    """Return True if an earlier attempt of this job began on the first node, False if none did, None if unknown.

    It is unknown unless the scheduler is Slurm, since only Slurm jobs keep the exit files of all attempts.
    """
    path, attempt = environ.get(environment.EXIT_FILE, ''), environ.get(environment.ATTEMPT, '')
    stem, numbered, _ = path.rpartition(f'.{attempt}.exits')
    if not numbered:
        return None
    files = [_read_lines(Path(f'{stem}.{number}.exits')) for number in range(int(attempt))]
    # A node that ended before starting its ranks writes no cause; one that failed the preflight writes `hardware`.
    # Any other cause proves that an attempt began, even if its `begin` record is missing because attempts.jsonl was not
    # writable.
    causes = {line.split()[2] for lines in files for line in lines if len(line.split()) > 2}
    if causes - {'hardware'}:
        return True
    return False if all(files) else None


def report_exit(status: int, environ: Mapping[str, str], outcome: Outcome | None = None) -> int:
    """Append this node's exit record to the shared exit file, if any; remove its heartbeat; return the exit status."""
    liveness.remove_heartbeat()
    cause = '' if outcome is None or outcome.status != status else f' {outcome.cause} {outcome.detail}'.rstrip()
    append_exit_line(environ, f'{status} {environment.machine_name(environ)}{cause}')
    return status


def append_exit_line(environ: Mapping[str, str], line: str) -> None:
    path = environ.get(environment.EXIT_FILE)
    if path is None:
        return

    def append() -> None:
        with open(path, 'a', encoding='utf-8') as file:
            # Remove line breaks: the text after one would be read as the record of another node.
            file.write(' '.join(line.split()) + '\n')

    problem = storage_problem(append)
    if problem:
        print(f'{path} cannot be written ({problem})', file=sys.stderr)


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file; empty if it cannot be read in time."""

    def read() -> list[str]:
        try:
            return path.read_text(encoding='utf-8').splitlines()
        except OSError:
            return []

    return call_with_limit(read, STORAGE_SECONDS, [])
