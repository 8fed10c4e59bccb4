"""Memory of this machine: available bytes, and how much freed memory a process keeps."""

import ctypes
import re
from pathlib import Path


def available_memory(*, meminfo: Path = Path('/proc/meminfo'), cgroup: Path = Path('/sys/fs/cgroup')) -> int | None:
    """Return the bytes of memory available within the limits of kernel and container (cgroup v2); None if unknown."""
    found = []
    if meminfo.exists():
        line = re.search(r'MemAvailable:\s+(\d+) kB', meminfo.read_text())
        found += [int(line[1]) * 1024] if line else []
    limit, used = cgroup / 'memory.max', cgroup / 'memory.current'
    if limit.exists() and used.exists() and limit.read_text().strip() != 'max':
        found.append(int(limit.read_text()) - int(used.read_text()) + _reclaimable(cgroup / 'memory.stat'))
    return min(found, default=None)


def _reclaimable(statistics: Path) -> int:
    """Return the bytes of cached files that count as used by a container but are freed when memory is needed."""
    # Count these bytes as available: otherwise, a run that writes checkpoints would soon seem to be out of memory.
    line = re.search(r'^inactive_file (\d+)$', statistics.read_text(), re.MULTILINE) if statistics.exists() else None
    return int(line[1]) if line else 0


def keep_freed_memory() -> None:
    """Make this process keep up to 256 MB of freed memory, in blocks of up to 64 MB, for reuse.

    This has no effect unless malloc is glibc's.

    Use it in processes that decode one image after another. By default, glibc returns each image's memory to the
    kernel, which must provide and clear memory again for the next image; this takes 20% to 33% of the time of a
    preparation.
    """
    try:
        mallopt = ctypes.CDLL('libc.so.6').mallopt
    except (OSError, AttributeError):  # malloc is not glibc's, as with musl or on macOS
        return
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
    if not mallopt(mmap_threshold, 64 * 2**20):
        mallopt(mmap_threshold, 32 * 2**20)  # the largest value that old versions of glibc accept
    mallopt(trim_threshold, 256 * 2**20)
