"""Attempts (starts and restarts) of a training run, as recorded in attempts.jsonl, and the resulting goodput."""

import contextlib
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from diffusion.config.schema import fits
from diffusion.errors import UserError
from diffusion.runs.run_id import RUN_FILE
from diffusion.runs.run_lock import boot_id
from diffusion.storage.atomic import write_atomically
from diffusion.storage.local_files import LAUNCH, open_own_file, working_folder
from diffusion.storage.places import PATIENT, Place, files_of_run, is_url
from diffusion.storage.retry import RetryPolicy
from diffusion.storage.text_tables import parse_json_lines

ATTEMPTS = 'attempts.jsonl'
_update = threading.Lock()
"""Lock held while a record is appended to the local copy."""
_upload = threading.Lock()
"""Lock held during uploads of the local copy. An upload may still run after its caller has stopped waiting for it."""
_reconciled: set[Path] = set()
"""Local copies that this process has compared with the object in the store."""
_MAX_BYTES = 2**24
"""Maximum number of bytes to read from the end of attempts.jsonl, enough for the records of weeks."""
STUCK_ATTEMPTS = 3
"""Number of consecutive attempts that fail at the same batch, over at least STUCK_SECONDS, after which the run is given
up."""
HARDWARE_FAULTS = 3
"""Number of consecutive attempts with hardware faults on one machine after which the run is given up."""
FAULTS = 'faults'
"""Subfolder of the run's folder with one JSON file per hardware fault, written by the node that found it."""
_CLOCK_SKEW_SECONDS = 60.0
"""Assumed upper bound on the difference between two nodes' clocks."""
STUCK_SECONDS = 1800.0
"""Minimum total duration of STUCK_ATTEMPTS attempts, so that shorter outages do not end the run."""
CAUSES = {
    'done': 'completed',
    'preempted': 'preempted',
    'stopped': 'stopped by you',
    'crash': 'process failed',
    'killed': 'process killed',
    'hang': 'hang',
    'hardware': 'bad hardware',
    'mistake': 'user error',
    'lost': 'ended without a report',
}
"""Descriptions of the causes that end an attempt, by `Attempt.cause`."""


@dataclass
class Attempt:
    """Record of one start or restart of a training run. Times are in seconds since 1970 on the first node's clock.

    Attributes:
        number: Number of the attempt within the run, from 1.
        end: Time when the attempt ended, or the time of its last record if the end was not recorded.
        first: Number of batches that the run had completed when the attempt's first batch began; None if none began.
        first_at: Time when the first batch of the attempt began.
        last: Number of batches that the run had completed when the attempt ended.
        last_at: Time when the last batch of the attempt ended.
        status: Exit status of the node that failed first, or of the first node if none failed or there is no shared
            exit file; None if not recorded.
        cause: Cause of the end, a key of `CAUSES`.
        detail: Further description of the cause, such as the ranks that failed.
        machine: Machine on which the attempt failed; empty if unknown or if it did not fail.
        launched: False for attempts by `run.py` without the node entry point, which do not count against max_restarts.
        devices: Number of GPUs (or processes on CPUs) of the attempt; None if not recorded.
        gpu: GPU model, as in planning/gpus.yaml or as reported by the driver; `cpu` without GPUs, empty if not
            recorded.
    """

    number: int
    begin: float
    end: float = 0.0
    first: int | None = None
    first_at: float = 0.0
    last: int | None = None
    last_at: float = 0.0
    status: int | None = None
    cause: str = 'lost'
    detail: str = ''
    machine: str = ''
    launched: bool = True
    devices: int | None = None
    gpu: str = ''


def describe_attempt(cause: str, detail: str) -> str:
    """Return the cause of an attempt's end with its detail, such as 'process killed (rank 3 by SIGKILL)'."""
    return CAUSES.get(cause, cause) + (f' ({detail})' if detail else '')


class Clock:
    """Clock of a run's attempts: seconds since 1970, without jumps when the system clock is set.

    It starts with the system clock's time and advances with time.monotonic(), so it does not count time in which the
    machine is suspended. It continues after a restart on the same machine, and is never behind the run's last record.
    """

    def __init__(self, run: Path | str | None = None) -> None:
        last = _last_record(run) if run is not None else {}
        now, monotonic, boot = time.time(), time.monotonic(), boot_id()
        self._offset = now - monotonic
        with contextlib.suppress(KeyError, TypeError):  # `last` is empty without records
            if last['boot'] == boot and boot:
                self._offset = last['at'] - last['monotonic']
            else:
                self._offset = max(now, last['at']) - monotonic

    def now(self) -> float:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        """Convert a value of time.monotonic() on this machine to this clock's time."""
        return self._offset + monotonic

    def stamp(self) -> dict[str, Any]:
        """Return the current time as fields of a record, from which a later attempt's clock can continue."""
        monotonic = time.monotonic()
        return {'at': self.at(monotonic), 'monotonic': monotonic, 'boot': boot_id()}


