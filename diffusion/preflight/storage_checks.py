"""Preflight checks of a run's storage: all nodes share the folder, the bucket works, and writes are fast enough."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from diffusion.config.byte_sizes import bytes_text
from diffusion.config.recipe import Recipe
from diffusion.errors import UserError
from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED
from diffusion.launch.gpu_health import Finding
from diffusion.preflight.collective_checks import gather
from diffusion.runs import environment
from diffusion.runs.heartbeats import collective_timeout, hang_seconds_of, longest_limit
from diffusion.runs.run_id import RUN_FILE
from diffusion.storage import local_files, object_store
from diffusion.storage.retry import PreconditionFailed, RetryPolicy

SHARED_FOLDER = 'shared folder'


@dataclass(frozen=True)
class FolderView:
    """The run's folder as one node sees it.

    Attributes:
        file_system: Type and source of the folder's file system, such as `nfs4 server:/export`.
        begun: True if the node sees a run.json, which means that the run has begun.
        file: Name of the file that the node wrote.
        seen: Names of the nodes' files that the node can read, including its own.
    """

    machine: str
    file_system: str
    begun: bool
    file: str
    seen: frozenset[str]


def check_shared_folder(folder: Path) -> list[Finding]:
    """Let each node write a file and read all others; a collective that returns the same findings on all ranks."""
    name = f'.shared-{uuid4().hex}' if os.environ['LOCAL_RANK'] == '0' else ''
    if name:
        # Ignore storage faults, because other nodes wait in the collective. They will report this file as missing.
        with suppress(OSError):
            (folder / name).write_text(name, encoding='utf-8')
    names = [each for each in gather(name) if each]
    views = [each for each in gather(_view(folder, name, names) if name else None) if each is not None]
    if name:
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)
    return compare_views(folder, views)


def _view(folder: Path, name: str, names: Sequence[str]) -> FolderView:
    """Wait for the files of all nodes to be visible, for a limited time each; return this node's view."""
    # Wait up to VISIBLE_SECONDS for each file. Once a file stays invisible for that long, check those after it without
    # waiting.
    seconds, seen = local_files.VISIBLE_SECONDS, set()
    for other in names:
        if local_files.why_not_visible(folder / other, other, seconds):
            seconds = 0.0
        else:
            seen.add(other)
    begun = False
    with suppress(OSError):
        begun = (folder / RUN_FILE).exists()
    return FolderView(environment.machine_name(os.environ), file_system_of(folder), begun, name, frozenset(seen))


def compare_views(folder: Path, views: Sequence[FolderView]) -> list[Finding]:
    """Return one passing finding if all nodes share the folder, else a failure for each node with a wrong folder.

    If no group of nodes is more likely to have the right folder than the others, all nodes fail.
    """
    groups: list[list[FolderView]] = []
    for view in views:
        for group in groups:
            if group[0].file in view.seen and view.file in group[0].seen:
                group.append(view)
                break
        else:
            groups.append([view])
    if len(groups) == 1:
        what = f"{len(views)} nodes read each other's files" if len(views) > 1 else 'a single node'
        return [Finding(SHARED_FOLDER, True, f'{folder}: {what}')]
    # Nodes that see the run's files have the right folder. A new run has no files: trust the largest group of nodes.
    ordered = sorted(groups, key=lambda group: (any(each.begun for each in group), len(group)), reverse=True)
    rank_of = [(any(each.begun for each in group), len(group)) for group in ordered]
    right = ordered[0] if rank_of[0] > rank_of[1] else []
    status = BAD_HARDWARE
    if not right:
        # Here, no group of nodes is more likely to be right. If all have the same kind of file system, each node has a
        # folder of its own, which is a mistake in the recipe. If the kinds differ, some node lacks the mount.
        kinds = {view.file_system.split(' ')[0] for view in views}
        status = CONFIG_ERROR if len(kinds) == 1 and not any(view.begun for view in views) else FAILED
    findings = []
    for view in (view for group in ordered if group is not right for view in group):
        other = next(each for each in views if each.file not in view.seen or view.file not in each.seen)
        detail = (
            f'{folder} is on {view.file_system} here and on {other.file_system} on {other.machine}, which are not '
            'the same folder; mount it on all nodes, or set runs_dir to a folder that they share'
        )
        findings.append(Finding(SHARED_FOLDER, False, detail, status, view.machine))
    return findings


def file_system_of(path: Path) -> str:
    """Return the type and source of a path's file system, such as `nfs4 server:/export`."""
    path = path.resolve()
    found = (-1, 'an unknown file system')
    try:
        lines = Path('/proc/self/mounts').read_text(encoding='utf-8', errors='replace').splitlines()
    except OSError:
        return found[1]
    for line in lines:
        source, point, kind, *_ = line.split(' ')
        point = point.replace('\\040', ' ')
        # Take the last of several mounts at the same point (>=), which hides the others.
        if path.is_relative_to(point) and len(point) >= found[0]:
            found = (len(point), f'{kind} {source}')
    return found[1]


