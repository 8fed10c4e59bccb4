"""Run commands one after another with a time limit each, and keep a result file per command, so that a rerun resumes.

A command with a result is not run again. A command that was interrupted has no result and is run again from its start.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from redaction import Redaction

from diffusion.storage.atomic import write_atomically

PASSED, FAILED, TIMED_OUT = 'passed', 'failed', 'timed out'
DATA = '{data}'
"""Placeholder in a command for the file to which it writes its figures: JSON, or JUnit's XML for tests."""
MAX_OUTPUT = 20_000
"""Characters of output kept per slice: the last ones, in which a failure is."""
KILL_SECONDS = 10.0
"""Time between SIGTERM and SIGKILL for a slice that exceeds its limit."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Slice:
    """One command of a check.

    Attributes:
        name: Name of the result file.
        title: Description for people.
        command: Program and arguments; `DATA` stands for the file of its figures.
        kind: Kind of the figures: tests (JUnit's XML), or another word for JSON.
        limit_seconds: Time after which the command is ended.
        environment: Environment variables to add.
    """

    name: str
    title: str
    command: Sequence[str]
    kind: str
    limit_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Result of a slice.

    Attributes:
        name: Name of the slice.
        title: Description for people.
        kind: Kind of the figures.
        status: PASSED, FAILED or TIMED_OUT.
        reason: Why it did not pass; empty if it did.
        seconds: Duration.
        output: The last MAX_OUTPUT characters that it printed.
        data: Figures that it wrote; None if there are none.
        conditions: Versions and devices it ran with; results under other conditions are not kept.
    """

    name: str
    title: str
    kind: str
    status: str
    reason: str
    seconds: float
    output: str
    data: Any
    conditions: Mapping[str, Any]


def run_slices(
    slices: Sequence[Slice],
    folder: Path,
    conditions: Mapping[str, Any],
    redaction: Redaction,
    *,
    retry: bool = False,
    finished: Callable[[], object] = lambda: None,
) -> list[Result]:
    """Run the slices that have no result under these conditions, and return the results of all.

    Args:
        slices: The slices, in order.
        folder: Folder of the results.
        conditions: Versions and devices, which must be equal for all results.
        redaction: Removes names of this machine and secrets from everything that is written.
        retry: Run slices again whose result is not PASSED.
        finished: Called after each slice that ran.
    """
    results = []
    for number, each in enumerate(slices, 1):
        label = f'[{number}/{len(slices)}] {each.title}'
        result = read_result(folder, each.name)
        if result is not None and result.conditions == conditions and not (retry and result.status != PASSED):
            print(f'{label}: {result.status} before', flush=True)
        else:
            print(f'{label} (at most {each.limit_seconds / 60:.3g} minutes)', flush=True)
            result = run_slice(each, folder, conditions, redaction)
            reason = f': {result.reason}' if result.reason else ''
            print(f'    {result.status} after {result.seconds:.0f} s{reason}', flush=True)
            write_result(folder, result)
            finished()
        results.append(result)
    return results


def run_slice(each: Slice, folder: Path, conditions: Mapping[str, Any], redaction: Redaction) -> Result:
    """Run a slice and return its result."""
    running = folder / 'running'
    running.mkdir(parents=True, exist_ok=True)
    data, log = running / f'{each.name}.data', running / f'{each.name}.log'
    data.unlink(missing_ok=True)
    command = [word.replace(DATA, str(data)) for word in each.command]
    started = time.monotonic()
    with log.open('wb') as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | each.environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            code = process.wait(each.limit_seconds)
            status, reason = (PASSED, '') if code == 0 else (FAILED, _describe(code))
        except subprocess.TimeoutExpired:
            status, reason = TIMED_OUT, f'it took more than {each.limit_seconds:g} s'
        finally:
            # End processes at Ctrl-C too, and those that it left behind: they would disturb the next measurement.
            end_group(process)
    seconds = time.monotonic() - started
    found, problem = read_data(data, each.kind)
    if status == PASSED and problem:
        status, reason = FAILED, problem
    text = log.read_text(encoding='utf-8', errors='replace')[-MAX_OUTPUT:]
    clean = redaction.clean
    return Result(
        each.name, each.title, each.kind, status, reason, seconds, clean(text), clean(found), dict(conditions)
    )


def end_group(process: 'subprocess.Popen[bytes]') -> None:
    """End a process and all processes of its group: by SIGTERM, and by SIGKILL if that does not suffice."""
    for number, patience in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
        except (ProcessLookupError, PermissionError):
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def read_data(path: Path, kind: str) -> tuple[Any, str]:
    """Return the figures that a slice wrote, and a description of the problem if there are none."""
    if not path.exists():
        return None, 'it wrote no figures'
    text = path.read_text(encoding='utf-8', errors='replace')
    try:
        return (read_tests(text) if kind == 'tests' else json.loads(text)), ''
    except (ValueError, ElementTree.ParseError) as error:
        return None, f'its figures cannot be read: {error}'


def read_tests(text: str) -> list[dict[str, Any]]:
    """Return the tests in JUnit's XML as pytest writes it: name, outcome, reason and seconds of each."""
    found = []
    for case in ElementTree.fromstring(text).iter('testcase'):
        outcome, reason = PASSED, ''
        for child in case:
            if child.tag in ('failure', 'error', 'skipped'):
                outcome = 'skipped' if child.tag == 'skipped' else FAILED
                reason = child.get('message') or ''
        name = f'{(case.get("classname") or "").rpartition(".")[2]}::{case.get("name")}'
        found.append({'name': name, 'outcome': outcome, 'reason': reason, 'seconds': float(case.get('time') or 0)})
    return found


def write_result(folder: Path, result: Result) -> None:
    """Write the result file of a slice, whole or not at all."""
    write_atomically(folder / 'slices' / f'{result.name}.json', json.dumps(asdict(result), indent=1))


def read_result(folder: Path, name: str) -> Result | None:
    """Return the result of a slice; None if there is none that this version can read."""
    try:
        return Result(**json.loads((folder / 'slices' / f'{name}.json').read_text(encoding='utf-8')))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _describe(code: int) -> str:
    return f'it ended with status {code}' if code > 0 else f'it was ended by {signal.Signals(-code).name}'


def _die_with_parent() -> None:
    # After SIGKILL of this process, its child would keep the GPU.
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
