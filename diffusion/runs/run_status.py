"""Status of a run from its files: running, silent or ended, its progress and its attempts."""

import contextlib
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from diffusion.config.yaml_files import parse_yaml
from diffusion.errors import UserError
from diffusion.runs import attempts, node_status, run_lock
from diffusion.runs.attempts import Attempt
from diffusion.runs.node_status import NodeStatus
from diffusion.storage.places import PATIENT, Listing, Place, StorePlace, files_of_run, is_url
from diffusion.storage.text_tables import parse_json_lines

# Files that training writes. Their names are repeated here because the modules that write them import PyTorch.
METRICS, TRAIN_LOSS, RECIPE, RECEIPT = 'metrics.jsonl', 'loss/train/total', 'recipe.yaml', 'receipt.json'
_TAIL_BYTES = 2**16
"""Number of bytes to read from the end of metrics.jsonl, enough for the metrics of many batches."""
SILENT_SECONDS = 60.0
"""Minimum time without a batch after which a running job counts as silent."""
SILENT_BATCHES = 10
"""A job counts as silent only after this number of average batch times without a batch."""
WATCH_SECONDS = 12.0
"""Time to watch a lock for changes if its owner is on another machine. A live owner rewrites it every 5 seconds."""
BUCKET_WATCH_SECONDS = 40.0
"""Time to watch a lock in an object store, which is rewritten every 15 seconds, or less often if the store is slow."""


@dataclass
class RunReport:
    """Status of a run. `diffusion status --json` prints these fields.

    Attributes:
        state: starting (no batch yet), running, silent (no batch for longer than usual), or ended.
        batch: Number of batches that the run has completed, or None if unknown.
        duration: The training's length as in the recipe, such as 5000ba or 3ep, or None if unknown.
        total_batches: The training's length in batches, or None if unknown.
        batches_per_second: Recent speed without evaluations and saves, or None if unknown or not running.
        seconds_left: Time to the end of training at the recent speed, or None.
        silent_seconds: Time since the last batch, or None if not training.
        last_loss: Last training loss in metrics.jsonl, or None.
        newest_checkpoint: Path or URL of the newest checkpoint of the run, or None.
        process: Description of the process that holds the run's lock, or None.
        cause: Why the last attempt ended, such as `preempted`, or None if it still runs or has no record.
        nodes: For each node of a running job: node, host, doing, batch and silent_seconds.
        attempts: The recorded attempts; see `diffusion.runs.attempts.Attempt`. The cause of a running attempt is
            `running`.
        goodput: Fraction of time since the first start spent in batches that no later attempt repeated, or None.
        last_activity: Time of the run's last sign of activity, in seconds since 1970.
    """

    run: str
    state: str
    batch: int | None = None
    duration: str | None = None
    total_batches: int | None = None
    batches_per_second: float | None = None
    seconds_left: float | None = None
    silent_seconds: float | None = None
    last_loss: float | None = None
    newest_checkpoint: str | None = None
    process: str | None = None
    cause: str | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    goodput: float | None = None
    last_activity: float = 0.0