RETRY = RetryPolicy(tries=3, timeout_seconds=60.0)
CHUNK_BYTES = 2**24
GROWTH = 4


def check_bucket(url: str) -> Iterator[Finding]:
    """Check that this node can write, read and delete objects below a run's URL, and that conditional writes work."""
    marker, content = f'{url}/{marker_name()}', uuid4().hex.encode()
    try:
        object_store.write(marker, content, if_absent=True, retry=RETRY)
        same, tag = object_store.read(marker, retry=RETRY) == content, object_store.head(marker, retry=RETRY).tag
        refusals = {'If-None-Match': _refuses(marker, if_absent=True), 'If-Match': _refuses(marker, if_tag=f'{tag}0')}
        ignored = [name for name, refused in refusals.items() if not refused]
        # Skip this if the store ignored a condition: it has overwritten the object, whose etag has changed.
        accepts = ignored or not _refuses(marker, if_tag=tag)
        object_store.delete(marker, retry=RETRY)
    except (OSError, UserError) as error:
        yield Finding('bucket', False, str(error), FAILED)
        return
    if ignored or not accepts:
        what = f'ignores {" and ".join(ignored)}' if ignored else 'refuses If-Match with the etag that it returns'
        detail = (
            f'{url}: the store {what}, so the lock of a run does not work, and two jobs could train it; update the '
            'store, or set runs_dir to another one'
        )
        yield Finding('bucket', False, detail, CONFIG_ERROR)
        return
    if same:
        yield Finding('bucket', True, f'{url}: conditional writes, reading and deleting work')
    else:
        yield Finding(
            'bucket', False, f'{url}: the data read back from an object differs from the data written', FAILED
        )


def check_same_store(url: str) -> list[Finding]:
    """Let every node read an object of the first node; a collective that returns the same findings on all ranks."""
    marker = [f'{url}/{marker_name()}']
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            object_store.write(marker[0], b'preflight', retry=RETRY)
        except (OSError, UserError) as error:
            problem, marker = str(error), ['']
    dist.broadcast_object_list(marker, src=0)
    if os.environ['LOCAL_RANK'] == '0' and dist.get_rank() and marker[0]:
        try:
            object_store.read(marker[0], retry=RETRY)
        except (OSError, UserError) as error:
            problem = f'an object that the first node has written cannot be read ({error}); set the same '
            problem += 'S3_ENDPOINT_URL and credentials on all nodes'
    problems = gather((environment.machine_name(os.environ), problem))
    if dist.get_rank() == 0 and marker[0]:
        with suppress(OSError, UserError):
            object_store.delete(marker[0], retry=RETRY)
    failed = [Finding('same store', False, what, FAILED, host) for host, what in problems if what]
    return failed or [Finding('same store', True, f'{url}: all nodes reach the same objects')]


def _refuses(marker: str, *, if_absent: bool = False, if_tag: str | None = None) -> bool:
    """Return True if the store refuses to write an object because a condition does not hold."""
    try:
        object_store.write(marker, uuid4().hex.encode(), if_absent=if_absent, if_tag=if_tag, retry=RETRY)
    except PreconditionFailed:
        return True
    return False


def measure_upload_speed(url: str, folder: Path, seconds: float, most_bytes: int) -> float:
    """Measure the bytes/s at which this process uploads a file below a URL; the file is deleted afterwards.

    The size grows, up to `most_bytes`, until an upload takes half of `seconds`. Large files are uploaded in parallel
    parts, like a checkpoint.
    """
    marker, path = f'{url}/{marker_name()}', folder / marker_name()
    size, written, speed = CHUNK_BYTES, 0, 0.0
    try:
        while True:
            with path.open('ab') as file:
                while written < size:
                    written += file.write(os.urandom(CHUNK_BYTES))
            begin = time.monotonic()
            object_store.write(marker, path, retry=RETRY)
            elapsed = time.monotonic() - begin
            speed = size / max(elapsed, 1e-6)
            if elapsed > seconds / 2 or size * GROWTH > most_bytes:
                return speed
            size *= GROWTH
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError, UserError):
            object_store.delete(marker, retry=RETRY)


def marker_name() -> str:
    """Return a unique name for a new file or object, since all nodes run the checks at the same time."""
    return f'.preflight-{environment.machine_name(os.environ)}-{uuid4().hex[:8]}'


WRITE_SPEED = 'write speed'
SECONDS = {False: 1.0, True: 4.0}
"""Duration of the write test in seconds, by the value of `deep`; a chunk begun before the end is still completed."""
MOST_BYTES = {False: 2**28, True: 2**31}


