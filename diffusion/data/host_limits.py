"""Check before the first batch that the machine has enough shared memory, memory, open files and disk for the run.

Without these checks a run fails late and with little explanation: a bus error in a worker, the kernel's out-of-memory
killer, too many open files.
"""

import contextlib
import logging
import math
import os
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer.utils import dist

from diffusion.config.byte_sizes import bytes_text
from diffusion.data.loader import BucketedLoader
from diffusion.errors import UserError

log = logging.getLogger(__name__)

SHM = Path('/dev/shm')
ORDER_BYTES = 8
"""Shared memory per sample of an epoch, on every machine: Streaming's sample order, made at the start of the epoch."""
SHUFFLE_BYTES = 72
"""Memory per sample of an epoch in the process that makes that order; measured with 10 million samples."""
SHARD_SHM_BYTES = 17
"""Shared memory per shard: state, time of last use, signature."""
TENSORS = 6
"""Tensors of a batch; each of them is an open file while a worker hands it over."""
OPEN_FILES = 200
"""Other open files of a process."""
FILES_PER_WORKER = 10
MIN_LEFTOVER_BYTES = 64 * 2**20
"""Shared memory of ended runs below this size is not reported."""


@dataclass(frozen=True)
class HostProblem:
    """A shortage of the machine; `fatal` if the run cannot work with it."""

    what: str
    fatal: bool


def check_machine(loader: BucketedLoader) -> None:
    """Compare what training needs with what the machine has, in one process per machine, and warn on shortages.

    Raises:
        UserError: A shortage on any machine is fatal; raised on all ranks.
    """
    problems: list[HostProblem] = []
    if dist.get_local_rank() == 0:
        problems = [
            *shared_memory_problems(loader),
            *memory_problems(loader),
            *open_file_problems(loader),
            *disk_problems(loader),
            *cache_problems(loader),
        ]
        for problem in problems:
            if not problem.fatal:
                log.warning('%s', problem.what)
        note_leftovers()
    fatal = [problem.what for found in dist.all_gather_object(problems) for problem in found if problem.fatal]
    if fatal:
        raise UserError('\n'.join(dict.fromkeys(fatal)))


def shared_memory_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Check shared memory, which holds Streaming's sample order and batches that workers hand over."""
    if not SHM.is_dir():
        return
    free, dataset = shutil.disk_usage(SHM).free, loader.dataset
    order = ORDER_BYTES * dataset.epoch_size + SHARD_SHM_BYTES * dataset.num_shards
    batches = _processes(loader) * (loader.prefetch_factor or 0) * _batch_bytes(loader)
    if order + batches > free:
        yield HostProblem(
            f'{SHM}: about {bytes_text(order + batches)} will be needed, {bytes_text(order)} for the order of '
            f'{dataset.epoch_size} samples and the rest for batches of {loader.num_workers} workers a device, and '
            f'{bytes_text(free)} are free. Way out: docker run --shm-size, or mount -o remount,size=; a smaller '
            'loader.epoch_size; fewer loader.num_workers',
            fatal=order > free,
        )