def inspect_run(run: Path | str) -> RunReport:
    """Return the status of a run from its files.

    Raises:
        UserError: The folder or URL contains no files of a run.
        OSError: The storage fails.
    """
    files = files_of_run(run, PATIENT)
    listing, lock = files.list(), run_lock.RunLock(run)
    saved = newest_batch(files, listing)
    newest = None if saved is None else files.locate(f'ba{saved}')
    known = {METRICS, run_lock.LOCK, attempts.ATTEMPTS, node_status.FOLDER}
    if saved is None and not known & {*listing.files, *listing.folders}:
        raise UserError(
            f'status: {run} has no {METRICS}, {run_lock.LOCK} or checkpoint; give the folder or URL of a run, such '
            'as runs/phase1, or a job YAML'
        )
    found = node_status.read_statuses(run)
    last = _last_loss(files.read(METRICS, tail_bytes=_TAIL_BYTES))
    content = _lock_text(lock)
    owner, alive = run_lock.parse_owner(content), _is_alive(lock, content)
    recorded = attempts.read_attempts(run) if attempts.ATTEMPTS in listing.files else []
    traces = [each.written for each, _ in found] + [each.end for each in recorded] + [_written(content)]
    if not is_url(run):
        # In a folder, use the files' modification times instead; in a store, only times stated in the files count.
        paths = [Path(run, name) for name in known] + ([] if newest is None else [Path(newest)])
        traces = [time for path in paths if (time := _modified(path)) is not None]
    report = RunReport(
        str(run),
        'ended',
        batch=last[0] if last else saved,
        duration=_duration(files.read(RECIPE)),
        last_loss=last[1] if last else None,
        newest_checkpoint=newest,
        process=_describe_process(content),
        attempts=[asdict(attempt) for attempt in recorded],
        goodput=attempts.time_breakdown(recorded)[0].goodput if recorded else None,
        last_activity=max(traces),
    )
    if not alive:
        report.cause = recorded[-1].cause if recorded else None
        return report
    if recorded and recorded[-1].status is None:
        report.attempts[-1]['cause'] = 'running'  # `read_attempts` sets the cause 'lost' without an end record
    token = '' if owner is None else owner.token
    training = recorded[-1].first is not None if recorded and recorded[-1].launched else True
    current = [(each, age) for each, age in found if each.owner in ('', token) and each.doing != node_status.ENDED]
    if training and current:
        _add_progress(report, current)
    else:
        report.state = 'starting'
    return report


def newest_batch(files: Place, listing: Listing) -> int | None:
    """Return the batch number of a run's newest checkpoint; None if there is none."""
    batches = sorted(int(name[2:]) for name in listing.folders if name[:2] == 'ba' and name[2:].isdigit())
    if isinstance(files, StorePlace):
        # A checkpoint without a receipt is still being uploaded or is incomplete.
        return next((each for each in reversed(batches) if files.read(f'ba{each}/{RECEIPT}') is not None), None)
    return batches[-1] if batches else None


def _lock_text(lock: run_lock.RunLock) -> str | None:
    """Return the content of a lock; None if no job holds it, empty if its file cannot be read."""
    try:
        content = lock.read(patient=True)
    except UserError as error:  # the store refuses access, which is not a mistake in this command
        raise OSError(str(error)) from error
    return None if content is None or content.text == run_lock.RELEASED else content.text


def _add_progress(report: RunReport, current: list[tuple[NodeStatus, float]]) -> None:
    # All nodes wait for each other in each batch, so the newest status shows the progress of the run.
    newest, silent = min(current, key=lambda each: each[1])
    seconds = newest.seconds_per_batch
    limit = max(SILENT_SECONDS, SILENT_BATCHES * (seconds or 0.0))
    if is_url(report.run):
        limit += node_status.BUCKET_INTERVAL_SECONDS  # a status may be that much older than the last batch
    report.state = 'silent' if silent > limit else 'running'
    report.batch = max(status.batch for status, _ in current)
    report.total_batches = newest.total_batches
    report.silent_seconds = silent
    if seconds:
        report.batches_per_second = 1 / seconds
        report.seconds_left = None if newest.total_batches is None else (newest.total_batches - report.batch) * seconds
    report.nodes = [
        {'node': each.node, 'host': each.host, 'doing': each.doing, 'batch': each.batch, 'silent_seconds': age}
        for each, age in current
    ]


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_alive(lock: run_lock.RunLock, content: str | None) -> bool:
    """Return True if the process that holds a lock is running or, if on another machine, still changes the lock."""
    owner = run_lock.parse_owner(content)
    if owner is None:
        return False
    alive = owner.is_alive()
    if alive is not None:
        return alive
    # Watch for changes: the owner rewrites the lock every few seconds. Its age proves little, since clocks differ.
    if lock.in_bucket:
        modified, refresh, watch = _written(content), run_lock.BUCKET_REFRESH_SECONDS, BUCKET_WATCH_SECONDS
    else:
        modified, refresh, watch = _modified(Path(lock.path)), run_lock.REFRESH_SECONDS, WATCH_SECONDS
    if modified is None or abs(time.time() - modified) < 2 * refresh:
        return modified is not None
    until = time.monotonic() + watch
    while time.monotonic() < until:
        time.sleep(2.0 if lock.in_bucket else 0.5)
        current = run_lock.read_lock(lock)
        if current is None:
            return False
        if current not in ('', content):  # '' if the storage does not respond
            return True
    return False