@dataclass(frozen=True)
class SaveTime:
    """Estimated duration of a save, and the limits that it must not exceed."""

    seconds: float
    checkpoint_bytes: int
    notice_seconds: float
    """Seconds from the scheduler's signal to the end of the job; infinite if unknown."""
    limit_seconds: float
    """Seconds after which a save counts as a hang and the run is ended."""
    limit_setting: str
    sharded: bool

    def risk(self) -> str:
        """Return a message with a remedy if a save takes longer than a limit allows, else an empty string."""
        estimate = f'a save of {bytes_text(self.checkpoint_bytes)} takes about {self.seconds:.0f} s'
        remedy = '' if self.sharded else 'set parallelism.checkpoints: sharded (needs fsdp2), '
        if self.seconds > self.limit_seconds:
            return (
                f'{estimate}, longer than the limit for a save ({self.limit_seconds:.0f} s), so the run ends; '
                f'{remedy}raise {self.limit_setting}, or use faster storage'
            )
        if self.seconds > self.notice_seconds:
            return (
                f"{estimate}, longer than the scheduler's notice ({self.notice_seconds:.0f} s), so a preempted run "
                f'loses the batches since its last save; {remedy}raise schedule.notice_seconds, or use faster storage'
            )
        return ''


def check_write_speed(recipe: Recipe, checkpoint_bytes: int | None, *, deep: bool) -> list[Finding]:
    """Measure the write speed of the run's storage (longer if `deep`); all ranks return the same findings.

    Rank 0 writes; with sharded checkpoints, one rank per node writes at the same time. If saves seem too slow, the
    finding is only a warning, because the duration of real saves is known only in training.
    """
    sharded = recipe.parallelism.checkpoints == 'sharded'
    writes = os.environ['LOCAL_RANK'] == '0' if sharded else os.environ['RANK'] == '0'
    speed: float | str | None = None
    dist.barrier()
    if writes:
        try:
            if recipe.run_url is None:
                speed = measure_write_speed(recipe.run_dir, SECONDS[deep], MOST_BYTES[deep])
            else:
                speed = measure_upload_speed(recipe.run_url, recipe.run_dir, SECONDS[deep], MOST_BYTES[deep])
        except (OSError, UserError) as error:
            speed = f'{recipe.run_place} cannot be written ({error})'
    speeds = gather(speed)
    if faults := [each for each in speeds if isinstance(each, str)]:
        return [Finding(WRITE_SPEED, False, faults[0], FAILED)]
    known = [each for each in speeds if isinstance(each, float)]
    # The slowest node determines the speed, since all nodes write equal parts of a sharded checkpoint.
    total = min(known) * len(known)
    measured = f'{recipe.run_place}: {total / 1e9:.3g} GB/s'
    if len(known) > 1:
        measured += f' from {len(known)} nodes'
    if checkpoint_bytes is None:
        return [Finding(WRITE_SPEED, True, measured)]
    notice = float(os.environ.get(environment.NOTICE_SECONDS, 'inf'))
    # Ranks wait for a save in a collective, which has a timeout. In launched jobs, the watchdog's limit is lower.
    limit = (float(recipe.trainer.get('dist_timeout') or collective_timeout()), 'trainer.dist_timeout')
    if environment.HANG_SECONDS in os.environ:
        limit = min(limit, (longest_limit(hang_seconds_of()), 'hang_seconds of the job'))
    save = SaveTime(checkpoint_bytes / total, checkpoint_bytes, notice, *limit, sharded)
    if risk := save.risk():
        return [Finding(WRITE_SPEED, True, f'{measured}; {risk}', warns=True)]
    detail = f'{measured}; a save of {bytes_text(checkpoint_bytes)} takes about {save.seconds:.2g} s'
    return [Finding(WRITE_SPEED, True, detail)]


def measure_write_speed(folder: Path, seconds: float, most_bytes: int) -> float:
    """Measure the bytes/s at which this process writes a file to a folder; check its last chunk, and remove the file.

    Writing ends after `seconds` or `most_bytes`, whichever comes first.
    """
    path = folder / marker_name()
    chunk, written = os.urandom(CHUNK_BYTES), 0  # use random bytes, since some file systems compress
    try:
        with path.open('wb', buffering=0) as file:
            begin = time.monotonic()
            # Flush each chunk: otherwise the OS would buffer gigabytes and write them for several minutes.
            while written == 0 or (time.monotonic() - begin < seconds and written < most_bytes):
                written += file.write(chunk)
                os.fdatasync(file.fileno())
            elapsed = time.monotonic() - begin
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drop cached pages, to read back from disk
        with path.open('rb', buffering=0) as file:
            file.seek(written - CHUNK_BYTES)
            if file.read(CHUNK_BYTES) != chunk:
                raise OSError(f'{path}: the data read back differs from the data written')
    finally:
        path.unlink(missing_ok=True)
    return written / max(elapsed, 1e-6)