def memory_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Check the memory that shuffling an epoch takes."""
    available, need = available_memory(), SHUFFLE_BYTES * loader.dataset.epoch_size
    if available is not None and need > 0.5 * available:
        yield HostProblem(
            f'memory: shuffling {loader.dataset.epoch_size} samples takes {bytes_text(need)} at the start of an epoch, '
            f'and {bytes_text(available)} are available. Way out: a loader.epoch_size of a part of the data',
            fatal=need > available,
        )


def open_file_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Check the limit of open files, which batches from workers are too, and raise the soft limit if needed."""
    need = OPEN_FILES + loader.num_workers * (FILES_PER_WORKER + (loader.prefetch_factor or 0) * TENSORS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        return
    yield HostProblem(
        f'ulimit -n: {loader.num_workers} workers need {need} open files, and {hard} are allowed. Way out: raise the '
        'hard limit (docker run --ulimit nofile=65536), or fewer loader.num_workers or a smaller prefetch_factor',
        fatal=False,
    )


def disk_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Check that each file system has room for the shards that will be downloaded to it, or for the cache limit."""
    dataset = loader.dataset
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
        limit = math.inf if dataset.room is None else max(0, dataset.room.limit_bytes - dataset.room.used_bytes())
        if min(need, limit) > free:
            yield HostProblem(
                f'{folder}: {bytes_text(need)} of shards are yet to be fetched, and its disk has {bytes_text(free)} '
                'free. Way out: a loader.cache_limit below what the disk holds, or another disk',
                fatal=False,
            )


def cache_problems(loader: BucketedLoader) -> Iterator[HostProblem]:
    """Check that `cache_limit` holds the shards in use at once, and warn if it cannot hold those shuffled together."""
    dataset = loader.dataset
    if dataset.room is None:
        return
    fetched = [shard for stream, shards in dataset.shards_of_streams() if stream.source for shard in shards]
    largest, whole = max(shard.get_max_size() for shard in fetched), sum(shard.get_raw_size() for shard in fetched)
    limit = dataset.room.limit_bytes
    least = min(2 * _processes(loader), len(fetched)) * largest
    if limit < least:
        yield HostProblem(
            f'loader.cache_limit: {bytes_text(limit)} cannot hold what {_processes(loader)} processes read and fetch '
            f'at once, two shards each of up to {bytes_text(largest)}. Way out: at least {bytes_text(least)}',
            fatal=True,
        )
        return
    shuffled = min(whole, _shuffled_together(loader) * whole / sum(len(shard) for shard in fetched))
    if limit < shuffled:
        yield HostProblem(
            f'loader.cache_limit: {bytes_text(limit)} hold less than the {bytes_text(shuffled)} that are shuffled '
            'together, so that shards are fetched more than once. Way out: a larger one, or a smaller '
            'loader.shuffle_block_size or num_canonical_nodes (from the start of a run)',
            fatal=False,
        )


def available_memory(*, meminfo: Path = Path('/proc/meminfo'), cgroup: Path = Path('/sys/fs/cgroup')) -> int | None:
    """Return the bytes that processes may still allocate, by the kernel and by the container; None if unknown.

    Args:
        meminfo: The kernel's file.
        cgroup: The container's folder of limits (cgroup v2).
    """
    found = []
    if meminfo.exists():
        line = re.search(r'MemAvailable:\s+(\d+) kB', meminfo.read_text())
        found += [int(line[1]) * 1024] if line else []
    limit, used = cgroup / 'memory.max', cgroup / 'memory.current'
    if limit.exists() and used.exists() and limit.read_text().strip() != 'max':
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found, default=None)


def note_leftovers() -> None:
    """Warn about shared memory that killed runs seem to have left behind."""
    sizes: dict[str, int] = {}
    for path in unmapped(SHM):
        with contextlib.suppress(FileNotFoundError):
            sizes[path.name[:6]] = sizes.get(path.name[:6], 0) + path.stat().st_size
    # A process in another container may still use these files, which cannot be seen from here: nothing is deleted.
    if sum(sizes.values()) > MIN_LEFTOVER_BYTES:
        largest = sorted(sizes, key=lambda prefix: -sizes[prefix])[:8]
        log.warning(
            '%s: %s are of runs that have ended. Unless another container has them in use: rm %s',
            *(SHM, bytes_text(sum(sizes.values())), ' '.join(f'{SHM}/{prefix}_*' for prefix in largest)),
        )


def unmapped(folder: Path) -> list[Path]:
    """Return this user's shared memory files of Streaming that no visible process has mapped."""
    ours = [path for path in folder.glob('[0-9]' * 6 + '_*') if _is_ours(path)]
    maps = ''.join(_readable(path) for path in Path('/proc').glob('[0-9]*/maps')) if ours else ''
    return [path for path in ours if str(path) not in maps]


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _readable(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended, or belongs to another user
        return ''


def _processes(loader: BucketedLoader) -> int:
    """Return the number of processes of this machine that read samples."""
    return max(1, loader.num_workers) * dist.get_local_world_size()


def _batch_bytes(loader: BucketedLoader) -> int:
    """Return the approximate bytes of a batch of images; latents take less."""
    largest = max(bucket.shape.pixels for bucket in loader.dataset.buckets)
    return 3 * largest * (loader.batch_size or 1)


def _shuffled_together(loader: BucketedLoader) -> int:
    """Return the number of samples whose shards a machine uses at once."""
    dataset = loader.dataset
    if not dataset.shuffle:
        return (dataset.predownload or 0) * _processes(loader)
    nodes = max(1, dist.get_world_size() // dist.get_local_world_size())
    return (dataset.shuffle_block_size or 0) * max(1, (dataset.num_canonical_nodes or 1) // nodes)