def _written(content: str | None) -> float:
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        return float(json.loads(content or '{}').get('at', 0.0))
    return 0.0


def format_report(report: RunReport) -> str:
    """Return a text report of a run: its state and progress, then its attempts and goodput."""
    recorded = [Attempt(**each) for each in report.attempts]
    total = report.total_batches or (report.duration and report.duration.removesuffix('ba'))
    unknown = report.batch is None or (report.last_loss is None and not report.nodes)
    batch = 'unknown' if report.batch is None else f'{report.batch} or later' if unknown else f'{report.batch}'
    values = {'batch': batch if total is None else f'{batch} of {total}'}
    if report.batches_per_second is not None:
        values['speed'] = f'{report.batches_per_second:.2f} batches/s'
    if report.seconds_left is not None and report.state == 'running':
        values['time left'] = attempts.format_duration(report.seconds_left)
    values['last loss'] = 'unknown' if report.last_loss is None else f'{report.last_loss:.4f}'
    values['newest checkpoint'] = report.newest_checkpoint or 'none'
    for node in report.nodes:
        since = attempts.format_duration(node['silent_seconds'])
        values[f'node {node["node"]}'] = f'{node["doing"]} on {node["host"]}, last batch {since} ago'
    values['process'] = report.process or 'none, the run has ended'
    moment = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(report.last_activity))
    age = attempts.format_duration(max(0.0, time.time() - report.last_activity), decimals=0)
    values['last activity'] = f'{moment}, {age} ago'
    lines = [f'{report.run}: {_headline(report, recorded)}', *(f'  {key:18s} {each}' for key, each in values.items())]
    if recorded:
        lines += attempts.attempts_table(recorded, running=report.state != 'ended')
    return '\n'.join(lines)


def _headline(report: RunReport, recorded: list[Attempt]) -> str:
    if report.state == 'silent' and report.silent_seconds is not None:
        return f'silent, no batch for {attempts.format_duration(report.silent_seconds)}'
    if report.state != 'ended':
        return report.state
    if not recorded:
        return 'ended'
    return f'ended, {attempts.describe_attempt(recorded[-1].cause, recorded[-1].detail).removeprefix("ended ")}'


def _last_loss(metrics: bytes | None) -> tuple[int, float] | None:
    """Return the number of trained batches and the last training loss at the end of a metrics.jsonl, or None."""
    for values in reversed(parse_json_lines(metrics or b'')):
        step, loss = values.get('step'), values.get(TRAIN_LOSS)
        if isinstance(step, int) and isinstance(loss, float):  # other lines have other metrics
            return step + 1, loss
    return None


def _duration(recipe: bytes | None) -> str | None:
    """Return the length of training, given the content of a recipe, or None if unknown."""
    try:
        content = parse_yaml((recipe or b'').decode(errors='replace'))
    except (ValueError, yaml.YAMLError, RecursionError):  # the file was not written by this program
        return None
    trainer = content.get('trainer') if isinstance(content, dict) else None
    duration = trainer.get('max_duration') if isinstance(trainer, dict) else None
    return None if duration is None else str(duration)


def _describe_process(content: str | None) -> str | None:
    if content is None:
        return None
    owner = run_lock.parse_owner(content)
    if owner is None:
        return 'unknown'
    state = {True: 'running', False: 'ended without releasing the run', None: 'not visible from this machine'}
    return f'{owner}: {state[owner.is_alive()]}'