def _last_record(run: Path | str) -> dict[str, Any]:
    """Return the last complete record in a run's attempts.jsonl; empty if there is none."""
    try:
        records = parse_json_lines(files_of_run(run).read(ATTEMPTS, tail_bytes=_MAX_BYTES) or b'')
    except OSError:
        return {}
    return records[-1] if records else {}


def append_attempt(run: Path | str, event: str, attempt: Attempt, clock: Clock | None = None) -> None:
    """Append the state of an attempt to a run's attempts.jsonl; `event` is begin, progress or end.

    Only the process that holds the run's lock may call this.

    Raises:
        OSError: The file cannot be written, or no longer exists although the attempt has begun.
    """
    record = {'event': event} | (clock or Clock()).stamp() | asdict(attempt)
    if is_url(run):
        return _append_to_object(str(run), record)
    # A killed node can leave a partial line. With a single write() and O_APPEND, it is always the last line, and the
    # leading newline separates it from the next record.
    line = f'\n{json.dumps(record)}\n'
    # Create the file only when an attempt begins: if the file system has been unmounted, a new file would make the
    # empty mount point look like a run.
    create = os.O_CREAT if event == 'begin' else 0
    # Call os.fsync, so that the record survives the loss of the node.
    descriptor = open_own_file(Path(run, ATTEMPTS), create | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_begun(run: Path | str) -> bool:
    """Return True if a run's files show that an attempt has begun: run.json, attempts.jsonl or a checkpoint."""
    listing = files_of_run(run, PATIENT).list()
    names = {*listing.files, *listing.folders}
    return bool(names & {RUN_FILE, ATTEMPTS}) or any(name[:2] == 'ba' and name[2:].isdigit() for name in names)


def _append_to_object(url: str, record: dict[str, Any]) -> None:
    """Append a record to attempts.jsonl of the run at a URL, and to the file's copy on a local disk.

    Objects do not support appending, so the whole file is uploaded for each record. To keep it small, a progress record
    replaces the previous one of the same attempt: a year of records every 30 s would be hundreds of megabytes per
    upload.

    Raises:
        OSError: The object or its local copy cannot be read or written. If the record is in the local copy, the next
            call uploads it too.
    """
    path, files = working_folder(url, LAUNCH) / ATTEMPTS, files_of_run(url)
    with _update:
        if record['event'] == 'begin' or path not in _reconciled or not path.exists():
            # Include the records in the store, because the upload replaces them.
            records = newer_records(files.read(ATTEMPTS), path.read_bytes() if path.exists() else b'')
            _reconciled.add(path)
        else:
            records = parse_json_lines(path.read_bytes())
        last = records[-1] if records else {}
        if last.get('event') == 'progress' and all(last.get(key) == record.get(key) for key in ('number', 'begin')):
            records.pop()
        write_atomically(path, ''.join(json.dumps(each) + '\n' for each in [*records, record]))
    # Use a separate lock, so that a slow upload does not delay later records in the local copy.
    with _upload:
        files.write(ATTEMPTS, path.read_bytes())


def newer_records(stored: bytes | None, local: bytes) -> list[dict[str, Any]]:
    """Return the stored records, or the local ones if these continue them; empty if `stored` is None.

    The local copy is ahead if this node was lost before the upload. It is behind or different if the run continued on
    another node, or if the object was deleted (`stored` is None) or edited.
    """
    if stored is None:
        return []
    in_store, on_disk = parse_json_lines(stored), parse_json_lines(local)
    common = in_store[:-1] if in_store and in_store[-1].get('event') == 'progress' else in_store
    if len(on_disk) < len(in_store) or on_disk[: len(common)] != common:
        return in_store
    # Compare the times, since both may end with a progress record of the same attempt.
    times = [records[-1].get('at') if records else 0.0 for records in (in_store, on_disk)]
    stored_at, local_at = (time if isinstance(time, int | float) else 0.0 for time in times)
    return on_disk if local_at >= stored_at else in_store


def read_attempts(run: Path | str, retry: RetryPolicy = PATIENT) -> list[Attempt]:
    """Return a run's attempts from attempts.jsonl in order, each with the values of its last record.

    Raises:
        UserError: The run has no attempts.jsonl.
        OSError: The storage fails.
    """
    files = files_of_run(run, retry)
    content = files.read(ATTEMPTS, tail_bytes=_MAX_BYTES)
    if content is None:
        path = files.locate(ATTEMPTS)
        raise UserError(f'{path} does not exist; only a run that has started training records its attempts')
    found: dict[tuple[int, float], Attempt] = {}
    kinds: dict[str, Any] = get_type_hints(Attempt)
    for values in parse_json_lines(content):
        event, recorded_at = values.pop('event', None), values.pop('at', None)
        values = {key: value for key, value in values.items() if key not in ('monotonic', 'boot')}
        # The file may have been edited, so check all fields and types.
        known = all(name in kinds and fits(kinds[name], value) for name, value in values.items())
        numbers = [value for value in (recorded_at, *values.values()) if isinstance(value, int | float)]
        plausible = isinstance(recorded_at, int | float) and all(-1e11 < number < 1e11 for number in numbers)
        if not known or not plausible or not {'number', 'begin'} <= values.keys():
            continue
        attempt = Attempt(**values)
        # Without an 'end' record, the node was lost: the time of the last record is the best estimate of the end.
        if event != 'end':
            attempt.end = recorded_at
        found[attempt.number, attempt.begin] = attempt
    result = list(found.values())
    first = max(1, result[0].number) if result else 1  # version 0.1.0 counted from 0
    for number, attempt in enumerate(result, first):
        attempt.number = number
    _assign_faults(result, files)
    return result


def next_number(earlier: Sequence[Attempt]) -> int:
    """Return the number of the attempt that follows the recorded ones."""
    return earlier[-1].number + 1 if earlier else 1


def record_fault(run: Path | str, machine: str, detail: str) -> None:
    """Record a machine's hardware fault in the run's folder; any node of a job may call this."""
    # Write one file per fault: nodes that append to the same file on a network file system overwrite each other's
    # lines. Without a shared exit file (jobset, sagemaker, skypilot), only this file records the machine.
    at = time.time()
    name = re.sub(r'[^A-Za-z0-9_.-]', '_', machine)
    content = json.dumps({'at': at, 'machine': machine, 'detail': detail})
    files_of_run(run).write(f'{FAULTS}/{at:.3f}-{name}.json', content + '\n')


def _assign_faults(found: list[Attempt], files: Place) -> None:
    """Set cause, machine and detail of attempts that were ended by a recorded hardware fault."""
    for name in sorted(name for name in files.list(FAULTS).files if name.endswith('.json')):
        try:
            fault = json.loads(files.read(f'{FAULTS}/{name}') or b'')
            at, machine, detail = float(fault['at']), str(fault['machine']), str(fault['detail'])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        # Choose the attempt nearest in time: a restart may begin within seconds of the fault, but clocks may differ by
        # more. If a fault is before the first attempt, the record of its attempt was deleted.
        begun = [each for each in found if each.begin <= at + _CLOCK_SKEW_SECONDS]
        attempt = min(begun, key=lambda each: max(each.begin - at, at - each.end), default=None)
        # If another node is faulty, the first node has recorded only a consequence, such as a failed collective.
        if attempt is not None and attempt.cause in ('preempted', 'stopped', 'crash', 'lost'):
            attempt.cause, attempt.machine, attempt.detail = 'hardware', machine, f'{machine}: {detail}'


def restarts_used(earlier: Sequence[Attempt]) -> int:
    """Return the number of restarts used up by the last consecutive attempts that failed without progress.

    Attempts that completed, were preempted or stopped, or ran without the node entry point do not count. An attempt
    that resumes from a newer checkpoint than before resets the number to 0.
    """
    used, furthest = 0, None
    for attempt in earlier:
        # An attempt made progress if it starts at a later batch than all before it; the first one sets the baseline.
        if attempt.first is not None and (furthest is None or attempt.first > furthest):
            used, furthest = (0 if furthest is not None else used), attempt.first
        used += attempt.launched and attempt.cause not in ('preempted', 'stopped', 'done')
    return used


def reason_to_give_up(earlier: Sequence[Attempt], max_restarts: int) -> str | None:
    """Return why a run should not be restarted, or None if it may be."""
    earlier = [attempt for attempt in earlier if attempt.launched]
    used = restarts_used(earlier)
    if used > max_restarts:
        return (
            f'the run failed {used} times without progress (max_restarts: {max_restarts}); fix the '
            'cause, then raise restart.max_restarts or delete this file'
        )
    last = earlier[-HARDWARE_FAULTS:]
    # Faults on the same machine count even if the run made progress in between: a GPU can fail after hours.
    machines = {attempt.machine for attempt in last}
    if len(last) == HARDWARE_FAULTS and all(each.cause == 'hardware' for each in last) and len(machines) == 1:
        return (
            f'the last {HARDWARE_FAULTS} attempts ended with bad hardware on {machines.pop() or "an unknown machine"} '
            f'({last[-1].detail}); replace or repair the machine, and delete this file'
        )
    last = earlier[-STUCK_ATTEMPTS:]
    # Other causes do not show that the run is broken: after a preemption or bad hardware, it may get further on other
    # machines. After a 'mistake', it is not restarted by default.
    failed = all(attempt.cause in ('crash', 'killed', 'hang', 'lost') for attempt in last)
    if len(last) < STUCK_ATTEMPTS or not failed or len({attempt.last for attempt in last}) > 1:
        return None
    if last[-1].end - last[0].begin < STUCK_SECONDS:
        return None
    position = 'before the first batch' if last[-1].last is None else f'after batch {last[-1].last}'
    return (
        f'the last {STUCK_ATTEMPTS} attempts ended {position} ({last[-1].detail}); fix the cause and delete this file'
    )


@dataclass
class TimeBreakdown:
    """Time from the first start of a training run to its end, in seconds by category.

    Attributes:
        productive: Time in batches that no later attempt repeated.
        starting: Time from the start of each attempt to its first batch, or to its end if no batch began.
        redone: Time in batches that a later attempt repeated.
        down: Time between attempts.
        ending: Time from the last batch of each attempt to its end.
    """

    wall: float
    productive: float = 0.0
    starting: float = 0.0
    redone: float = 0.0
    down: float = 0.0
    ending: float = 0.0

    @property
    def goodput(self) -> float:
        """Fraction of the elapsed time spent in batches that no later attempt repeated."""
        return self.productive / self.wall if self.wall else 0.0


def time_breakdown(attempts: Sequence[Attempt]) -> tuple[TimeBreakdown, dict[str, float]]:
    """Return the time of a run by category, and the seconds lost by each cause (a key of `CAUSES`) of a restart.

    The lost time includes shutdown, downtime, startup of the next attempt, and batches that had to be repeated.
    """
    found = TimeBreakdown(attempts[-1].end - attempts[0].begin)
    lost: dict[str, float] = defaultdict(float)
    for index, attempt in enumerate(attempts):
        later = attempts[index + 1 :]
        began = attempt.first is not None
        # Each second of the elapsed time belongs to exactly one category.
        training = attempt.last_at - attempt.first_at if began else 0.0
        ending = attempt.end - attempt.last_at if began else 0.0
        redone = _fraction_redone(attempt, later) * training
        down = later[0].begin - attempt.end if later else 0.0
        found.starting += _starting(attempt)
        found.productive += training - redone
        found.redone += redone
        found.ending += ending
        found.down += down
        if later:
            # The cause also made the next attempt necessary, so add that attempt's startup.
            lost[attempt.cause] += ending + down + redone + _starting(later[0])
    return found, dict(lost)


def _starting(attempt: Attempt) -> float:
    return (attempt.end if attempt.first is None else attempt.first_at) - attempt.begin


def _fraction_redone(attempt: Attempt, later: Sequence[Attempt]) -> float:
    """Return the fraction of an attempt's batches that later attempts repeated."""
    starts = [each.first for each in later if each.first is not None]
    if attempt.first is None or attempt.last is None or attempt.last == attempt.first or not starts:
        return 0.0
    # Use the earliest start of all later attempts: resuming from an old checkpoint repeats batches of several attempts.
    kept = min(max(min(starts), attempt.first), attempt.last)
    return (attempt.last - kept) / (attempt.last - attempt.first)


def attempts_table(attempts: Sequence[Attempt], *, running: bool = False) -> list[str]:
    """Return the lines of a report of a run's attempts, its goodput and the time lost to each cause."""
    found, lost = time_breakdown(attempts)
    lines = [f'{len(attempts)} attempt{"s" * (len(attempts) > 1)}']
    for attempt in attempts:
        batches = 'no batch' if attempt.first is None else f'batches {attempt.first} to {attempt.last}'
        status = '' if attempt.status is None else f', exit status {attempt.status}'
        begin = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(attempt.begin))
        reason = describe_attempt(attempt.cause, attempt.detail)
        if running and attempt is attempts[-1]:
            reason = 'running'
        duration = format_duration(attempt.end - attempt.begin)
        lines.append(f'  {attempt.number:3d}  {begin}  {duration:>8}  {batches}; {reason}{status}')
    parts = {
        'productive': found.productive,
        'starting': found.starting,
        'repeated': found.redone,
        'ending': found.ending,
        'down': found.down,
    }
    shares = ', '.join(f'{name} {format_duration(seconds)}' for name, seconds in parts.items())
    lines.append(f'goodput {found.goodput:.3f} of {format_duration(found.wall)}: {shares}')
    for cause, seconds in sorted(lost.items(), key=lambda item: -item[1]):
        if cause != 'done':
            lines.append(f'  time lost ({CAUSES.get(cause, cause)}): {format_duration(seconds)}')
    return lines


def format_duration(seconds: float, decimals: int = 1) -> str:
    if seconds < 120:
        return f'{seconds:.{decimals}f} s'
    return f'{seconds / 60:.{decimals}f} min' if seconds < 7200 else f'{seconds / 3600:.{decimals}f} h'
