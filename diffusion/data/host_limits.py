"""Check before the first batch that the machine has enough memory, shared memory, open files and disk for the run.

A run on too small a machine would fail late and with little explanation: a bus error in a worker, a process killed by
the kernel for lack of memory, or "too many open files".
"""

import contextlib
import logging
import math
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer.utils import dist

from diffusion.config.byte_sizes import bytes_text
from diffusion.data.loader import BucketedLoader
from diffusion.data.shared_state import SHM
from diffusion.errors import UserError
from diffusion.storage.host_memory import available_memory

log = logging.getLogger(__name__)

ORDER_BYTES = 8
"""Bytes of shared memory that Streaming's sample order takes on each machine, per sample of an epoch."""
SHUFFLE_BYTES = 72
"""Bytes of memory per sample for creating an epoch's sample order in a process; measured with 10 M samples."""
SHARD_SHM_BYTES = 17
"""Bytes of shared memory per shard: state, access time and signature."""
TENSORS = 6
"""Assumed number of tensors per batch; each is an open file while it passes from a worker to the main process."""
OPEN_FILES = 200
"""Estimated number of files that a rank's process holds open, without those for its workers."""
FILES_PER_WORKER = 10
"""Estimated number of files that a rank's process holds open per worker, without those for tensors in transit."""
MIN_LEFTOVER_BYTES = 64 * 2**20
"""Files that dead runs left in shared memory are reported if their total size in bytes exceeds this."""


@dataclass(frozen=True)
class HostProblem:
    """Message about a shortage on this machine, such as too little memory; `fatal` if the run cannot work at all."""

    message: str
    fatal: bool


def check_machine(loader: BucketedLoader) -> None:
    """Check before training that every machine has enough memory, open files and disk.

    This is a collective call: every rank must make it. One process per machine does the checks. It logs a warning per
    shortage that is not fatal; a fatal shortage on some machine raises UserError on all ranks.
    """
    problems: list[HostProblem] = []
    if dist.get_local_rank() == 0:
        checks = (shared_memory_problems, memory_problems, open_file_problems, disk_problems, cache_problems)
        problems = [problem for check in checks for problem in check(loader)]
        for problem in problems:
            if not problem.fatal:
                log.warning('%s', problem.message)
        warn_about_leftovers()
    fatal = [problem.message for found in dist.all_gather_object(problems) for problem in found if problem.fatal]
    if fatal:
        raise UserError('\n'.join(dict.fromkeys(fatal)))


def shared_memory_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Yield a problem if /dev/shm cannot hold Streaming's sample order (fatal), or this and the workers' batches."""
    if not SHM.is_dir():
        return
    free, dataset = shutil.disk_usage(SHM).free, loader.dataset
    order = ORDER_BYTES * dataset.epoch_size + SHARD_SHM_BYTES * dataset.num_shards
    image = 3 * max(bucket.shape.pixels for bucket in dataset.buckets)  # latents take less
    batches = _processes(loader) * (loader.prefetch_factor or 0) * (loader.batch_size or 1) * image
    if order + batches > free:
        yield HostProblem(
            f'{SHM}: about {bytes_text(order + batches)} needed ({bytes_text(order)} for the order of '
            f'{dataset.epoch_size} samples, the rest for batches of {loader.num_workers} workers per device), '
            f'{bytes_text(free)} free. To fix: enlarge it with docker run --shm-size or mount -o remount,size=, or '
            'lower loader.epoch_size or loader.num_workers',
            # Too little space for batches is not fatal: their estimate assumes that every prefetch slot is full.
            fatal=order > free,
        )


def memory_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Yield a problem if shuffling an epoch takes over half of this machine's free memory (fatal if over all of it)."""
    available, need = available_memory(), SHUFFLE_BYTES * loader.dataset.epoch_size
    if available is not None and need > 0.5 * available:
        yield HostProblem(
            f'memory: shuffling {loader.dataset.epoch_size} samples needs {bytes_text(need)} at the start of an epoch, '
            f'{bytes_text(available)} available. To fix: set loader.epoch_size to a part of the data',
            fatal=need > available,
        )


