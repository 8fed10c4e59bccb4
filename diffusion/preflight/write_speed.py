"""Measurement of the write speed of the run's folder or bucket, compared with the time that a save may take."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch.distributed as dist

from diffusion.config.byte_sizes import bytes_text
from diffusion.config.recipe import Recipe
from diffusion.errors import UserError
from diffusion.exit_codes import FAILED
from diffusion.launch import environment
from diffusion.launch.findings import Finding
from diffusion.launch.watchdog import collective_timeout, hang_seconds_of, longest_limit
from diffusion.preflight.bucket_check import measure_upload_speed

CHECK = 'write speed'
SECONDS = {False: 1.0, True: 4.0}
"""Seconds to write, by `deep`; the chunk in progress is then completed."""
MOST_BYTES = {False: 2**28, True: 2**31}
CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class SaveTime:
    """Estimated time of a save, and the limits that it must stay below."""

    seconds: float
    checkpoint_bytes: int
    notice_seconds: float
    """Seconds between the scheduler's signal and the end of the job; infinite if unknown."""
    limit_seconds: float
    """Seconds after which a run that is still saving is ended as a hang."""
    limit_setting: str
    """Setting that raises this limit, for messages."""
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
    """Measure the write speed of the run's folder or bucket; all ranks return the same findings; a collective.

    Rank 0 writes, or one rank of each node at the same time if checkpoints are sharded. A save that is too slow is a
    warning, since only the training run shows how long its saves take.

    Args:
        checkpoint_bytes: Size of a checkpoint; None if it is not known.
        deep: True to measure longer.
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
    speeds: list[float | str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(speeds, speed)
    faults = [each for each in speeds if isinstance(each, str)]
    if faults:
        return [Finding(CHECK, False, faults[0], FAILED)]
    known = [each for each in speeds if isinstance(each, float)]
    # Each writer has an equal share of a sharded checkpoint, so the slowest one decides.
    total = min(known) * len(known)
    measured = f'{recipe.run_place}: {total / 1e9:.3g} GB/s'
    if len(known) > 1:
        measured += f' from {len(known)} nodes'
    if checkpoint_bytes is None:
        return [Finding(CHECK, True, measured)]
    notice = float(os.environ.get(environment.NOTICE_SECONDS, 'inf'))
    # The other ranks wait for a save in a collective; in a launched job the watchdog's limit ends a save earlier.
    limit = (float(recipe.trainer.get('dist_timeout') or collective_timeout()), 'trainer.dist_timeout')
    if environment.HANG_SECONDS in os.environ:
        limit = min(limit, (longest_limit(hang_seconds_of()), 'hang_seconds of the job'))
    save = SaveTime(checkpoint_bytes / total, checkpoint_bytes, notice, *limit, sharded)
    if risk := save.risk():
        return [Finding(CHECK, True, f'{measured}; {risk}', warns=True)]
    return [
        Finding(CHECK, True, f'{measured}; a save of {bytes_text(checkpoint_bytes)} takes about {save.seconds:.2g} s')
    ]


def measure_write_speed(folder: Path, seconds: float, most_bytes: int) -> float:
    """Return the bytes/s at which this process writes a file to a folder; the file is read back and removed.

    Raises:
        OSError: The file cannot be written or removed, or its content differs when it is read back.
    """
    path = folder / f'.preflight-{environment.machine_name(os.environ)}-{uuid4().hex[:8]}'
    chunk, written = os.urandom(CHUNK_BYTES), 0  # random, since some file systems compress
    try:
        with path.open('wb', buffering=0) as file:
            begin = time.monotonic()
            # Flush each chunk: otherwise the operating system would take gigabytes at once, and write them for minutes.
            while written == 0 or (time.monotonic() - begin < seconds and written < most_bytes):
                written += file.write(chunk)
                os.fdatasync(file.fileno())
            elapsed = time.monotonic() - begin
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the last chunk is read from disk
        with path.open('rb', buffering=0) as file:
            file.seek(written - CHUNK_BYTES)
            if file.read(CHUNK_BYTES) != chunk:
                raise OSError(f'{path}: reads back other data than was written')
    finally:
        path.unlink(missing_ok=True)
    return written / max(elapsed, 1e-6)
