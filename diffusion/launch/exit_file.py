"""Exit file of a job's attempt: one line per ended node; the first failure tells why the attempt ended."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, PREEMPTED
from diffusion.launch import environment, liveness
from diffusion.launch.workers import Outcome


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
    try:
        with open(path, 'a', encoding='utf-8') as file:
            # One line per node: a line break in a name would be read as the record of another node.
            file.write(' '.join(line.split()) + '\n')
    except OSError as error:
        print(f'{path} cannot be written ({error})', file=sys.stderr)