def open_file_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Raise the soft limit on open files to the number that is needed; yield a problem if the hard limit is lower."""
    # Each tensor that a worker passes to the main process is a file in shared memory, which the receiver holds open.
    need = OPEN_FILES + loader.num_workers * (FILES_PER_WORKER + (loader.prefetch_factor or 0) * TENSORS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        return
    yield HostProblem(
        f'ulimit -n: {loader.num_workers} workers need {need} open files, the limit is {hard}. To fix: raise the '
        'hard limit (docker run --ulimit nofile=65536), or lower loader.num_workers or loader.prefetch_factor',
        fatal=False,
    )


def disk_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Yield a problem for each disk with too little free space for the shards still to be downloaded to it.

    The space needed is the size of all missing shards or, if less, the part of `cache_limit` that is not yet used.
    """
    dataset, budget = loader.dataset, loader.dataset.cache_budget
    # Several streams may share a disk, so add up the missing shards of each device.
    missing: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for stream, shards in dataset.shards_of_streams():
        if stream.source is None:
            continue
        device = os.stat(stream.folder).st_dev
        folders[device] = stream.folder.resolve()
        held = {entry.name for entry in os.scandir(stream.folder)}
        missing[device] = missing.get(device, 0) + sum(
            shard.get_raw_size() for shard in shards if shard.file_pairs[0][0].basename not in held
        )
    for device, need in missing.items():
        folder, free = folders[device], shutil.disk_usage(folders[device]).free
        limit = math.inf if budget is None else max(0, budget.limit_bytes - budget.used_bytes())
        if min(need, limit) > free:
            yield HostProblem(
                f'{folder}: {bytes_text(need)} of shards are still to be downloaded, the disk has {bytes_text(free)} '
                'free. To fix: set loader.cache_limit to less than the disk holds, or use another disk',
                fatal=False,
            )


def cache_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Yield a problem if `cache_limit` is too small for the shards in use at once (fatal) or shuffled together."""
    dataset = loader.dataset
    if dataset.cache_budget is None:
        return
    fetched = [shard for stream, shards in dataset.shards_of_streams() if stream.source for shard in shards]
    largest, whole = max(shard.get_max_size() for shard in fetched), sum(shard.get_raw_size() for shard in fetched)
    limit = dataset.cache_budget.limit_bytes
    # Each process reads one shard while it downloads the next. With less space, processes evict each other's shards
    # before they have been read.
    least = min(2 * _processes(loader), len(fetched)) * largest
    if limit < least:
        yield HostProblem(
            f'loader.cache_limit: {bytes_text(limit)} cannot hold two shards for each of {_processes(loader)} '
            f'processes (one read, one downloaded), of up to {bytes_text(largest)} each. To fix: set it to at least '
            f'{bytes_text(least)}',
            fatal=True,
        )
        return
    shuffled = min(whole, _shuffled_together(loader) * whole / sum(len(shard) for shard in fetched))
    if limit < shuffled:
        yield HostProblem(
            f'loader.cache_limit: {bytes_text(limit)} is less than the {bytes_text(shuffled)} that are shuffled '
            'together, so shards will be downloaded more than once. To fix: raise it, or lower '
            'loader.shuffle_block_size or loader.num_canonical_nodes (only from the start of a run)',
            fatal=False,
        )


def warn_about_leftovers() -> None:
    """Log a warning if /dev/shm has more than MIN_LEFTOVER_BYTES of files that killed runs seem to have left there."""
    sizes: dict[str, int] = {}
    for path in unmapped_files(SHM):
        with contextlib.suppress(FileNotFoundError):
            sizes[path.name[:6]] = sizes.get(path.name[:6], 0) + path.stat().st_size
    # Warn and never delete: a process in another container, which /proc does not show here, may still use the files.
    if sum(sizes.values()) > MIN_LEFTOVER_BYTES:
        largest = sorted(sizes, key=lambda prefix: -sizes[prefix])[:8]
        log.warning(
            '%s: %s left behind by runs that have ended. To fix: rm %s, unless another container uses these files',
            *(SHM, bytes_text(sum(sizes.values())), ' '.join(f'{SHM}/{prefix}_*' for prefix in largest)),
        )


def unmapped_files(folder: Path) -> list[Path]:
    """Return this user's Streaming files in shared memory that no visible process maps: killed runs left them there."""
    # Streaming names its files by a six-digit number per dataset, such as 000003_locals.
    ours = [path for path in folder.glob('[0-9]' * 6 + '_*') if _is_owned(path)]
    # Do not use the pattern */maps: it lists each process's folder, and fails if a process ends meanwhile.
    maps = ''.join(_read_or_empty(path / 'maps') for path in Path('/proc').glob('[0-9]*')) if ours else ''
    return [path for path in ours if str(path) not in maps]


def _is_owned(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended, or belongs to another user
        return ''


def _processes(loader: BucketedLoader) -> int:
    """Return the number of processes on this machine that load samples: its workers or, without workers, its ranks."""
    return max(1, loader.num_workers) * dist.get_local_world_size()


def _shuffled_together(loader: BucketedLoader) -> int:
    """Return the number of samples per machine that are shuffled together or, without shuffling, downloaded ahead."""
    dataset = loader.dataset
    if not dataset.shuffle:
        return (dataset.predownload or 0) * _processes(loader)
    nodes = max(1, dist.get_world_size() // dist.get_local_world_size())
    return (dataset.shuffle_block_size or 0) * max(1, (dataset.num_canonical_nodes or 1) // nodes)
